"""The writer of a program that a step runs once: its one function, line by line."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ...compiler.capture.node_facts import StoredAs, noted
from ...compiler.layout.collectives import lower
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Placement, Split, TensorType
from ...compiler.layout.stretches import count
from ...compiler.program.actions import UNSHARD
from ...compiler.program.binding import Binding
from ...compiler.program.program import Origin, Program, Ref, Value
from ...compiler.program.rewriter import ORIGIN, LineWriter
from .emit import identifier, size_argument
from .segments import node_type

# ---- conversions of a parameter or of its gradient: the lines that turn a value of one type into one of another.


Conversion = tuple[str, tuple[Any, ...], Mapping[str, Any], TensorType]
"""A line without its names: operator, arguments behind the operand, options, and the result's type."""


def conversions(before: TensorType, after: TensorType, mesh: Mesh) -> Iterator[Conversion]:
    """Yield the lines that turn a value of one type into another: a cast, one collective for each axis, and padding
    that goes before a cut, and comes off after a gather. So weights travel in the type in which they are read, and
    gradients in the type in which they are summed."""
    if before.dtype != after.dtype:
        before = replace(before, dtype=after.dtype)
        yield "aten._to_copy.default", (), {"dtype": after.dtype}, before
    sizes = [(dim, 1, *pair) for dim, pair in enumerate(zip(before.shape, after.shape, strict=True))]
    for dim, outer, short, long in (row for row in sizes if row[2] < row[3]):
        before = replace(before, shape=_with_size(before.shape, dim, long))
        yield "parc.grow_pad.default", (dim, outer, short, long), {}, before
    for axes in _order(before.placement, after.placement, mesh):
        placement = before.placement.replace({axis: after.placement[axis] for axis in axes})
        lowered = lower(",".join(axes), before.placement, placement, mesh)
        before = replace(before, placement=placement)
        if lowered is not None:
            yield *lowered, {}, before
    for dim, outer, long, short in (row for row in sizes if row[2] > row[3]):
        before = replace(before, shape=_with_size(before.shape, dim, short))
        yield "parc.cut_pad.default", (dim, outer, short, long), {}, before


def _with_size(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _order(before: Placement, after: Placement, mesh: Mesh) -> list[tuple[str, ...]]:
    """Return the axes whose type changes, gathers of the innermost parts first, cuts into the outermost parts first.
    Sub-axes that act as one axis before and after move in one message."""
    units: list[tuple[str, ...]] = []
    for axes in (*mesh.together, *((axis,) for axis in mesh.names)):
        one = before.as_one(axes, mesh) is not None and after.as_one(axes, mesh) is not None
        if one and not any(axis in unit for unit in units for axis in axes):
            units.append(axes)
    units.sort(key=lambda unit: mesh.names.index(unit[0]))

    def turn(axes: tuple[str, ...]) -> int:
        kind, target = before[axes[0]], after[axes[0]]
        if isinstance(target, Split):
            return count(target.outer)
        return -count(kind.outer) if isinstance(kind, Split) else 0

    return sorted((unit for unit in units if any(before[axis] != after[axis] for axis in unit)), key=turn)


def emit_conversions(writer: LineWriter, value: Value, after: TensorType, origin: Origin) -> Value:
    """Add the lines that turn a value into one of another type, and return that one. Their results are named after the
    value: ``whole_head_weight`` is ``head_weight`` gathered."""
    base = value.name
    for op, args, options, type_ in conversions(value.type, after, writer.mesh):
        name = f"{_word(value.type, type_)}_{base}"
        value = writer.emit(op, (Ref(value.name), *args), type_, origin, name, **options)
    return value


def _word(before: TensorType, after: TensorType) -> str:
    """Return the word for a value of one type that was made of another."""
    if before.dtype != after.dtype:
        return "wide" if after.dtype.itemsize > before.dtype.itemsize else "narrow"
    if before.shape != after.shape:
        return "padded" if math.prod(after.shape) > math.prod(before.shape) else "real"
    return "part" if len(after.placement.split_axes()) > len(before.placement.split_axes()) else "whole"


# ---- the writer of a program that a step runs once: its one function, line by line.


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


# ---- uNSHARD


def unshard(graph: fx.Graph, mesh: Mesh, role: str, read: Collection[Binding]) -> Program:
    """Write UNSHARD of a role: it makes the weights that its work reads, once a step."""
    write, returns = Writer(mesh), []
    stored: dict[Binding, Value] = {}
    for node in graph.find_nodes(op="placeholder"):
        storage, binding = noted(node).storage, noted(node).binding
        if storage is None or weight_of(storage) not in read:
            continue
        if binding not in stored:
            stored[binding] = write.take(identifier(binding.name), storage.rest, binding)
        returns.append(
            (weight_of(storage), emit_conversions(write, stored[binding], storage.step, storage.origin).name)
        )
    return write.program(role, UNSHARD, returns)


def weight_of(storage: StoredAs) -> Binding:
    """The binding of what is made of a stored parameter once a step."""
    return Binding("weight", storage.name)


def stored_type(node: fx.Node) -> TensorType:
    """The type of a parameter between steps."""
    storage = noted(node).storage
    type_ = node_type(node)
    return storage.rest if storage is not None else replace(type_, placement=type_.placement.data())
