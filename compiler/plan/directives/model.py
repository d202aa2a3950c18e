"""``model``: the model that is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.diagnostics import Diagnostic
from ..directive import Directive, Literal, Scope, argument, check_callable, check_literals, read_literals


@dataclass(frozen=True)
class Model(Directive):
    """The model: any callable that returns an `nn.Module`, as `"package.module:name"` or `"./file.py:name"`.

    The plan's folder is importable, and is the current folder while the model is made: paths among the arguments count
    from it. Files that a model's code asks of the Hugging Face Hub must be downloaded already, unless
    `HF_HUB_OFFLINE=0` is set. Arguments are numbers, strings, `true`, `false` and `none`, given by name.
    """

    USAGE = "model CALLABLE [ARGS]"

    callable: str = argument(lambda line: line.text("callable"))
    values: tuple[tuple[str, Literal], ...] = argument(lambda line: read_literals(line.bindings("args")))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from check_callable(self.arguments, "callable")
        yield from check_literals(self.arguments, "args")
