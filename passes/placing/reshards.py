"""Conversions that no line asked for, and those that cannot be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import AxisType, TensorType
from ...compiler.program.program import Origin


@dataclass(frozen=True, slots=True)
class Reshard:
    """A conversion that no line asked for explicitly: what it moves, and the operator ``reader`` that needed it.
    ``asked``: it gathers few heads, about which there is a note of its own, or what a line splits between products.
    ``attends``: attention makes or reads the value. ``learns``: gradients flow through it. ``whole``: a line keeps the
    value whole, whose maker is split. ``bytes`` are those of a rank's part, ``itemsize`` those of an entry."""

    value: str
    source: AxisType
    result: AxisType
    axis: str
    cause: Origin
    bytes: int
    reader: str
    asked: bool
    attends: bool
    learns: bool
    whole: bool
    itemsize: int


class UnevenTokens(ValueError):
    """The error of tokens that do not divide among the ranks of an axis, which share the experts of a module."""

    def __init__(self, axes: str, chosen: TensorType, mesh: Mesh, origin: Origin) -> None:
        self.axes = frozenset(axes.split(","))
        self.ranks = math.prod(map(mesh.size, self.axes))
        tokens = chosen.local(mesh)[1]
        super().__init__(f"the {tokens} tokens of a rank that go to `{origin.module}` do not divide")
