"""torch.distributed: one rank a process, gloo on CPUs and NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...compiler.collectives import COLLECTIVES, join_dim, slice_dim
from ...compiler.mesh import Mesh
from ...compiler.program import Program
from ..processes import HOLDERS

Run = Callable[["Distributed", torch.Tensor, Sequence[Any], tuple[str, ...]], torch.Tensor]


def _ranks_of(axes: Sequence[str], mesh: Mesh) -> int:
    count = 1
    for axis in axes:
        count *= mesh.size(axis)
    return count


def _all_gather(backend: Distributed, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]) -> torch.Tensor:
    _, dim, outer = args
    piece = piece.contiguous()
    pieces = [torch.empty_like(piece) for _ in range(_ranks_of(axes, backend.mesh))]
    dist.all_gather(pieces, piece, group=backend.group(axes))
    return join_dim(pieces, dim, outer)


def _exchange(backend: Distributed, parts: list[torch.Tensor], axes: tuple[str, ...]) -> torch.Tensor:
    """Send part i to the group's i-th rank; the parts received, stacked in rank order."""
    sent = torch.stack(parts)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=backend.group(axes))
    return received


def _reduce_scatter(
    backend: Distributed, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]
) -> torch.Tensor:
    """An exchange and a local sum in rank order: on gloo faster than its own reduce_scatter, and repeatable."""
    _, dim, outer = args
    ranks = _ranks_of(axes, backend.mesh)
    parts = [slice_dim(piece, ranks, index, dim, outer) for index in range(ranks)]
    if backend.native_reduce_scatter:
        result = torch.empty_like(parts[0])
        dist.reduce_scatter(result, parts, group=backend.group(axes))
        return result
    return _exchange(backend, parts, axes).sum(0)


def _all_to_all(backend: Distributed, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]) -> torch.Tensor:
    _, dim, outer, to_dim, to_outer = args
    if dim == to_dim:
        return _regroup(backend, piece, dim, outer, to_outer, axes)
    ranks = _ranks_of(axes, backend.mesh)
    parts = [slice_dim(piece, ranks, index, to_dim, to_outer) for index in range(ranks)]
    return join_dim(_exchange(backend, parts, axes).unbind(0), dim, outer)


def _regroup(
    backend: Distributed, piece: torch.Tensor, dim: int, outer: int, to_outer: int, axes: tuple[str, ...]
) -> torch.Tensor:
    """From one way of splitting a dim to another: what two ranks exchange differs in size from pair to pair."""
    ranks, index = _ranks_of(axes, backend.mesh), backend.index(axes)
    places = torch.arange(piece.shape[dim] * ranks)
    before = [slice_dim(places, ranks, rank, 0, outer) for rank in range(ranks)]
    after = [slice_dim(places, ranks, rank, 0, to_outer) for rank in range(ranks)]
    given = [torch.isin(before[index], theirs).nonzero().flatten().to(piece.device) for theirs in after]
    taken = [torch.isin(after[index], theirs).nonzero().flatten().to(piece.device) for theirs in before]
    rows = piece.movedim(dim, 0)
    sent = torch.cat([rows.index_select(0, chosen) for chosen in given])
    received = torch.empty_like(sent)
    sizes = [len(chosen) for chosen in taken], [len(chosen) for chosen in given]
    dist.all_to_all_single(received, sent, *sizes, group=backend.group(axes))
    result = torch.empty_like(received)
    result[torch.cat(taken)] = received
    return result.movedim(0, dim).contiguous()


def _row_max(backend: Distributed, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]) -> torch.Tensor:
    peak = piece.amax(-1, keepdim=True)
    if axes:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=backend.group(axes))
    return peak


def _local(op: str) -> Run:
    """A step between placements that every rank makes alone: its place in the group is all it needs."""

    def run(backend: Distributed, piece: torch.Tensor, args: Sequence[Any], axes: tuple[str, ...]) -> torch.Tensor:
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
    "parc.row_max": _row_max,
    "parc.shard": _local("parc.shard"),
    "parc.pad": _local("parc.pad"),
}


class Distributed:
    """The backend of a real run. Every process makes it alike, since making a group is collective."""

    def __init__(self, mesh: Mesh, programs: Iterable[Program], rank: int, device: torch.device) -> None:
        self.mesh, self.rank, self.device = mesh, rank, device
        self.coordinates = mesh.coordinates(rank)
        self.native_reduce_scatter = device.type != "cpu"
        self._groups: dict[tuple[str, ...], Any] = {}
        for axes in sorted(_used_axes(programs)):
            for ranks in mesh.groups(axes):
                made = dist.new_group(ranks)
                if rank in ranks:
                    self._groups[axes] = made
        HOLDERS.add(self)

    def release(self) -> None:
        """Let go of the groups, so that they can end."""
        self._groups.clear()

    @property
    def ranks(self) -> Sequence[int]:
        """This process's own."""
        return (self.rank,)

    def group(self, axes: tuple[str, ...]) -> Any:
        """The process group over some axes that this rank is in."""
        return self._groups[axes]

    def index(self, axes: tuple[str, ...]) -> int:
        """This rank's place in its group over some axes, the first axis major."""
        place = 0
        for axis in axes:
            place = place * self.mesh.size(axis) + self.coordinates[axis]
        return place

    def collective(
        self, op: str, args: Sequence[Any], pieces: Sequence[torch.Tensor], spare: bool = False
    ) -> tuple[list[torch.Tensor], Callable[[], object] | None]:
        """Run a collective with the other processes; a sum is only started."""
        (piece,) = pieces
        axes = COLLECTIVES[op].axes(args)
        if op != "parc.all_reduce":
            return [RUN[op](self, piece, args, axes)], None
        result = piece if spare and piece.is_contiguous() else piece.clone(memory_format=torch.contiguous_format)
        return [result], dist.all_reduce(result, group=self.group(axes), async_op=True).wait


def _used_axes(programs: Iterable[Program]) -> set[tuple[str, ...]]:
    found = set()
    for program in programs:
        for function in program.functions:
            for line in function.lines:
                row = COLLECTIVES.get(line.op)
                if row is not None and row.communicates and (axes := row.axes(line.args[1:])):
                    found.add(axes)
    return found
