"""``shard``: the placement of a tensor, the primitive of all placements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from ...grammar.diagnostics import Diagnostic
from ...grammar.syntax import Layout
from ...grammar.usage import Arguments
from ..constraints import Fix, read_layout
from ..directive import Directive, Scope


@dataclass(frozen=True)
class Shard(Directive):
    """Places parameters or inputs on every axis of the mesh: split where the layout says so, whole on the others."""

    USAGE = "shard VALUES LAYOUT"
    ONCE = False

    constraint: Fix

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        (layout,) = arguments.items("layout")
        assert isinstance(layout, Layout)
        return cls(arguments, Fix(arguments.words("values"), read_layout(layout)[0], arguments.statement.span))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        (layout,) = self.arguments.items("layout")
        assert isinstance(layout, Layout)
        dims, errors = read_layout(layout)
        yield from errors
        for dim in dims:
            for axis in dim.axes:
                yield from scope.check_axis(axis)
