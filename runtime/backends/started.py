"""Messages of torch.distributed: collectives of one or several tensors that go on while other lines run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...compiler.layout.collectives import SMALL_SUM, parts_in_order
from ...compiler.layout.packed_rows import Rows
from ...compiler.layout.pieces import join_dim, pack, packed_bytes, slice_dim, sum_packed, unpack
from .moves import Peers, all_to_all, group_size, send_rows

_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The collectives of one tensor, which newer versions of torch call otherwise."""
Args = Sequence[Sequence[Any]]
"""For each tensor of a message the arguments of its collective behind the operand."""
Axes = tuple[str, ...]
Started = tuple[list[torch.Tensor], Callable[[], None]]
"""Results that are on their way, and the function that waits for them and fills them."""


def _start_gather(backend: Peers, pieces: Sequence[torch.Tensor], args: Args, axes: Axes) -> Started:
    ranks = group_size(axes, backend.mesh)
    if backend.native_reduce_scatter:
        return _packed_gather(
            backend, pieces, args, axes, torch.flatten, lambda row, place: place.copy_(row.view_as(place))
        )
    results = [_room(piece, own[1], piece.shape[own[1]] * ranks) for piece, own in zip(pieces, args, strict=True)]
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


def _start_scatter(backend: Peers, pieces: Sequence[torch.Tensor], args: Args, axes: Axes) -> Started:
    """Exchange the parts, and sum them locally in rank order when they are there."""
    ranks = group_size(axes, backend.mesh)
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


def _start_exchange(backend: Peers, pieces: Sequence[Rows], args: Args, axes: Axes) -> Started:
    started = [send_rows(backend, *one, axes, async_op=True) for one in zip(pieces, args, strict=True)]
    results = [received if coming.places is None else torch.empty_like(received) for received, coming, _ in started]

    def arrive() -> None:
        for result, (received, coming, work) in zip(results, started, strict=True):
            work.wait()
            if coming.places is not None:
                result.copy_(coming.packed(received))

    return results, arrive


def _start_all_to_all(backend: Peers, pieces: Sequence[torch.Tensor], args: Args, axes: Axes) -> Started:
    """Exchange the parts of each tensor, and join them when they are there. Another split of the same dim is made at
    once."""
    ranks, results, started = group_size(axes, backend.mesh), list[torch.Tensor](), list[tuple[Any, ...]]()
    for piece, own in zip(pieces, args, strict=True):
        _, dim, outer, to_dim, to_outer = own
        if dim == to_dim:
            results.append(all_to_all(backend, piece, own, axes))
            continue
        sent = torch.stack([slice_dim(piece, ranks, index, to_dim, to_outer) for index in range(ranks)])
        received = torch.empty_like(sent)
        work = backend.meet(dist.all_to_all_single, received, sent, axes=axes, async_op=True)
        results.append(_room(received[0], dim, received.shape[1:][dim] * ranks))
        started.append((results[-1], received, work, dim, outer))

    def arrive() -> None:
        for result, received, work, dim, outer in started:
            work.wait()
            result.copy_(join_dim(received.unbind(0), dim, outer))

    return results, arrive


def _start_scatter_int8(backend: Peers, pieces: Sequence[torch.Tensor], args: Args, axes: Axes) -> Started:
    """Exchange the packed parts, and sum them locally in rank order when they are there."""
    ranks = group_size(axes, backend.mesh)
    results = [_room(piece, own[1], piece.shape[own[1]] // ranks) for piece, own in zip(pieces, args, strict=True)]
    lengths = [packed_bytes(result.numel()) for result in results]
    sent = pieces[0].new_empty(ranks, sum(lengths), dtype=torch.int8)
    for piece, own, places in zip(pieces, args, sent.split(lengths, 1), strict=True):
        for index, place in enumerate(places):
            pack(slice_dim(piece, ranks, index, *own[1:]), place)
    received = torch.empty_like(sent)
    work = backend.meet(dist.all_to_all_single, received, sent, axes=axes, async_op=True)

    def arrive() -> None:
        work.wait()
        for result, rows in zip(results, received.split(lengths, 1), strict=True):
            sum_packed(rows.unbind(), result)

    return results, arrive


def _start_gather_int8(backend: Peers, pieces: Sequence[torch.Tensor], args: Args, axes: Axes) -> Started:
    return _packed_gather(backend, pieces, args, axes, pack, unpack)


def _packed_gather(
    backend: Peers, pieces: Sequence[torch.Tensor], args: Args, axes: Axes,
    pack: Callable[[torch.Tensor], torch.Tensor], unpack: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Started:  # fmt: skip
    """Gather the packed pieces at once, and unpack them when they are there."""
    ranks, packed = group_size(axes, backend.mesh), [pack(piece) for piece in pieces]
    sent, lengths, shapes = torch.cat(packed), [len(one) for one in packed], [piece.shape for piece in pieces]
    packed.clear()
    received = sent.new_empty(ranks * len(sent))
    results = [_room(piece, own[1], piece.shape[own[1]] * ranks) for piece, own in zip(pieces, args, strict=True)]
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


def _room(piece: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return a tensor without values that is like a piece, but for its size along a dim."""
    return piece.new_empty(*piece.shape[:dim], size, *piece.shape[dim + 1 :])


def _packed_scatter(
    backend: Peers, parts: Sequence[Sequence[torch.Tensor]], axes: tuple[str, ...], results: Sequence[torch.Tensor]
) -> Callable[[], None]:
    """Sum the packed parts at once, and return the function that waits for them and fills the results."""
    packed = torch.cat([part.reshape(-1) for of_rank in zip(*parts, strict=True) for part in of_rank])
    received = packed.new_empty(len(packed) // len(parts[0]))
    work = backend.meet(_SCATTER, received, packed, axes=axes, async_op=True)

    def arrive() -> None:
        work.wait()
        for result, part in zip(results, received.split([part.numel() for part in results]), strict=True):
            result.copy_(part.view(result.shape))

    return arrive


def _start_sum(backend: Peers, pieces: Sequence[torch.Tensor], args: Args, axes: Axes) -> Started:
    """Sum contiguous tensors, large ones where they are and small ones packed: copies of large ones take longer than
    another sum. Tensors that lie one behind the other in memory are one."""
    lying = lying_together(pieces)
    small = [tensor for tensor in lying if tensor.nbytes < SMALL_SUM]
    packed = [torch.cat([tensor.reshape(-1) for tensor in small])] if len(small) > 1 else small
    large = [tensor for tensor in lying if tensor.nbytes >= SMALL_SUM]
    works = [backend.meet(dist.all_reduce, tensor, axes=axes, async_op=True) for tensor in (*packed, *large)]

    def arrive() -> None:
        for work in works:
            work.wait()
        if len(small) > 1:
            parts = packed[0].split([tensor.numel() for tensor in small])
            for tensor, part in zip(small, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    return list(pieces), arrive


def lying_together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous tensors as fewer: those that lie one behind the other in one storage as one, flat. The order
    does not depend on addresses, and so is the same on all ranks."""
    storages: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    joined: list[torch.Tensor] = []
    for lying in storages.values():
        end = -1
        for tensor in sorted(lying, key=torch.Tensor.storage_offset):
            if tensor.storage_offset() == end and tensor.dtype == joined[-1].dtype:
                joined[-1] = joined[-1].as_strided((joined[-1].numel() + tensor.numel(),), (1,))
            else:
                joined.append(tensor)
            end = int(tensor.storage_offset()) + tensor.numel()
    return joined


START: Mapping[str, Callable[..., Started]] = {
    "parc.all_gather": _start_gather,
    "parc.reduce_scatter": _start_scatter,
    "parc.all_reduce": _start_sum,
    "parc.all_to_all": _start_all_to_all,
    "parc.exchange": _start_exchange,
    "parc.reduce_scatter_int8": _start_scatter_int8,
    "parc.all_gather_int8": _start_gather_int8,
}
"""The collectives that may be a message of several tensors."""
