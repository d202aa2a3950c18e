"""Moves of torch.distributed: how collectives happen between the ranks of a group, at once or in the background."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...compiler.layout.buffers import parts_in_order
from ...compiler.layout.collectives import WAIT, join_dim, round_parts, slice_dim
from ...compiler.layout.int8 import pack, unpack
from ...compiler.layout.mesh import Mesh, Shape
from ...compiler.layout.packed_rows import Rows, orders


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


def _ranks_of(axes: Sequence[str], mesh: Mesh) -> int:
    return math.prod(mesh.size(axis) for axis in axes)


def _all_gather(backend: Peers, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]) -> torch.Tensor:
    _, dim, outer = args
    piece = piece.contiguous()
    pieces = [torch.empty_like(piece) for _ in range(_ranks_of(axes, backend.mesh))]
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
    ranks = _ranks_of(axes, backend.mesh)
    parts = [slice_dim(piece, ranks, index, dim, outer) for index in range(ranks)]
    if backend.native_reduce_scatter:
        result = torch.empty_like(parts[0])
        backend.meet(dist.reduce_scatter, result, parts, axes=axes)
        return result
    return _exchange(backend, parts, axes).sum(0)


def _round_int8(backend: Peers, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]) -> torch.Tensor:
    return round_parts(piece, _ranks_of(axes, backend.mesh), *args[1:])


def _reduce_scatter_int8(
    backend: Peers, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]
) -> torch.Tensor:
    """Exchange packed parts, and sum them locally in rank order, as float32."""
    _, dim, outer = args
    ranks = _ranks_of(axes, backend.mesh)
    parts = [slice_dim(piece, ranks, index, dim, outer) for index in range(ranks)]
    received, like = _exchange(backend, [pack(part) for part in parts], axes), parts[0].float()
    return torch.stack([unpack(packed, like) for packed in received.unbind(0)]).sum(0).to(piece.dtype)


def _all_gather_int8(backend: Peers, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]) -> torch.Tensor:
    packed = pack(piece)
    received = [torch.empty_like(packed) for _ in range(_ranks_of(axes, backend.mesh))]
    backend.meet(dist.all_gather, received, packed, axes=axes)
    return join_dim([unpack(one, piece) for one in received], *args[1:])


def _all_to_all(backend: Peers, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]) -> torch.Tensor:
    _, dim, outer, to_dim, to_outer = args
    if dim == to_dim:
        return _regroup(backend, piece, dim, outer, to_outer, axes)
    ranks = _ranks_of(axes, backend.mesh)
    parts = [slice_dim(piece, ranks, index, to_dim, to_outer) for index in range(ranks)]
    return join_dim(_exchange(backend, parts, axes).unbind(0), dim, outer)


def _regroup(
    backend: Peers, piece: torch.Tensor, dim: int, outer: int, to_outer: int, axes: tuple[str, ...]
) -> torch.Tensor:
    """Change the split of a dim to another one; the parts that two ranks exchange differ in size from pair to pair."""
    ranks, index = _ranks_of(axes, backend.mesh), backend.index(axes)
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
    rows, before, after = piece
    leaving, coming = orders(before, after, _ranks_of(axes, backend.mesh), args)
    received = rows.new_empty(sum(coming.sizes), *rows.shape[1:])
    sent = leaving.ordered(rows).contiguous()
    backend.meet(dist.all_to_all_single, received, sent, coming.sizes, leaving.sizes, axes=axes)
    return coming.packed(received)


def _row_max(backend: Peers, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]) -> torch.Tensor:
    peak = piece.amax(-1, keepdim=True)
    if axes:
        backend.meet(dist.all_reduce, peak, op=dist.ReduceOp.MAX, axes=axes)
    return peak


def _local(op: str) -> Run:
    """Change placements without communication: a rank needs only its place in the group."""

    def run(backend: Peers, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]) -> torch.Tensor:
        ranks, index = _ranks_of(axes, backend.mesh), backend.index(axes)
        if op == "parc.shard":
            return slice_dim(piece, ranks, index, *args[1:])
        zeros = [torch.zeros_like(piece)] * ranks
        return join_dim([*zeros[:index], piece, *zeros[index + 1 :]], *args[1:])

    return run


RUN: Mapping[str, Run] = {
    "parc.all_gather": _all_gather,
    "parc.reduce_scatter": _reduce_scatter,
    "parc.all_to_all": _all_to_all,
    "parc.exchange": _exchange_rows,
    "parc.row_max": _row_max,
    "parc.shard": _local("parc.shard"),
    "parc.pad": _local("parc.pad"),
    "parc.round_int8": _round_int8,
    "parc.reduce_scatter_int8": _reduce_scatter_int8,
    "parc.all_gather_int8": _all_gather_int8,
    WAIT: lambda backend, piece, args, axes: piece,
}


_SMALL = 1 << 16
"""The bytes from which a tensor is summed by itself."""
Started = tuple[list[torch.Tensor], Callable[[], None]]
"""Results that are on their way, and the function that waits for them and fills them."""


def _start_gather(
    backend: Peers, pieces: Sequence[torch.Tensor], args: Sequence[Sequence[Any]], axes: tuple[str, ...],
    spare: Sequence[bool],
) -> Started:  # fmt: skip
    ranks = _ranks_of(axes, backend.mesh)
    results = [piece.new_empty(_grown(piece.shape, own[1], ranks)) for piece, own in zip(pieces, args, strict=True)]
    if backend.native_reduce_scatter:
        return results, _packed_gather(backend, pieces, args, axes, results)
    sent = [[piece.contiguous()] * ranks for piece in pieces]
    # where the parts of a result lie one behind the other, they arrive in their places
    rows = [
        list(result.chunk(ranks)) if parts_in_order(*own[1:]) else [torch.empty_like(piece[0]) for _ in range(ranks)]
        for result, piece, own in zip(results, sent, args, strict=True)
    ]
    wait = _exchanged(backend, sent, rows, axes)

    def arrive() -> None:
        wait()
        for result, parts, (_, dim, outer) in zip(results, rows, args, strict=True):
            if not parts_in_order(dim, outer):
                result.copy_(join_dim(parts, dim, outer))
            parts.clear()

    return results, arrive


def _start_scatter(
    backend: Peers, pieces: Sequence[torch.Tensor], args: Sequence[Sequence[Any]], axes: tuple[str, ...],
    spare: Sequence[bool],
) -> Started:  # fmt: skip
    """Exchange the parts, and sum them locally in rank order when they are there."""
    ranks = _ranks_of(axes, backend.mesh)
    parts = [
        [slice_dim(piece, ranks, index, *own[1:]) for index in range(ranks)]
        for piece, own in zip(pieces, args, strict=True)
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
    backend: Peers, sent: list[list[torch.Tensor]], received: list[list[torch.Tensor]], axes: tuple[str, ...]
) -> Callable[[], None]:
    """Start to exchange tensors, part i with the group's i-th rank, and return the function that waits for it. Each
    travels from where it is to where it is wanted: packed, it would need memory twice more."""
    own, works = backend.index(axes), []
    for to_send, to_fill in zip(sent, received, strict=True):
        tag = backend.tag(axes)
        for peer in range(len(to_send)):
            if peer != own and to_fill[peer].numel():
                works.append(backend.meet(dist.irecv, to_fill[peer], axes=axes, group_src=peer, tag=tag))
                works.append(backend.meet(dist.isend, to_send[peer], axes=axes, group_dst=peer, tag=tag))
        to_fill[own].copy_(to_send[own])

    def wait() -> None:
        for work in works:
            work.wait()
        for tensors in sent:
            tensors.clear()

    return wait


def _packed_gather(
    backend: Peers, pieces: Sequence[torch.Tensor], args: Sequence[Sequence[Any]], axes: tuple[str, ...],
    results: Sequence[torch.Tensor],
) -> Callable[[], None]:  # fmt: skip
    """Gather the packed pieces at once, and return the function that waits for them and fills the results."""
    packed = torch.cat([piece.reshape(-1) for piece in pieces])
    received = packed.new_empty(_ranks_of(axes, backend.mesh), len(packed))
    work = backend.meet(dist.all_gather_into_tensor, received, packed, axes=axes, async_op=True)

    def arrive() -> None:
        work.wait()
        parts = received.split([piece.numel() for piece in pieces], 1)
        for result, piece, part, (_, dim, outer) in zip(results, pieces, parts, args, strict=True):
            result.copy_(join_dim([row.view(piece.shape) for row in part], dim, outer))

    return arrive


def _grown(shape: Shape, dim: int, ranks: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * ranks, *shape[dim + 1 :])


def _packed_scatter(
    backend: Peers, parts: Sequence[Sequence[torch.Tensor]], axes: tuple[str, ...], results: Sequence[torch.Tensor]
) -> Callable[[], None]:
    """Sum the packed parts at once, and return the function that waits for them and fills the results."""
    packed = torch.cat([part.reshape(-1) for of_rank in zip(*parts, strict=True) for part in of_rank])
    received = packed.new_empty(len(packed) // len(parts[0]))
    work = backend.meet(dist.reduce_scatter_tensor, received, packed, axes=axes, async_op=True)

    def arrive() -> None:
        work.wait()
        for result, part in zip(results, received.split([part.numel() for part in results]), strict=True):
            result.copy_(part.view(result.shape))

    return arrive


def _start_sum(
    backend: Peers, pieces: Sequence[torch.Tensor], args: Sequence[Sequence[Any]], axes: tuple[str, ...],
    spare: Sequence[bool],
) -> Started:  # fmt: skip
    """Sum large tensors where they are, and small ones packed: copies of large ones take longer than another sum."""
    results = [
        piece if own and piece.is_contiguous() else piece.clone(memory_format=torch.contiguous_format)
        for piece, own in zip(pieces, spare, strict=True)
    ]
    small = [result for result in results if result.nbytes < _SMALL]
    packed = [torch.cat([result.reshape(-1) for result in small])] if len(small) > 1 else small
    large = [result for result in results if result.nbytes >= _SMALL]
    works = [backend.meet(dist.all_reduce, tensor, axes=axes, async_op=True) for tensor in (*packed, *large)]

    def arrive() -> None:
        for work in works:
            work.wait()
        if len(small) > 1:
            parts = packed[0].split([result.numel() for result in small])
            for result, part in zip(small, parts, strict=True):
                result.copy_(part.view(result.shape))

    return results, arrive


START: Mapping[str, Callable[..., Started]] = {
    "parc.all_gather": _start_gather,
    "parc.reduce_scatter": _start_scatter,
    "parc.all_reduce": _start_sum,
}
"""The collectives that may be a message of several tensors."""
