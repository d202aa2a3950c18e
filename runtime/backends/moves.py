"""Collectives on torch.distributed: those that run at once, and messages of one or several tensors that are started and
later awaited."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...compiler.layout.collectives import SMALL_SUM, WAIT
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.packed_rows import RankOrder, Rows, orders
from ...compiler.layout.pieces import (
    join_dim,
    pack,
    packed_bytes,
    parts_in_order,
    round_parts,
    slice_dim,
    sum_packed,
    unpack,
)

Axes = tuple[str, ...]


class Peers(Protocol):
    """One rank's view of the groups that it is in."""

    mesh: Mesh

    @property
    def native_reduce_scatter(self) -> bool:
        """True where torch's reduce-scatter sums, and gathers travel packed: with NCCL."""

    def index(self, axes: Axes) -> int:
        """Return this rank's place in its group over some axes."""

    def meet(self, run: Callable[..., Any], *args: Any, axes: Axes, **options: Any) -> Any:
        """Run one of torch's collectives with the other ranks of a group."""

    def tag(self, axes: Axes) -> int:
        """Return the tag of the next tensors that ranks of a group send each other."""


Run = Callable[[Peers, Any, Sequence[Any], Axes], Tensor]


def group_size(axes: Sequence[str], mesh: Mesh) -> int:
    """Return the number of ranks in a group over some axes."""
    return math.prod(mesh.size(axis) for axis in axes)


def _all_gather(backend: Peers, piece: Tensor, args: Sequence[Any], axes: Axes) -> Tensor:
    _, dim, outer = args
    piece = piece.contiguous()
    pieces = [torch.empty_like(piece) for _ in range(group_size(axes, backend.mesh))]
    backend.meet(dist.all_gather, pieces, piece, axes=axes)
    return join_dim(pieces, dim, outer)


def _exchange(backend: Peers, parts: list[Tensor], axes: Axes) -> Tensor:
    """Send part i to the group's i-th rank, and return the received parts, stacked in rank order."""
    sent = torch.stack(parts)
    received = torch.empty_like(sent)
    backend.meet(dist.all_to_all_single, received, sent, axes=axes)
    return received


def _reduce_scatter(backend: Peers, piece: Tensor, args: Sequence[Any], axes: Axes) -> Tensor:
    """Exchange parts and sum them locally in rank order: on gloo this is faster than its reduce_scatter, and
    deterministic."""
    _, dim, outer = args
    ranks = group_size(axes, backend.mesh)
    parts = [slice_dim(piece, ranks, index, dim, outer) for index in range(ranks)]
    if backend.native_reduce_scatter:
        result = torch.empty_like(parts[0])
        backend.meet(dist.reduce_scatter, result, parts, axes=axes)
        return result
    return _exchange(backend, parts, axes).sum(0)


def _round_int8(backend: Peers, piece: Tensor, args: Sequence[Any], axes: Axes) -> Tensor:
    return round_parts(piece, group_size(axes, backend.mesh), *args[1:])


def all_to_all(backend: Peers, piece: Tensor, args: Sequence[Any], axes: Axes) -> Tensor:
    """Change the dim along which a tensor is sharded, or the split of that dim."""
    _, dim, outer, to_dim, to_outer = args
    if dim == to_dim:
        return _regroup(backend, piece, dim, outer, to_outer, axes)
    ranks = group_size(axes, backend.mesh)
    parts = [slice_dim(piece, ranks, index, to_dim, to_outer) for index in range(ranks)]
    return join_dim(_exchange(backend, parts, axes).unbind(0), dim, outer)


def _regroup(backend: Peers, piece: Tensor, dim: int, outer: int, to_outer: int, axes: Axes) -> Tensor:
    """Change the split of one dim; the sizes of the exchanged parts differ from pair to pair of ranks."""
    ranks, index = group_size(axes, backend.mesh), backend.index(axes)
    places = torch.arange(piece.shape[dim] * ranks)
    before = [slice_dim(places, ranks, rank, 0, outer) for rank in range(ranks)]
    after = [slice_dim(places, ranks, rank, 0, to_outer) for rank in range(ranks)]
    to_send = [torch.isin(before[index], theirs).nonzero().flatten().to(piece.device) for theirs in after]
    to_receive = [torch.isin(after[index], theirs).nonzero().flatten().to(piece.device) for theirs in before]
    rows = piece.movedim(dim, 0)
    sent = torch.cat([rows.index_select(0, chosen) for chosen in to_send])
    received = torch.empty_like(sent)
    sizes = [len(chosen) for chosen in to_receive], [len(chosen) for chosen in to_send]
    backend.meet(dist.all_to_all_single, received, sent, *sizes, axes=axes)
    result = torch.empty_like(received)
    result[torch.cat(to_receive)] = received
    return result.movedim(0, dim).contiguous()


def _exchange_rows(backend: Peers, piece: Rows, args: Sequence[Any], axes: Axes) -> Tensor:
    received, coming, _ = send_rows(backend, piece, args, axes)
    return coming.packed(received)


def send_rows(
    backend: Peers, piece: Rows, args: Sequence[Any], axes: Axes, **options: Any
) -> tuple[Tensor, RankOrder, Any]:
    """Exchange packed rows. Return the received rows, their order, and what all_to_all_single returns."""
    rows, before, after = piece
    leaving, coming = orders(before, after, group_size(axes, backend.mesh), args)
    received = rows.new_empty(sum(coming.sizes), *rows.shape[1:])
    sizes, sent = (coming.sizes, leaving.sizes), leaving.ordered(rows).contiguous()
    return received, coming, backend.meet(dist.all_to_all_single, received, sent, *sizes, axes=axes, **options)


def _row_max(backend: Peers, piece: Tensor, args: Sequence[Any], axes: Axes) -> Tensor:
    peak = piece.amax(-1, keepdim=True)
    if axes:
        backend.meet(dist.all_reduce, peak, op=dist.ReduceOp.MAX, axes=axes)
    return peak


def _slice_locally(backend: Peers, piece: Tensor, args: Sequence[Any], axes: Axes) -> Tensor:
    return slice_dim(piece, group_size(axes, backend.mesh), backend.index(axes), *args[1:])


def _pad_to_whole(backend: Peers, piece: Tensor, args: Sequence[Any], axes: Axes) -> Tensor:
    parts = [torch.zeros_like(piece)] * group_size(axes, backend.mesh)
    parts[backend.index(axes)] = piece
    return join_dim(parts, *args[1:])


RUN: Mapping[str, Run] = {
    "parc.all_gather": _all_gather,
    "parc.reduce_scatter": _reduce_scatter,
    "parc.all_to_all": all_to_all,
    "parc.exchange": _exchange_rows,
    "parc.row_max": _row_max,
    "parc.shard": _slice_locally,
    "parc.pad": _pad_to_whole,
    "parc.round_int8": _round_int8,
    WAIT: lambda backend, piece, args, axes: piece,
}


# ---- messages

_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The collectives of one tensor; newer versions of torch renamed them."""
Args = Sequence[Sequence[Any]]
"""The arguments of the collective after its operand, for each tensor of a message."""
Started = tuple[list[Tensor], Callable[[], None]]
"""Results in flight, and the function that waits for them and fills them."""


def _start_gather(backend: Peers, pieces: Sequence[Tensor], args: Args, axes: Axes) -> Started:
    ranks = group_size(axes, backend.mesh)
    if backend.native_reduce_scatter:
        return _packed_gather(
            backend, pieces, args, axes, torch.flatten, lambda row, place: place.copy_(row.view_as(place))
        )
    results = [_alloc(piece, dim, piece.shape[dim] * ranks) for piece, (_, dim, _) in zip(pieces, args, strict=True)]
    sent = [[piece.contiguous()] * ranks for piece in pieces]
    # parts that are contiguous in the result are received in place
    rows = [
        list(result.chunk(ranks)) if parts_in_order(*split) else [torch.empty_like(piece[0]) for _ in range(ranks)]
        for result, piece, (_, *split) in zip(results, sent, args, strict=True)
    ]
    wait = _exchanged(backend, sent, rows, axes)

    def arrive() -> None:
        wait()
        for result, parts, (_, dim, outer) in zip(results, rows, args, strict=True):
            if not parts_in_order(dim, outer):
                result.copy_(join_dim(parts, dim, outer))
            parts.clear()

    return results, arrive


def _start_scatter(backend: Peers, pieces: Sequence[Tensor], args: Args, axes: Axes) -> Started:
    """Exchange the parts, and sum them locally in rank order once they have arrived."""
    ranks = group_size(axes, backend.mesh)
    parts = [
        [slice_dim(piece, ranks, index, *split) for index in range(ranks)]
        for piece, (_, *split) in zip(pieces, args, strict=True)
    ]
    if backend.native_reduce_scatter:
        results = [torch.empty_like(row[0]) for row in parts]
        return results, _packed_scatter(backend, parts, axes, results)
    rows = [[torch.empty_like(part) for part in row] for row in parts]
    wait = _exchanged(backend, parts, rows, axes)
    results = [row[0] for row in rows]

    def arrive() -> None:
        wait()
        for result, received in zip(results, rows, strict=True):
            for part in received[1:]:
                result.add_(part)
            received.clear()

    return results, arrive


def _exchanged(
    backend: Peers, sent: list[list[Tensor]], received: list[list[Tensor]], axes: Axes
) -> Callable[[], None]:
    """Start to exchange tensors, part i with the group's i-th rank, and return the function that waits for it. Nothing
    is packed, which would take two more copies of all tensors."""
    index, works = backend.index(axes), []
    for to_send, to_fill in zip(sent, received, strict=True):
        tag = backend.tag(axes)
        for peer in range(len(to_send)):
            if peer != index and to_fill[peer].numel():
                works.append(backend.meet(dist.irecv, to_fill[peer], axes=axes, group_src=peer, tag=tag))
                works.append(backend.meet(dist.isend, to_send[peer], axes=axes, group_dst=peer, tag=tag))
        to_fill[index].copy_(to_send[index])

    def wait() -> None:
        for work in works:
            work.wait()
        for tensors in sent:
            tensors.clear()

    return wait


def _start_exchange(backend: Peers, pieces: Sequence[Rows], args: Args, axes: Axes) -> Started:
    started = [send_rows(backend, *one, axes, async_op=True) for one in zip(pieces, args, strict=True)]
    results = [received if coming.places is None else torch.empty_like(received) for received, coming, _ in started]

    def arrive() -> None:
        for result, (received, coming, work) in zip(results, started, strict=True):
            work.wait()
            if coming.places is not None:
                result.copy_(coming.packed(received))

    return results, arrive


def _start_all_to_all(backend: Peers, pieces: Sequence[Tensor], args: Args, axes: Axes) -> Started:
    """Exchange the parts of each tensor, and join them once they have arrived. A change of one dim's split is done at
    once."""
    ranks, results, started = group_size(axes, backend.mesh), list[Tensor](), list[tuple[Any, ...]]()
    for piece, options in zip(pieces, args, strict=True):
        _, dim, outer, to_dim, to_outer = options
        if dim == to_dim:
            results.append(all_to_all(backend, piece, options, axes))
            continue
        sent = torch.stack([slice_dim(piece, ranks, index, to_dim, to_outer) for index in range(ranks)])
        received = torch.empty_like(sent)
        work = backend.meet(dist.all_to_all_single, received, sent, axes=axes, async_op=True)
        results.append(_alloc(received[0], dim, received.shape[1:][dim] * ranks))
        started.append((results[-1], received, work, dim, outer))

    def arrive() -> None:
        for result, received, work, dim, outer in started:
            work.wait()
            result.copy_(join_dim(received.unbind(0), dim, outer))

    return results, arrive


def _start_scatter_int8(backend: Peers, pieces: Sequence[Tensor], args: Args, axes: Axes) -> Started:
    """Exchange the packed parts, and sum them locally in rank order once they have arrived."""
    ranks = group_size(axes, backend.mesh)
    results = [_alloc(piece, dim, piece.shape[dim] // ranks) for piece, (_, dim, _) in zip(pieces, args, strict=True)]
    lengths = [packed_bytes(result.numel()) for result in results]
    sent = pieces[0].new_empty(ranks, sum(lengths), dtype=torch.int8)
    for piece, (_, *split), places in zip(pieces, args, sent.split(lengths, 1), strict=True):
        for index, place in enumerate(places):
            pack(slice_dim(piece, ranks, index, *split), place)
    received = torch.empty_like(sent)
    work = backend.meet(dist.all_to_all_single, received, sent, axes=axes, async_op=True)

    def arrive() -> None:
        work.wait()
        for result, rows in zip(results, received.split(lengths, 1), strict=True):
            sum_packed(rows.unbind(), result)

    return results, arrive


def _packed_gather(
    backend: Peers, pieces: Sequence[Tensor], args: Args, axes: Axes,
    pack: Callable[[Tensor], Tensor], unpack: Callable[[Tensor, Tensor], Tensor],
) -> Started:  # fmt: skip
    """Gather the pieces packed into one buffer, and unpack them once they have arrived."""
    ranks, packed = group_size(axes, backend.mesh), [pack(piece) for piece in pieces]
    sent, lengths, shapes = torch.cat(packed), [len(one) for one in packed], [piece.shape for piece in pieces]
    packed.clear()
    received = sent.new_empty(ranks * len(sent))
    results = [_alloc(piece, dim, piece.shape[dim] * ranks) for piece, (_, dim, _) in zip(pieces, args, strict=True)]
    work = backend.meet(_GATHER, received, sent, axes=axes, async_op=True)

    def arrive() -> None:
        work.wait()
        parts = received.view(ranks, -1).split(lengths, 1)
        for result, shape, rows, (_, dim, outer) in zip(results, shapes, parts, args, strict=True):
            in_order = parts_in_order(dim, outer)
            places = result.chunk(ranks) if in_order else [result.new_empty(shape) for _ in range(ranks)]
            for row, place in zip(rows, places, strict=True):
                unpack(row, place)
            if not in_order:
                result.copy_(join_dim(places, dim, outer))

    return results, arrive


def _alloc(piece: Tensor, dim: int, size: int) -> Tensor:
    """Return an uninitialized tensor like a piece, with another size along a dim."""
    return piece.new_empty(*piece.shape[:dim], size, *piece.shape[dim + 1 :])


def _packed_scatter(
    backend: Peers, parts: Sequence[Sequence[Tensor]], axes: Axes, results: Sequence[Tensor]
) -> Callable[[], None]:
    """Reduce-scatter the parts packed into one buffer, and return the function that waits for them and fills the
    results."""
    packed = torch.cat([part.reshape(-1) for of_rank in zip(*parts, strict=True) for part in of_rank])
    received = packed.new_empty(len(packed) // len(parts[0]))
    work = backend.meet(_SCATTER, received, packed, axes=axes, async_op=True)

    def arrive() -> None:
        work.wait()
        for result, part in zip(results, received.split([part.numel() for part in results]), strict=True):
            result.copy_(part.view(result.shape))

    return arrive


def _start_sum(backend: Peers, pieces: Sequence[Tensor], args: Args, axes: Axes) -> Started:
    """All-reduce contiguous tensors, small ones packed into one buffer and large ones in place, because copying these
    takes longer than another all-reduce. Tensors that are adjacent in memory are reduced as one."""
    merged = merge_adjacent(pieces)
    small = [tensor for tensor in merged if tensor.nbytes < SMALL_SUM]
    packed = [torch.cat([tensor.reshape(-1) for tensor in small])] if len(small) > 1 else small
    large = [tensor for tensor in merged if tensor.nbytes >= SMALL_SUM]
    works = [backend.meet(dist.all_reduce, tensor, axes=axes, async_op=True) for tensor in (*packed, *large)]

    def arrive() -> None:
        for work in works:
            work.wait()
        if len(small) > 1:
            parts = packed[0].split([tensor.numel() for tensor in small])
            for tensor, part in zip(small, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    return list(pieces), arrive


def merge_adjacent(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous tensors with those that are adjacent in one storage merged into a flat one. The order does not
    depend on addresses, and so is the same on all ranks."""
    storages: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    merged: list[Tensor] = []
    for of_storage in storages.values():
        end = -1
        for tensor in sorted(of_storage, key=Tensor.storage_offset):
            if tensor.storage_offset() == end and tensor.dtype == merged[-1].dtype:
                merged[-1] = merged[-1].as_strided((merged[-1].numel() + tensor.numel(),), (1,))
            else:
                merged.append(tensor)
            end = int(tensor.storage_offset()) + tensor.numel()
    return merged


START: Mapping[str, Callable[..., Started]] = {
    "parc.all_gather": _start_gather,
    "parc.reduce_scatter": _start_scatter,
    "parc.all_reduce": _start_sum,
    "parc.all_to_all": _start_all_to_all,
    "parc.exchange": _start_exchange,
    "parc.reduce_scatter_int8": _start_scatter_int8,
    "parc.all_gather_int8": partial(_packed_gather, pack=pack, unpack=unpack),
}
"""The collectives that messages of several tensors may be."""
