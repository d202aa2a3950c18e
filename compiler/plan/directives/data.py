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

    `bytes "GLOB", "GLOB"`: the bytes of text files as tokens. Globs are relative to the plan's folder; `{stdlib}` in
    one is the folder of the running Python's standard library. The input named `tokens` gets the bytes, and the input
    named `targets` the byte after each. Without these names the first whole-number input that the loss does not use
    gets the bytes, and the first that the loss uses gets the targets. Bytes go to 255: a model of text has 256 rows and
    classes, or as many as the files' letters need.

    `"package.module:name" (name=value)` or `"./file.py:name"`: a callable that gets the global number of a sample (and
    the arguments). It returns a dict of tensors, its inputs by name, without the dim of the batch: `{"picture":
    picture, "label": torch.tensor(3)}`. `parc check` and `parc build` look at sample 0, if it can be made.

    `synthetic`: random samples for a first run and for measuring. They are drawn from `seed` and each sample's number,
    so that every mesh trains on the same. Whole numbers are below the count of rows that they look up, or of classes of
    the loss, and 0 or 1 where nothing says so. Real numbers are normal.
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
