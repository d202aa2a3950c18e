"""Writers of programs: the conversions of a parameter or its gradient between types, the ``Writer`` of a program that a
step runs once, and UNSHARD."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ...compiler.capture.node_facts import StoredAs, noted
from ...compiler.layout.collectives import COLLECTIVES, lower
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Placement, Split, TensorType
from ...compiler.layout.stretches import count
from ...compiler.program.actions import UNSHARD
from ...compiler.program.binding import Binding
from ...compiler.program.program import Origin, Program, Ref, Value
from ...compiler.program.rewriter import ORIGIN, LineWriter
from .emit import identifier, size_argument
from .segments import data_type

NO_CAUSES: Mapping[str, int] = MappingProxyType({})
"""No lines of the plan by axis: messages are caused by what their origin says."""
Conversion = tuple[str, tuple[Any, ...], Mapping[str, Any], TensorType]
"""A line without its names: operator, arguments after the operand, options, and the result's type."""


def conversions(before: TensorType, after: TensorType, mesh: Mesh) -> Iterator[Conversion]:
    """Yield the lines that convert a value to another type: a cast, padding before a cut, one collective for each axis,
    and the cut of padding after a gather. So weights travel in the dtype in which they are read, and gradients in the
    dtype in which they are summed."""
    if before.dtype != after.dtype:
        before = replace(before, dtype=after.dtype)
        yield "aten._to_copy.default", (), {"dtype": after.dtype}, before
    sizes = [(dim, 1, *pair) for dim, pair in enumerate(zip(before.shape, after.shape, strict=True))]
    for dim, outer, short, long in (row for row in sizes if row[2] < row[3]):
        before = replace(before, shape=_with_size(before.shape, dim, long))
        yield "parc.grow_pad.default", (dim, outer, short, long), {}, before
    for axes in _changed_axes(before.placement, after.placement, mesh):
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


def _changed_axes(before: Placement, after: Placement, mesh: Mesh) -> list[tuple[str, ...]]:
    """Return the axes whose type changes in order: gathers of the innermost parts first, cuts into the outermost parts
    first. Sub-axes that act as one axis before and after move in one message."""
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


def emit_conversions(
    writer: LineWriter, value: Value, after: TensorType, origin: Origin, causes: Mapping[str, int] = NO_CAUSES
) -> Value:
    """Add the lines that convert a value to another type, and return the result. Names follow the value's:
    ``whole_head_weight`` is ``head_weight`` gathered. ``causes`` are lines of the plan that cause messages over axes,
    in place of that of the ``origin``."""
    base = value.name
    for op, args, options, type_ in conversions(value.type, after, writer.mesh):
        name = f"{_change_word(value.type, type_)}_{base}"
        place = caused(origin, causes, COLLECTIVES[op].axes(args)) if op in COLLECTIVES else origin
        value = writer.emit(op, (Ref(value.name), *args), type_, place, name, **options)
    return value


def caused(origin: Origin, causes: Mapping[str, int], axes: Iterable[str]) -> Origin:
    """Return the origin of a message over some axes: that of the first axis that has a cause, else as it is."""
    return replace(origin, plan=next((causes[axis] for axis in axes if axis in causes), origin.plan))


def _change_word(before: TensorType, after: TensorType) -> str:
    """Return the word for a value after a conversion."""
    if before.dtype != after.dtype:
        return "wide" if after.dtype.itemsize > before.dtype.itemsize else "narrow"
    if before.shape != after.shape:
        return "padded" if math.prod(after.shape) > math.prod(before.shape) else "real"
    return "part" if len(after.placement.split_axes()) > len(before.placement.split_axes()) else "whole"


# ---- the writer of a program of one function


def whole_type(mesh: Mesh, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> TensorType:
    """The type of a value that every rank holds whole."""
    return TensorType(dtype, shape, Placement.whole(mesh))


@dataclass(frozen=True, slots=True)
class Across:
    """The roles with which the program of one role sums."""

    axis: str
    """The pipeline's axis."""
    ranks: Sequence[int]
    """All ranks along it."""
    tied: Mapping[str, Sequence[int]]
    """The ranks that share a parameter of several roles, by its name."""
    elsewhere: Collection[str]
    """The parameters of several roles that another role counts in the norm."""


class Writer(LineWriter):
    """The one function of a program that a step runs once, under construction; ``across`` are the other roles to sum
    with, if there are any."""

    def __init__(self, mesh: Mesh, across: Across | None = None) -> None:
        super().__init__(mesh)
        self.across = across

    def stacked_sum(self, values: Sequence[Value]) -> Value:
        """Add the sum of values of one type, each a single number."""
        row = replace(values[0].type, shape=(len(values),))
        stacked = self.emit("aten.stack.default", ([Ref(value.name) for value in values],), row)
        return self.emit("aten.sum.default", (Ref(stacked.name),), values[0].type)

    def zeros(self, type_: TensorType, origin: Origin = ORIGIN) -> Value:
        """Add zeros, the summand of a role that has no part of a sum."""
        shape = [size_argument(type_, dim) for dim in range(len(type_.shape))]
        return self.emit("aten.full.default", (shape, 0.0), type_, origin, "zeros", dtype=type_.dtype)

    def total(self, value: Value, origin: Origin = ORIGIN, causes: Mapping[str, int] = NO_CAUSES) -> Value:
        """Add the sum over the axes on which a value is partial."""
        axes = value.type.placement.partial
        if not axes:
            return value
        place = caused(origin, causes, axes)
        return self.emit("parc.all_reduce", (Ref(value.name), ",".join(axes)), summed_type(value.type), place)

    def among(self, value: Value, ranks: Sequence[int], origin: Origin = ORIGIN) -> Value:
        """Add the sum over roles, where there are several."""
        if self.across is None:
            return value
        args = Ref(value.name), self.across.axis, list(ranks)
        return self.emit("parc.all_reduce_among", args, value.type, origin)

    def gradient(
        self, name: str, gradient: Value | None, stored: TensorType, origin: Origin, causes: Mapping[str, int]
    ) -> Value:
        """Add a gradient's sum over this role's ranks, in the type in which its parameter is ``stored``; zeros, if no
        stage of the role returns it. ``causes`` are the plan's lines that cause it, by axis."""
        if gradient is None:  # the role's stages read the parameter where no gradient flows
            return self.zeros(stored, origin)
        value = self.take(identifier(name), gradient.type, Binding("gradient", name))
        cut = {axis: kind for axis, kind in stored.placement.items() if isinstance(kind, Split)}
        wanted = replace(stored, placement=gradient.type.placement.replace(cut))
        return self.total(emit_conversions(self, value, wanted, origin, causes), origin, causes)

    def times(self, value: Value, number: Value, origin: Origin) -> Value:
        """Add the product with a float32 number, in the value's dtype. Torch promotes a scalar of a narrower dtype,
        which is cast back."""
        dtype = value.type.dtype if value.type.shape else torch.promote_types(value.type.dtype, number.type.dtype)
        args = Ref(value.name), Ref(number.name)
        product = self.emit("aten.mul.Tensor", args, replace(value.type, dtype=dtype), origin, "unscaled")
        return emit_conversions(self, product, value.type, origin)

    def program(self, role: str, action: str, returns: Sequence[tuple[Binding, str]]) -> Program:
        """Return the program of an action, whose one function is the lines written."""
        self.returns = dict(returns)
        return Program(role, action, self.mesh, (self.function(action.lower()),))


def summed_type(type_: TensorType) -> TensorType:
    """Return a type with nothing left to sum."""
    return replace(type_, placement=type_.placement.replace(dict.fromkeys(type_.placement.partial, "I")))


# ---- UNSHARD


def unshard(graph: fx.Graph, mesh: Mesh, role: str, read: Collection[Binding]) -> Program:
    """Write UNSHARD of a role: once a step it converts stored parameters to the weights that its work reads."""
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
    """The binding of the weight that UNSHARD makes of a stored parameter."""
    return Binding("weight", storage.name)


def stored_type(node: fx.Node) -> TensorType:
    """The type of a parameter between steps."""
    storage = noted(node).storage
    return storage.rest if storage is not None else data_type(node)
