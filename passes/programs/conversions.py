"""Conversions of a parameter or of its gradient: the lines that turn a value of one type into one of another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...compiler.layout.collectives import lower
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Placement, Split, TensorType
from ...compiler.layout.stretches import count
from ...compiler.program.program import Origin, Ref, Value
from ...compiler.program.rewriter import LineWriter

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
