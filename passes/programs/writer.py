"""The writer of a program that a step runs once: its one function, line by line."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Placement, Split, TensorType
from ...compiler.program.binding import Binding
from ...compiler.program.program import Origin, Program, Ref, Value
from ...compiler.program.rewriter import ORIGIN, LineWriter
from .conversions import emit_conversions
from .emit import identifier, size_argument


def whole_type(mesh: Mesh, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> TensorType:
    """The type of a value that every rank holds whole."""
    return TensorType(dtype, shape, Placement.whole(mesh))


@dataclass(frozen=True, slots=True)
class Across:
    """The ranks with which the REDUCE of one role sums: all along the pipeline's axis, and for a parameter of several
    roles those of these roles."""

    axis: str
    ranks: Sequence[int]
    tied: Mapping[str, Sequence[int]]
    elsewhere: Collection[str]
    """The parameters of several roles that another role counts in the norm."""


class Writer(LineWriter):
    """The one function of such a program under construction; with ``across`` it is that of one of several roles."""

    def __init__(self, mesh: Mesh, across: Across | None = None) -> None:
        super().__init__(mesh)
        self.across = across

    def stacked_sum(self, values: Sequence[Value]) -> Value:
        """Add the sum of values of one type, each a single number."""
        row = replace(values[0].type, shape=(len(values),))
        stacked = self.emit("aten.stack.default", ([Ref(value.name) for value in values],), row)
        return self.emit("aten.sum.default", (Ref(stacked.name),), values[0].type)

    def zeros(self, type_: TensorType, origin: Origin = ORIGIN) -> Value:
        """Add a line of zeros, the summand of a role that has no part of a sum."""
        shape = [size_argument(type_, dim) for dim in range(len(type_.shape))]
        return self.emit("aten.full.default", (shape, 0.0), type_, origin, "zeros", dtype=type_.dtype)

    def total(self, value: Value, origin: Origin = ORIGIN) -> Value:
        """Add the sum over the axes on which a value is partial."""
        axes = value.type.placement.partial
        if not axes:
            return value
        return self.emit("parc.all_reduce", (Ref(value.name), ",".join(axes)), summed_type(value.type), origin)

    def among(self, value: Value, ranks: Sequence[int], origin: Origin = ORIGIN) -> Value:
        """Add the sum over roles, where there are several."""
        if self.across is None:
            return value
        args = Ref(value.name), self.across.axis, list(ranks)
        return self.emit("parc.all_reduce_among", args, value.type, origin)

    def gradient(self, name: str, made: Value | None, stored: TensorType, origin: Origin) -> Value:
        """Add a gradient's sum over this role's ranks, in the type in which its parameter is ``stored``; zeros, if no
        stage of the role makes it."""
        if made is None:  # they read the parameter where no gradient flows
            return self.zeros(stored, origin)
        value = self.take(identifier(name), made.type, Binding("gradient", name))
        cut = {axis: kind for axis, kind in stored.placement.items() if isinstance(kind, Split)}
        wanted = replace(stored, placement=made.type.placement.replace(cut))
        return self.total(emit_conversions(self, value, wanted, origin), origin)

    def times(self, value: Value, number: Value, origin: Origin) -> Value:
        """Add the product with a number of float32, of the value's type: beside a single number of a narrower type,
        torch gives the wider one."""
        dtype = value.type.dtype if value.type.shape else torch.promote_types(value.type.dtype, number.type.dtype)
        args = Ref(value.name), Ref(number.name)
        made = self.emit("aten.mul.Tensor", args, replace(value.type, dtype=dtype), origin, "unscaled")
        return emit_conversions(self, made, value.type, origin)

    def program(self, role: str, action: str, returns: Sequence[tuple[Binding, str]]) -> Program:
        """Return the program of an action, with all that was written as its one function."""
        self.returns = dict(returns)
        return Program(role, action, self.mesh, (self.function(action.lower()),))


def summed_type(type_: TensorType) -> TensorType:
    """Return a type with nothing left to sum."""
    return replace(type_, placement=type_.placement.replace(dict.fromkeys(type_.placement.partial, "I")))
