"""Typed collectives: their effect on a placement and on the pieces of a group of ranks, the bytes that each sends, and
the buffers that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .mesh import Mesh, Shape
from .packed_rows import EXCHANGE, chosen_types, exchange_rows
from .pieces import join_dim, packed_bytes, parts_in_order, round_int8, round_parts, slice_dim
from .placement import AxisType, Placement, Split, TensorType, along
from .stretches import Outer, count, joined_stretches, terms

# ---- buffers


@dataclass(frozen=True, slots=True)
class Buffers:
    """The bytes that a collective needs beside its operand and its result, over gloo: a blocking one needs ``at_once``,
    a message ``travelling`` until it is awaited and ``on_arrival`` while its result is put together. A message that
    ``holds`` its operand sends it from where it lies, others send a copy."""

    at_once: int = 0
    travelling: int = 0
    on_arrival: int = 0
    holds: bool = False


SMALL_SUM = 1 << 16
"""The bytes from which a tensor is all-reduced by itself; smaller ones of a message travel in one packed copy."""


def gather_buffers(operand: int, result: int, args: Sequence[Any]) -> Buffers:
    """Return the buffers of an all-gather: parts are received in place in the result, or apart and then joined."""
    apart = 0 if parts_in_order(*args[1:]) else result
    return Buffers(at_once=result, travelling=apart, on_arrival=apart, holds=True)


def sum_buffers(operand: int, result: int, args: Sequence[Any]) -> Buffers:
    """Return the buffers of an all-reduce, which is made in place in the operand or a copy: small ones travel
    packed."""
    return Buffers(travelling=operand if operand < SMALL_SUM else 0)


def scatter_buffers(operand: int, result: int, args: Sequence[Any]) -> Buffers:
    """Return the buffers of a reduce-scatter: the parts of all ranks are received, to be summed into the first; what is
    sent is the operand, or cut from it."""
    cut = 0 if parts_in_order(*args[1:]) else operand
    return Buffers(at_once=2 * operand + cut, travelling=operand - result + cut, holds=not cut)


def exchange_buffers(operand: int, result: int, args: Sequence[Any]) -> Buffers:
    """Return the buffers of an all-to-all: both what is sent and what is received is put together."""
    sent = 2 * operand + (0 if parts_in_order(*args[3:]) else operand)
    return Buffers(at_once=sent, travelling=2 * operand, on_arrival=operand)


def rows_buffers(operand: int, result: int, args: Sequence[Any]) -> Buffers:
    """Return the buffers of an exchange of packed rows: a copy of the rows that are sent, and of those that are
    received, in the order of ranks, unless they lie in that order."""
    sent = 0 if parts_in_order(*args[3:5]) else operand
    received = 0 if parts_in_order(*args[1:3]) else result
    return Buffers(at_once=sent + received, travelling=sent + received, on_arrival=received, holds=not sent)


def round_buffers(operand: int, result: int, args: Sequence[Any]) -> Buffers:
    """Return the buffers of rounding to int8: parts that are not contiguous are rounded apart."""
    return Buffers(at_once=0 if parts_in_order(*args[1:]) else operand)


def packed_scatter_buffers(operand: int, result: int, args: Sequence[Any]) -> Buffers:
    """Return the buffers of a reduce-scatter of float32 in int8: the packed parts that are sent and received, and each
    received one, unpacked."""
    return Buffers(at_once=operand // 2 + result, travelling=operand // 2, on_arrival=result)


def packed_gather_buffers(operand: int, result: int, args: Sequence[Any]) -> Buffers:
    """Return the buffers of an all-gather of float32 in int8: what is sent and received is packed, and unpacked in
    place in the result, or apart and then joined."""
    packed, apart = (operand + result) // 4, 0 if parts_in_order(*args[1:]) else result
    return Buffers(at_once=packed + apart, travelling=packed, on_arrival=apart)


# ---- ring attention
# A ring's line means an all-gather of keys and values along the sequence and an attention on these; its backward also
# reduce-scatters their gradients. No rank ever holds the keys of the whole sequence (Liu, Zaharia and
# Abbeel, "Ring attention with blockwise transformers for near-infinite context", 2023).
#
#     out, lse = parc.ring_attention(q, 'cp', k, v, mask, key, causal, scale, p)
#     gq, gk, gv = parc.ring_attention_backward(grad, 'cp', q, k, v, mask, key, out, lse, causal, scale, p)
#
# With n ranks a line has n - 1 hops to the next rank of the axis, each with the keys and values of one rank. Gradients
# follow their keys in n - 1 hops more, in float32 or a wider type, and end where these came from.


SEQUENCE = 2
"""The dim of queries, keys and values [b, h, s, d] along which ranks have parts."""


@dataclass(frozen=True, slots=True)
class RingRow:
    """One operator of rings: the attention of one rank that it stands for, and the position of keys, with values behind
    them, among the arguments of both, not counting the axis."""

    attention: str
    keys: int
    carries_gradients: bool = False

    def inner(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments of the operator of one rank, for those of a line."""
        return [args[0], *args[2:]]

    def line(self, axes: str, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments of a line, for those of the operator of one rank."""
        return (args[0], axes, *args[1:])


RINGS = {
    "parc.ring_attention": RingRow("parc.attention.default", 1),
    "parc.ring_attention_backward": RingRow("parc.attention_backward.default", 2, carries_gradients=True),
}
"""The operators of rings."""


def travelling_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients travel and are summed."""
    return torch.promote_types(dtype, torch.float32)


# ---- rows of collectives


class TypeFault(ValueError):
    """The error of declared types that do not follow from a line's operator and operands."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A row of the table of collectives. ``group`` maps the pieces of a group (in axis order) to their results."""

    axes: Callable[[Sequence[Any]], tuple[str, ...]]
    result: Callable[[TensorType, Mesh, Sequence[Any]], TensorType]
    group: Callable[[Sequence[torch.Tensor], Sequence[Any]], list[torch.Tensor]]
    communicates: bool = True
    keeps: bool = False
    """True where the entries of the result are entries of operands: nothing is reduced."""
    sent: Callable[[int, int], int] = lambda payload, ranks: payload * (ranks - 1) // ranks
    """Return the bytes that a rank sends for its payload among some ranks, in a ring (Patarasuk and Yuan, "Bandwidth
    optimal all-reduce algorithms for clusters of workstations", 2009)."""
    packed: Callable[[int], int] | None = None
    """Return the number of parts of an operand that travels as int8, each packed alone, among some ranks."""
    buffers: Callable[[int, int, Sequence[Any]], Buffers] = lambda operand, result, args: Buffers()
    """Return what is needed beside an operand and a result of so many bytes."""
    beside: Callable[[TensorType, TensorType], tuple[TensorType, ...]] = lambda before, after: ()
    """Return the types of further operands, the last of the arguments, for an operand and its result; a rank's piece is
    then a tuple of all its operands."""
    travelling: Callable[[Sequence[TensorType]], Sequence[TensorType]] = lambda operands: operands[:1]
    """Return the types of what a rank sends, for those of the operands."""
    members: Callable[[Sequence[Any]], tuple[int, ...] | None] = lambda args: None
    """Return the positions in a group that take part, if not all do: the other ranks do not run the line."""

    def groups(self, mesh: Mesh, args: Sequence[Any]) -> list[list[int]]:
        """Return the groups of ranks that run the collective together."""
        members = self.members(args)
        groups = mesh.groups(self.axes(args))
        return groups if members is None else [[group[place] for place in members] for group in groups]


def axes_of(args: Sequence[Any]) -> tuple[str, ...]:
    """Return the mesh axes in a collective's arguments, from ``"dp,tp"``."""
    return tuple(str(args[0]).split(","))


def local_outer(placement: Placement, mesh: Mesh, axis: str) -> Outer:
    """Return the ``outer`` of the split over ``axis`` on a rank: divided by the axes that are major to it."""
    kind = placement[axis]
    assert isinstance(kind, Split)
    splits = placement.splits(kind.dim)
    return joined_stretches([(size, _local_count(equal, mesh, axis)) for size, equal in terms(_unit(splits), splits)])


def _local_count(splits: Sequence[tuple[int, str]], mesh: Mesh, axis: str) -> int:
    outer = next(parts for parts, name in splits if name == axis)
    return outer // math.prod(mesh.size(name) for parts, name in splits if count(parts) < count(outer) and name != axis)


def global_outer(placement: Placement, mesh: Mesh, dim: int, outer: Outer) -> Outer:
    """Return the ``outer`` of a split that a rank makes of its piece at ``(dim, outer)``; the inverse of
    ``local_outer``.

    Raises:
        ValueError: it falls across what splits the dim already.
    """
    splits = [*placement.splits(dim), (outer, "")]
    stretches = []
    for stretch, equal in terms(_unit(splits), splits):
        *others, (number, _) = equal
        inner = number
        for position, name in others:
            # an axis major to the cut multiplies what lies before it
            if count(_local_count(others, mesh, name)) <= count(number) and count(position) <= count(inner):
                inner *= mesh.size(name)
        stretches.append((stretch, inner))
    return joined_stretches(stretches)


def _unit(splits: Sequence[tuple[Outer, str]]) -> int:
    """Return a size that is a multiple of the number of parts of all the splits."""
    return math.prod(outer if isinstance(outer, int) else sum(outer) for outer, _ in splits)


def _require(type_: TensorType, axis: str, kind: AxisType, mesh: Mesh, what: str) -> None:
    have = type_.placement[axis]
    if ("I" if have == "R" else have) != kind:
        raise TypeFault(f"{what} over `{axis}` needs {kind} but the operand `{type_.text(mesh)}` is {have} there")


def _with_kinds(type_: TensorType, changes: dict[str, AxisType]) -> TensorType:
    return replace(type_, placement=type_.placement.replace(changes))


def _split_at(type_: TensorType, mesh: Mesh, axes: Sequence[str], dim: int, outer: Outer) -> dict[str, AxisType]:
    """Return the global splits of a shard that a rank cuts at local ``(dim, outer)`` over ``axes``, major first."""
    return along(axes, Split(dim, global_outer(type_.placement, mesh, dim, outer)), mesh)


def _all_reduce(type_: TensorType, mesh: Mesh, args: Sequence[Any]) -> TensorType:
    for axis in axes_of(args):
        _require(type_, axis, "P", mesh, "all_reduce")
    return _with_kinds(type_, dict.fromkeys(axes_of(args), "I"))


def _among(type_: TensorType, mesh: Mesh, args: Sequence[Any]) -> TensorType:
    """Return the type of a sum over some coordinates of the pipeline's axis, whose roles have different programs."""
    (axis,), ranks = axes_of(args), args[1]
    _require(type_, axis, "I", mesh, "all_reduce_among")
    if list(ranks) != sorted(set(ranks)) or not ranks or not all(0 <= rank < mesh.size(axis) for rank in ranks):
        raise TypeFault(f"all_reduce_among over {ranks}, which are not coordinates of `{axis}` in order")
    return type_


def _check_split(type_: TensorType, mesh: Mesh, args: Sequence[Any], what: str) -> tuple[str, ...]:
    """Return the axes of a collective, over which its operand must be split at local ``(dim, outer)`` as if over
    one."""
    axes, dim, outer = axes_of(args), *args[1:3]
    kind = type_.placement[axes[0]]
    if not isinstance(kind, Split) or kind.dim != dim or local_outer(type_.placement, mesh, axes[0]) != outer:
        raise TypeFault(f"{what} over `{args[0]}` at dim {dim}, outer {outer}: `{type_.text(mesh)}` is {kind} there")
    if any(type_.placement[axis] != part for axis, part in along(axes, kind, mesh).items()):
        raise TypeFault(f"{what} over `{args[0]}`: `{type_.text(mesh)}` is not split over them as over one")
    return axes


def _gathered(what: str, kind: AxisType) -> Callable[[TensorType, Mesh, Sequence[Any]], TensorType]:
    """Return the function that computes the type of a result that is ``kind`` over the axes, from one that is split."""
    return lambda type_, mesh, args: _with_kinds(type_, dict.fromkeys(_check_split(type_, mesh, args, what), kind))


def _scattered(what: str, kind: AxisType) -> Callable[[TensorType, Mesh, Sequence[Any]], TensorType]:
    """Return the function that computes the type of a result that is split over the axes, from one that is ``kind``."""

    def result(type_: TensorType, mesh: Mesh, args: Sequence[Any]) -> TensorType:
        axes, dim, outer = axes_of(args), *args[1:]
        for axis in axes:
            _require(type_, axis, kind, mesh, what)
        return _with_kinds(type_, _split_at(type_, mesh, axes, dim, outer))

    return result


def _all_to_all(type_: TensorType, mesh: Mesh, args: Sequence[Any]) -> TensorType:
    axes = _check_split(type_, mesh, args, "all_to_all")
    gathered = _with_kinds(type_, dict.fromkeys(axes, "I"))
    return _with_kinds(gathered, _split_at(gathered, mesh, axes, *args[3:5]))


def _row_max(type_: TensorType, mesh: Mesh, args: Sequence[Any]) -> TensorType:
    axes = axes_of(args) if args[0] else ()
    last = len(type_.shape) - 1
    split = {axis for _, axis in type_.placement.splits(last)}
    if split != set(axes) or type_.placement.partial:
        raise TypeFault(f"row_max over `{args[0]}` of `{type_.text(mesh)}`: its last dim is split over other axes")
    result = _with_kinds(type_, dict.fromkeys(axes, "I"))
    return TensorType(type_.dtype, (*type_.shape[:-1], 1), result.placement)


def _sum(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    total = pieces[0].clone()
    for piece in pieces[1:]:
        total += piece
    return total


def _group_sum(pieces: Sequence[torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor]:
    return [_sum(pieces)] * len(pieces)


def _group_gather(pieces: Sequence[torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor]:
    return [join_dim(pieces, *args[1:])] * len(pieces)


def _group_shard(pieces: Sequence[torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor]:
    return [slice_dim(piece, len(pieces), i, *args[1:]) for i, piece in enumerate(pieces)]


def _group_scatter_int8(pieces: Sequence[torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor]:
    ranks, dtype = len(pieces), pieces[0].dtype
    wide = travelling_dtype(dtype)
    parts = ([round_int8(slice_dim(piece, ranks, i, *args[1:])).to(wide) for piece in pieces] for i in range(ranks))
    return [_sum(of_ranks).to(dtype) for of_ranks in parts]


def _group_pad(pieces: Sequence[torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor]:
    _, dim, outer = args
    zeros = [torch.zeros_like(piece) for piece in pieces]
    return [join_dim([*zeros[:i], piece, *zeros[i + 1 :]], dim, outer) for i, piece in enumerate(pieces)]


def _group_all_to_all(pieces: Sequence[torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor]:
    _, dim, outer, to_dim, to_outer = args
    whole = join_dim(pieces, dim, outer)
    return [slice_dim(whole, len(pieces), i, to_dim, to_outer) for i in range(len(pieces))]


def _group_row_max(pieces: Sequence[torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor]:
    peak = torch.stack([piece.detach().amax(-1, keepdim=True) for piece in pieces]).amax(0)
    return [peak] * len(pieces)


def _round_int8(type_: TensorType, mesh: Mesh, args: Sequence[Any]) -> TensorType:
    """Return the type unchanged: each part of the dim that will be sent over the axes is rounded by itself."""
    _, dim, outer = args
    ranks = math.prod(mesh.size(axis) for axis in _some_axes(args))
    pieces = ranks * (outer if isinstance(outer, int) else sum(outer))
    divides = pieces > 0 and type_.local(mesh)[dim] % pieces == 0
    if type_.dtype == torch.float64 or not type_.dtype.is_floating_point or not divides:
        raise TypeFault(f"round_int8 of `{type_.text(mesh)}` in {ranks} parts of dim {dim}")
    return type_


def _group_round_int8(pieces: Sequence[torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor]:
    return [round_parts(piece, len(pieces) if args[0] else 1, *args[1:]) for piece in pieces]


def _some_axes(args: Sequence[Any]) -> tuple[str, ...]:
    return axes_of(args) if args[0] else ()


def _around_twice(payload: int, ranks: int) -> int:
    return 2 * payload * (ranks - 1) // ranks


def _to_all_others(payload: int, ranks: int) -> int:
    return payload * (ranks - 1)


def _ring_row(op: str) -> Collective:
    """Return the row of a ring; checks read the lines that it stands for (`program/plain.py`)."""
    row = RINGS[op]

    def unread(*_: Any) -> Any:
        raise TypeFault(f"{op} stands for several lines: these are checked")

    def travelling(operands: Sequence[TensorType]) -> list[TensorType]:
        keys = operands[row.keys : row.keys + 2]
        gradients = [TensorType(travelling_dtype(type_.dtype), type_.shape, type_.placement) for type_ in keys]
        return [*keys, *gradients * row.carries_gradients]

    return Collective(axes_of, unread, unread, sent=_to_all_others, travelling=travelling)


COLLECTIVES: dict[str, Collective] = {
    "parc.all_reduce": Collective(axes_of, _all_reduce, _group_sum, sent=_around_twice, buffers=sum_buffers),
    "parc.all_reduce_among": Collective(
        axes_of, _among, _group_sum, sent=_around_twice, members=lambda args: tuple(args[1])
    ),
    "parc.all_gather": Collective(
        axes_of, _gathered("all_gather", "I"), _group_gather, keeps=True, sent=_to_all_others, buffers=gather_buffers
    ),
    "parc.reduce_scatter": Collective(
        axes_of, _scattered("reduce_scatter", "P"), lambda pieces, args: _group_shard(_group_sum(pieces, args), args),
        buffers=scatter_buffers,
    ),
    "parc.all_to_all": Collective(axes_of, _all_to_all, _group_all_to_all, keeps=True, buffers=exchange_buffers),
    EXCHANGE: Collective(axes_of, _all_to_all, exchange_rows, keeps=True, buffers=rows_buffers, beside=chosen_types),
    "parc.row_max": Collective(_some_axes, _row_max, _group_row_max, sent=_around_twice),
    # these two move no bytes between ranks, but a rank must know its coordinate
    "parc.shard": Collective(axes_of, _scattered("shard", "I"), _group_shard, communicates=False, keeps=True),
    "parc.pad": Collective(axes_of, _gathered("pad", "P"), _group_pad, communicates=False),
    "parc.wait": Collective(
        lambda args: (), lambda type_, mesh, args: type_, lambda pieces, args: list(pieces), communicates=False,
        keeps=True,
    ),
    "parc.round_int8": Collective(
        _some_axes, _round_int8, _group_round_int8, communicates=False, buffers=round_buffers
    ),
    "parc.reduce_scatter_int8": Collective(
        axes_of, _scattered("reduce_scatter_int8", "P"), _group_scatter_int8, packed=lambda ranks: ranks,
        buffers=packed_scatter_buffers,
    ),
    "parc.all_gather_int8": Collective(
        axes_of, _gathered("all_gather_int8", "I"),
        lambda pieces, args: _group_gather([round_int8(piece) for piece in pieces], args), sent=_to_all_others,
        packed=lambda ranks: 1, buffers=packed_gather_buffers,
    ),
    **{op: _ring_row(op) for op in RINGS},
}  # fmt: skip
"""``op(x, axes, …)`` as programs spell them; dims and ``outer`` of their arguments count *local* entries."""
WAIT = "parc.wait"
"""The line that waits for the result of a collective that was started as a ``message``."""
MESSAGE = "message"
"""The keyword of a line that starts a message: its number. Consecutive lines with one number travel together."""
SUMS = ("parc.all_reduce", "parc.all_reduce_among")
"""The all-reduces, which may run while other lines do, and may write their result over their operand."""


def lower(axes: str, before: Placement, after: Placement, mesh: Mesh) -> tuple[str, tuple[Any, ...]] | None:
    """Return the operator and the arguments of a conversion over ``axes``; None where no byte changes."""
    axis = axes.split(",")[0]
    source, result = before[axis], after[axis]
    if before.data() == after.data():
        return None

    def at(placement: Placement) -> tuple[int, Outer]:
        kind = placement[axis]
        assert isinstance(kind, Split)
        return kind.dim, local_outer(placement, mesh, axis)

    if isinstance(source, Split):
        if isinstance(result, Split):
            return "parc.all_to_all", (axes, *at(before), *at(after))
        return ("parc.pad" if result == "P" else "parc.all_gather"), (axes, *at(before))
    if isinstance(result, Split):
        return ("parc.reduce_scatter" if source == "P" else "parc.shard"), (axes, *at(after))
    if source == "P" and result != "P":
        return "parc.all_reduce", (axes,)
    raise TypeFault(f"there is no conversion from {source} to {result}")


def payload_bytes(op: str, shape: Shape, itemsize: int, ranks: int = 1) -> int:
    """Return the bytes that one rank puts into the collective among some ranks, once, for an operand of local
    ``shape``."""
    if packed := COLLECTIVES[op].packed:
        return packed_bytes(math.prod(shape), packed(ranks))
    return math.prod(shape[:-1] if op == "parc.row_max" else shape) * itemsize
