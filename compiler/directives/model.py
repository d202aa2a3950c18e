"""``model``: what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from ...grammar.diagnostics import Diagnostic
from ...grammar.syntax import String
from ...grammar.usage import Arguments
from ..directive import Directive, Literal, Scope, check_callable, check_literals, read_literals


@dataclass(frozen=True)
class Model(Directive):
    """The model: any callable that returns an `nn.Module`, as `"package.module:name"` or `"./file.py:name"`.

    The plan's folder is importable. Arguments are numbers, strings, `true`, `false` and `none`, given by name.
    """

    USAGE = "model CALLABLE [ARGS]"

    callable: str
    values: tuple[tuple[str, Literal], ...]

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        (item,) = arguments.items("callable")
        assert isinstance(item, String)
        return cls(arguments, item.text, read_literals(arguments.bindings("args")))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from check_callable(self.arguments, "callable")
        yield from check_literals(self.arguments, "args")
