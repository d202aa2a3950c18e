"""Conversions that no line asked for, and those that cannot be."""

from __future__ import annotations

from dataclasses import dataclass

from ...compiler.layout.placement import AxisType
from ...compiler.program.program import Origin


@dataclass(frozen=True, slots=True)
class Reshard:
    """A conversion that no line asked for explicitly: what it moves, and the operator ``reader`` that needed it.
    ``heads``: it gathers few heads, about which there is a note of its own."""

    value: str
    source: AxisType
    result: AxisType
    axis: str
    cause: Origin
    bytes: int
    reader: str
    heads: bool


class RowsAlike(ValueError):
    """The error of an axis that splits experts, but not the tokens that go to them."""

    def __init__(self, axis: str, origin: Origin) -> None:
        super().__init__(f"`{axis}` splits the experts of `{origin.module}`, but not the tokens that go to them")
        self.axis, self.origin = axis, origin
