"""Moves of torch.distributed: how collectives happen between the ranks of a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...compiler.layout.collectives import WAIT
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.packed_rows import RankOrder, Rows, orders
from ...compiler.layout.pieces import join_dim, round_parts, slice_dim


class Peers(Protocol):
    """One rank's view of the groups that it is in."""

    mesh: Mesh
    native_reduce_scatter: bool

    def index(self, axes: tuple[str, ...]) -> int:
        """Return this rank's place in its group over some axes."""

    def meet(self, run: Callable[..., Any], *args: Any, axes: tuple[str, ...], **options: Any) -> Any:
        """Run one of torch's collectives with the other ranks of a group."""

    def tag(self, axes: tuple[str, ...]) -> int:
        """Return the tag of the next tensors that ranks of a group send each other."""


Run = Callable[[Peers, Any, Sequence[Any], tuple[str, ...]], torch.Tensor]


def group_size(axes: Sequence[str], mesh: Mesh) -> int:
    """Return the number of ranks in a group over some axes."""
    return math.prod(mesh.size(axis) for axis in axes)


def _all_gather(backend: Peers, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]) -> torch.Tensor:
    _, dim, outer = args
    piece = piece.contiguous()
    pieces = [torch.empty_like(piece) for _ in range(group_size(axes, backend.mesh))]
    backend.meet(dist.all_gather, pieces, piece, axes=axes)
    return join_dim(pieces, dim, outer)


def _exchange(backend: Peers, parts: list[torch.Tensor], axes: tuple[str, ...]) -> torch.Tensor:
    """Send part i to the group's i-th rank, and return the received parts, stacked in rank order."""
    sent = torch.stack(parts)
    received = torch.empty_like(sent)
    backend.meet(dist.all_to_all_single, received, sent, axes=axes)
    return received


def _reduce_scatter(backend: Peers, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]) -> torch.Tensor:
    """Exchange parts and sum them locally in rank order: on gloo this is faster than its own reduce_scatter, and
    repeatable."""
    _, dim, outer = args
    ranks = group_size(axes, backend.mesh)
    parts = [slice_dim(piece, ranks, index, dim, outer) for index in range(ranks)]
    if backend.native_reduce_scatter:
        result = torch.empty_like(parts[0])
        backend.meet(dist.reduce_scatter, result, parts, axes=axes)
        return result
    return _exchange(backend, parts, axes).sum(0)


def _round_int8(backend: Peers, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]) -> torch.Tensor:
    return round_parts(piece, group_size(axes, backend.mesh), *args[1:])


def all_to_all(backend: Peers, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]) -> torch.Tensor:
    """Change the dim that ranks split, or how they split it."""
    _, dim, outer, to_dim, to_outer = args
    if dim == to_dim:
        return _regroup(backend, piece, dim, outer, to_outer, axes)
    ranks = group_size(axes, backend.mesh)
    parts = [slice_dim(piece, ranks, index, to_dim, to_outer) for index in range(ranks)]
    return join_dim(_exchange(backend, parts, axes).unbind(0), dim, outer)


def _regroup(
    backend: Peers, piece: torch.Tensor, dim: int, outer: int, to_outer: int, axes: tuple[str, ...]
) -> torch.Tensor:
    """Change the split of a dim to another one; the parts that two ranks exchange differ in size from pair to pair."""
    ranks, index = group_size(axes, backend.mesh), backend.index(axes)
    places = torch.arange(piece.shape[dim] * ranks)
    before = [slice_dim(places, ranks, rank, 0, outer) for rank in range(ranks)]
    after = [slice_dim(places, ranks, rank, 0, to_outer) for rank in range(ranks)]
    to_send = [torch.isin(before[index], theirs).nonzero().flatten().to(piece.device) for theirs in after]
    taken = [torch.isin(after[index], theirs).nonzero().flatten().to(piece.device) for theirs in before]
    rows = piece.movedim(dim, 0)
    sent = torch.cat([rows.index_select(0, chosen) for chosen in to_send])
    received = torch.empty_like(sent)
    sizes = [len(chosen) for chosen in taken], [len(chosen) for chosen in to_send]
    backend.meet(dist.all_to_all_single, received, sent, *sizes, axes=axes)
    result = torch.empty_like(received)
    result[torch.cat(taken)] = received
    return result.movedim(0, dim).contiguous()


def _exchange_rows(backend: Peers, piece: Rows, args: Sequence[Any], axes: tuple[str, ...]) -> torch.Tensor:
    received, coming, _ = send_rows(backend, piece, args, axes)
    return coming.packed(received)


def send_rows(
    backend: Peers, piece: Rows, args: Sequence[Any], axes: tuple[str, ...], **options: Any
) -> tuple[torch.Tensor, RankOrder, Any]:
    """Send packed rows to other ranks. Return those that come, their order, and what all_to_all_single returns."""
    rows, before, after = piece
    leaving, coming = orders(before, after, group_size(axes, backend.mesh), args)
    received = rows.new_empty(sum(coming.sizes), *rows.shape[1:])
    sizes, sent = (coming.sizes, leaving.sizes), leaving.ordered(rows).contiguous()
    return received, coming, backend.meet(dist.all_to_all_single, received, sent, *sizes, axes=axes, **options)


def _row_max(backend: Peers, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]) -> torch.Tensor:
    peak = piece.amax(-1, keepdim=True)
    if axes:
        backend.meet(dist.all_reduce, peak, op=dist.ReduceOp.MAX, axes=axes)
    return peak


def _local(op: str) -> Run:
    """Change placements without communication: a rank needs only its place in the group."""

    def run(backend: Peers, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]) -> torch.Tensor:
        ranks, index = group_size(axes, backend.mesh), backend.index(axes)
        if op == "parc.shard":
            return slice_dim(piece, ranks, index, *args[1:])
        zeros = [torch.zeros_like(piece)] * ranks
        return join_dim([*zeros[:index], piece, *zeros[index + 1 :]], *args[1:])

    return run


RUN: Mapping[str, Run] = {
    "parc.all_gather": _all_gather,
    "parc.reduce_scatter": _reduce_scatter,
    "parc.all_to_all": all_to_all,
    "parc.exchange": _exchange_rows,
    "parc.row_max": _row_max,
    "parc.shard": _local("parc.shard"),
    "parc.pad": _local("parc.pad"),
    "parc.round_int8": _round_int8,
    WAIT: lambda backend, piece, args, axes: piece,
}
