"""Messages of torch.distributed: collectives of one or several tensors that go on while other lines run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...compiler.layout.buffers import parts_in_order
from ...compiler.layout.int8 import pack, packed_bytes, sum_packed, unpack
from ...compiler.layout.mesh import Shape
from ...compiler.layout.packed_rows import Rows
from ...compiler.layout.pieces import join_dim, slice_dim
from .moves import Peers, all_to_all, group_size, send_rows

_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The collectives of one tensor, which newer versions of torch call otherwise."""
_SMALL = 1 << 16
"""The bytes from which a tensor is summed by itself."""
Started = tuple[list[torch.Tensor], Callable[[], None]]
"""Results that are on their way, and the function that waits for them and fills them."""


def _start_gather(
    backend: Peers, pieces: Sequence[torch.Tensor], args: Sequence[Sequence[Any]], axes: tuple[str, ...],
    spare: Sequence[bool],
) -> Started:  # fmt: skip
    ranks = group_size(axes, backend.mesh)
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


def _start_exchange(
    backend: Peers, pieces: Sequence[Rows], args: Sequence[Sequence[Any]], axes: tuple[str, ...], spare: Sequence[bool]
) -> Started:
    started = [send_rows(backend, *one, axes, async_op=True) for one in zip(pieces, args, strict=True)]
    results = [received if coming.places is None else torch.empty_like(received) for received, coming, _ in started]

    def arrive() -> None:
        for result, (received, coming, work) in zip(results, started, strict=True):
            work.wait()
            if coming.places is not None:
                result.copy_(coming.packed(received))
        started.clear()

    return results, arrive


def _start_all_to_all(
    backend: Peers, pieces: Sequence[torch.Tensor], args: Sequence[Sequence[Any]], axes: tuple[str, ...],
    spare: Sequence[bool],
) -> Started:  # fmt: skip
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
        results.append(piece.new_empty(_grown(received.shape[1:], dim, ranks)))
        started.append((results[-1], received, work, dim, outer))

    def arrive() -> None:
        for result, received, work, dim, outer in started:
            work.wait()
            result.copy_(join_dim(received.unbind(0), dim, outer))
        started.clear()

    return results, arrive


def _start_scatter_int8(
    backend: Peers, pieces: Sequence[torch.Tensor], args: Sequence[Sequence[Any]], axes: tuple[str, ...],
    spare: Sequence[bool],
) -> Started:  # fmt: skip
    """Exchange the packed parts, and sum them locally in rank order when they are there."""
    ranks = group_size(axes, backend.mesh)
    parts = [
        [slice_dim(piece, ranks, index, *own[1:]) for index in range(ranks)]
        for piece, own in zip(pieces, args, strict=True)
    ]
    sent = torch.stack([torch.cat([pack(part) for part in of_rank]) for of_rank in zip(*parts, strict=True)])
    received, results = torch.empty_like(sent), [torch.empty_like(row[0]) for row in parts]
    work = backend.meet(dist.all_to_all_single, received, sent, axes=axes, async_op=True)

    def arrive() -> None:
        work.wait()
        for result, rows in zip(
            results, received.split([packed_bytes(one.numel()) for one in results], 1), strict=True
        ):
            result.copy_(sum_packed(rows, result))

    return results, arrive


def _start_gather_int8(
    backend: Peers, pieces: Sequence[torch.Tensor], args: Sequence[Sequence[Any]], axes: tuple[str, ...],
    spare: Sequence[bool],
) -> Started:  # fmt: skip
    ranks = group_size(axes, backend.mesh)
    results = [piece.new_empty(_grown(piece.shape, own[1], ranks)) for piece, own in zip(pieces, args, strict=True)]
    return results, _packed_gather(backend, pieces, args, axes, results, pack, unpack)


def _packed_gather(
    backend: Peers, pieces: Sequence[torch.Tensor], args: Sequence[Sequence[Any]], axes: tuple[str, ...],
    results: Sequence[torch.Tensor], pack: Callable[[torch.Tensor], torch.Tensor] = torch.flatten,
    unpack: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.Tensor.view_as,
) -> Callable[[], None]:  # fmt: skip
    """Gather the packed pieces at once, and return the function that waits for them and fills the results."""
    packed = [pack(piece) for piece in pieces]
    sent = torch.cat(packed)
    received = sent.new_empty(group_size(axes, backend.mesh) * len(sent))
    work = backend.meet(_GATHER, received, sent, axes=axes, async_op=True)

    def arrive() -> None:
        work.wait()
        parts = received.view(-1, len(sent)).split([len(one) for one in packed], 1)
        for result, piece, part, (_, dim, outer) in zip(results, pieces, parts, args, strict=True):
            result.copy_(join_dim([unpack(row, piece) for row in part], dim, outer))

    return arrive


def _grown(shape: Shape, dim: int, ranks: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * ranks, *shape[dim + 1 :])


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


def _start_sum(
    backend: Peers, pieces: Sequence[torch.Tensor], args: Sequence[Sequence[Any]], axes: tuple[str, ...],
    spare: Sequence[bool],
) -> Started:  # fmt: skip
    """Sum large tensors where they are, and small ones packed: copies of large ones take longer than another sum.
    Tensors that lie one behind the other in memory are one."""
    results = [
        piece if own and piece.is_contiguous() else piece.clone(memory_format=torch.contiguous_format)
        for piece, own in zip(pieces, spare, strict=True)
    ]
    lying = lying_together(results)
    small = [tensor for tensor in lying if tensor.nbytes < _SMALL]
    packed = [torch.cat([tensor.reshape(-1) for tensor in small])] if len(small) > 1 else small
    large = [tensor for tensor in lying if tensor.nbytes >= _SMALL]
    works = [backend.meet(dist.all_reduce, tensor, axes=axes, async_op=True) for tensor in (*packed, *large)]

    def arrive() -> None:
        for work in works:
            work.wait()
        if len(small) > 1:
            parts = packed[0].split([tensor.numel() for tensor in small])
            for tensor, part in zip(small, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    return results, arrive


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
