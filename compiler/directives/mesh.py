"""``mesh``: the ranks, along named axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from ...grammar.codes_language import BAD_VALUE, WRONG_KIND
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.syntax import Number
from ...grammar.usage import Arguments
from ..directive import Directive, Scope, check_unique
from ..mesh import Mesh


@dataclass(frozen=True)
class MeshLine(Directive):
    """The ranks, arranged along named axes, outermost (slowest links) first.

    The world size is the product of the sizes. Without this line there is one rank.
    """

    USAGE = "mesh NAME=VALUE, ..."

    mesh: Mesh

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        axes: dict[str, int] = {}
        for binding in arguments.bindings("name"):
            if isinstance(binding.value, Number) and binding.value.is_integer:
                axes.setdefault(binding.name.text, max(int(binding.value.value), 1))
            else:
                axes.setdefault(binding.name.text, 1)
        return cls(arguments, Mesh(tuple(axes.items())))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        bindings = self.arguments.bindings("name")
        yield from check_unique(tuple(binding.name for binding in bindings), "axis")
        for binding in bindings:
            value, label = binding.value, Label(binding.value.span)
            if not isinstance(value, Number) or not value.is_integer:
                message = f"the size of `{binding.name.text}` is not a whole number"
                yield Diagnostic(WRONG_KIND, message, label, help=f"write `{binding.name.text}=2`")
            elif value.value < 1:
                message = f"the axis `{binding.name.text}` has size {value.text}"
                yield Diagnostic(BAD_VALUE, message, label, help="sizes are 1 or more; 1 turns an axis off")
