"""``data``: the source of samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes_language import BAD_VALUE
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.syntax import String
from ..directive import Directive, Literal, Scope, argument, check_callable, check_literals, read_literals


@dataclass(frozen=True)
class Data(Directive):
    """The source of samples.

    `bytes "GLOB", "GLOB"`: the bytes of text files as tokens; globs are relative to the plan's folder, and `{stdlib}`
    in one is the folder of the running Python's standard library. The input named `tokens`, else the first whole-number
    input that the loss does not use, gets the bytes; the one named `targets`, else the first that the loss uses, the
    byte after each. Bytes go to 255: a model of text has 256 rows and classes, or as many as the files' letters need.

    `"package.module:name" (name=value)` or `"./file.py:name"`: a callable that is given the global number of a sample
    (and the arguments) and returns a dict of tensors, its inputs by name, without the dim of the batch:
    `{"picture": picture, "label": torch.tensor(3)}`. `parc check` and `parc build` look at sample 0, where it can be
    made.

    `synthetic`: random samples for a first run and for measuring, drawn from `seed` and each sample's number, so that
    every mesh trains on the same: whole numbers below the rows that they look up or the classes of the loss, 0 or 1
    where nothing says so; normal real numbers.
    """

    USAGE = "data bytes GLOBS | synthetic | CALLABLE [ARGS]"

    globs: tuple[str, ...] = argument(
        lambda given: tuple(item.text for item in given.items("bytes") if isinstance(item, String))
    )
    callable: str | None = argument(lambda given: given.text("callable") or None)
    values: tuple[tuple[str, Literal], ...] = argument(lambda given: read_literals(given.bindings("args")))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from check_callable(self.arguments, "callable")
        yield from check_literals(self.arguments, "args")
        for item in self.arguments.items("bytes"):
            if isinstance(item, String) and not item.text.strip():
                yield Diagnostic(BAD_VALUE, "the glob is empty", Label(item.span), help='write as `"texts/*.txt"`')
