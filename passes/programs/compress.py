"""Compression: gradients summed over an axis in fewer bytes, with error feedback: the residual of rounding is added to
the next step's gradient."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...compiler.layout.collectives import lower
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Placement, Split, TensorType, along
from ...compiler.program.binding import Binding
from ...compiler.program.program import Origin, Ref, Value
from ...compiler.program.step_values import residual
from ...compiler.resolve.requests import Compression, Levels, ShardDims
from .emit import identifier
from .two_levels import cuts_over
from .writer import Writer, emit_conversions


@dataclass(slots=True)
class Compressor:
    """The writer of compressed sums. Over axes in two levels (``levels``) they are exact reduce-scatters inside nodes,
    and compressed across. ``larger`` are the choices for a larger model, whose twin this is."""

    wanted: Mapping[str, Compression] = field(default_factory=dict)
    levels: Levels = field(default_factory=dict)
    larger: ShardDims | None = None
    dims: dict[tuple[str, str], tuple[int, bool] | None] = field(default_factory=dict)
    """The dim along which each gradient is cut for its sum, by name and axes."""
    whole: dict[str, int] = field(default_factory=dict)
    """The bytes of gradients that are sent as they are, by name."""

    def sums(
        self,
        write: Writer,
        name: str,
        gradient: Value | None,
        stored: TensorType,
        unscale: Value | None,
        origin: Origin,
    ) -> list[Value]:
        """Add the compressed sum of a gradient, and return it in its parameter's storage type, with its residual;
        return nothing where no line compresses it, or none can: None stands for a gradient that several roles sum. The
        gradient is divided by the loss scale first, if there is one, since the residual is added to the next step's
        gradient."""
        demand = self.wanted.get(name)
        if demand is None:
            return []
        origin, mesh = replace(origin, plan=demand.line), write.mesh
        within_nodes = {part for axis, across in self.levels.items() for part in mesh.parts(axis)[across:]}
        part = self._part(name, demand.axes, within_nodes, stored, mesh)
        axes = tuple(axis for axis in demand.axes if axis not in within_nodes)
        # for a parameter that is sharded within nodes, the reduce-scatter inside is exact, the sum across is compressed
        axes = tuple(axis for axis in axes if not isinstance(stored.placement[axis], Split)) or axes
        type_ = replace(part, placement=part.placement.replace(dict.fromkeys(axes, "P")))
        cut = self._cut(name, axes, demand.format, type_, part, mesh)
        if gradient is not None and any(gradient.type.placement[axis] != "P" for axis in axes):
            return []
        if cut is None or gradient is None:
            self.whole[name] = stored.local_bytes(mesh)
            return []
        value = write.take(identifier(name), gradient.type, Binding("gradient", name))
        split = {axis: kind for axis, kind in part.placement.items()
                 if isinstance(kind, Split) and axis not in axes}  # fmt: skip
        value = emit_conversions(write, value, replace(part, placement=gradient.type.placement.replace(split)), origin)
        if others := [axis for axis in value.type.placement.partial if axis not in axes]:
            value = write.emit("parc.all_reduce", (Ref(value.name), ",".join(others)), type_, origin)
        value = value if unscale is None else write.times(value, unscale, origin)
        left = write.take(f"left_of_{identifier(name)}", value.type, residual(name))
        value = write.emit("aten.add.Tensor", (Ref(value.name), Ref(left.name)), value.type, origin)
        way = _as_float16 if demand.format == "fp16" else _as_int8
        value, left = way(write, value, part, cut, axes, origin)
        value = emit_conversions(write, value, replace(stored, dtype=value.type.dtype), origin)  # in the narrow type
        return [emit_conversions(write, value, stored, origin), left]

    def _part(
        self, name: str, axes: Sequence[str], within_nodes: Collection[str], stored: TensorType, mesh: Mesh
    ) -> TensorType:
        """Return the type of a gradient after the sum within nodes: sharded over the node, as the parameter is stored
        or along the first dim that divides; else whole."""
        free = tuple(axis for axis in axes if axis in within_nodes and not isinstance(stored.placement[axis], Split))
        partial = replace(stored, placement=stored.placement.replace(dict.fromkeys(axes, "P")))
        cut = self._dim(name, free, dict(cuts_over(partial, free, mesh))) if free else None
        if cut is None:
            return stored
        return replace(stored, placement=stored.placement.replace({axis: cut[axis] for axis in free}))

    def _cut(
        self, name: str, axes: Sequence[str], format_: str, type_: TensorType, stored: TensorType, mesh: Mesh
    ) -> Placement | None:
        """Return the placement after the reduce-scatter of an int8 sum, or the stored one for float16, which is summed
        in one collective; None where the gradient cannot be compressed."""
        kinds = {axis: stored.placement[axis] for axis in axes}
        first = kinds[axes[0]]
        if isinstance(first, Split) and kinds != along(axes, first, mesh):
            return None
        if format_ == "fp16":  # scalars are not compressed
            return stored.placement if stored.dtype.itemsize > 2 and stored.shape else None
        if stored.dtype.itemsize not in (2, 4):
            return None
        return (
            stored.placement if isinstance(first, Split) else self._dim(name, axes, dict(cuts_over(type_, axes, mesh)))
        )

    def _dim(self, name: str, axes: Sequence[str], cuts: Mapping[int, Placement]) -> Placement | None:
        """Choose the dim along which a gradient is cut, note it, and return the placement after the cut."""
        key, dim = (name, ",".join(axes)), next(iter(cuts), None)
        if self.larger is not None:
            dim, _ = self.larger.get(key) or (None, False)
        self.dims[key] = None if dim is None else (dim, False)
        return None if dim is None else cuts.get(dim)


def _as_float16(
    write: Writer, value: Value, stored: TensorType, cut: Placement, axes: Sequence[str], origin: Origin
) -> tuple[Value, Value]:
    """Return the sum, which stays in float16, and the residual of this rank's cast."""
    half = replace(value.type, dtype=torch.float16)
    sent = emit_conversions(write, value, half, origin)
    back = emit_conversions(write, sent, value.type, origin)
    left = write.emit("aten.sub.Tensor", (Ref(value.name), Ref(back.name)), value.type, origin, "left")
    split = {axis: kind for axis, kind in cut.items() if isinstance(kind, Split)}
    summed = emit_conversions(write, sent, replace(half, placement=value.type.placement.replace(split)), origin)
    return write.total(summed, origin), left


def _as_int8(
    write: Writer, value: Value, stored: TensorType, cut: Placement, axes: Sequence[str], origin: Origin
) -> tuple[Value, Value]:
    """Return the sum of the ranks' int8 values, and the residual: of this rank's gradient, and of its part of the sum
    where that is rounded and sent again."""
    mesh, text, before = write.mesh, ",".join(axes), value.type.placement

    def emit(op: str, operand: Value, args: tuple[object, ...], placement: Placement) -> Value:
        return write.emit(op, (Ref(operand.name), *args), replace(value.type, placement=placement), origin)

    def difference(whole: Value, rounded: Value) -> Value:
        return write.emit("aten.sub.Tensor", (Ref(whole.name), Ref(rounded.name)), whole.type, origin, "left")

    _, args = lower(text, before, cut, mesh) or ("", ())
    sent = emit("parc.round_int8", value, args, before)
    left = difference(value, sent)
    part = emit("parc.reduce_scatter_int8", sent, args, cut)
    if cut == stored.placement:
        return part, left
    again = emit("parc.round_int8", part, ("", args[1], 1), cut)
    kept = emit("parc.pad", difference(part, again), args, before)
    left = write.emit("aten.add.Tensor", (Ref(left.name), Ref(kept.name)), left.type, origin, "left")
    return emit("parc.all_gather_int8", again, args, stored.placement), left
