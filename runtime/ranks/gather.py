"""Gathering: the ranks that hold each tensor, and whole tensors and values of all ranks on every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar, cast, final

import torch
import torch.distributed as dist

from ...compiler.layout.mesh import Mesh
from ...compiler.layout.pieces import put_together
from ...compiler.layout.placement import Placement, TensorType
from ...compiler.padding.pads import Pad
from ...compiler.padding.tensors import shrink
from ...compiler.program.binding import BUFFERS, PARAMETERS, Binding, Kind
from ...compiler.program.roles import Role
from .processes import all_ranks
from .waits import WAITS
from .wire import broadcast, gathered

# ---- the owners of tensors


def held(role: Role, kinds: Collection[Kind]) -> set[str]:
    """Return the names of the tensors of some kinds that a role's programs read."""
    return {name for program in role.programs.values() for name in program.main.bound(*kinds)}


def owners_of(roles: Sequence[Role], parameters: Iterable[str]) -> dict[str, tuple[Role, ...]]:
    """Return the roles that hold each parameter: those that read it, or the first if none does."""
    reads = [(role, held(role, PARAMETERS)) for role in roles]
    return {name: tuple(role for role, names in reads if name in names) or (roles[0],) for name in parameters}


def keepers_of(roles: Sequence[Role], buffers: Iterable[str]) -> dict[str, tuple[Role, ...]]:
    """Return the role that changes each buffer, which no other role reads, or all that read one that none changes."""
    writes = [(role, {key for program in role.programs.values() for key, _ in program.main.returns}) for role in roles]
    reads = [(role, held(role, BUFFERS)) for role in roles]
    return {
        name: tuple(role for role, keys in writes if Binding("buffer", name) in keys)
        or tuple(role for role, names in reads if name in names)
        for name in buffers
    }


def piece_place(rank: int, placement: Placement, mesh: Mesh) -> tuple[int, ...]:
    """Return the place of a rank's piece in a sharded tensor, or of its summand in a partial one: ranks of one place
    are replicas."""
    at = mesh.coordinates(rank)
    return tuple(at[axis] for axis in (*placement.split_axes(), *placement.partial))


def whole_tensor(pieces: Mapping[int, torch.Tensor], placement: Placement, mesh: Mesh) -> torch.Tensor:
    """Put a whole tensor together from pieces by rank, at least one of each place."""
    by_place = {piece_place(rank, placement, mesh): piece for rank, piece in pieces.items()}
    return put_together([by_place[piece_place(rank, placement, mesh)] for rank in range(mesh.world)], placement, mesh)


# ---- gathering

_Gathered = TypeVar("_Gathered")


def everywhere(value: _Gathered, world: int) -> list[_Gathered]:
    """Return every rank's value, in rank order, on every rank."""
    return gathered(value, world) if world > 1 else [value]


def of_every_role(value: _Gathered, roles: Sequence[str]) -> list[_Gathered]:
    """Return the value of the first rank of each role, on every rank. ``roles`` are the names of all ranks' roles."""
    firsts = {role: first for first, role in reversed([*enumerate(roles)])}
    return [broadcast(value, first) if len(firsts) > 1 else value for first in sorted(firsts.values())]


def exchange(row: Sequence[int | torch.Tensor], world: int, device: torch.device) -> list[list[int]]:
    """Return every rank's row of numbers, in rank order, on every rank. Numbers may be int64 scalar tensors."""
    if world == 1:
        return [[int(number) for number in row]]
    known = [0 if isinstance(number, torch.Tensor) else number for number in row]
    mine = torch.tensor(known, dtype=torch.int64).to(device)
    for place, number in enumerate(row):
        if isinstance(number, torch.Tensor):
            mine[place] = number
    rows = [torch.empty_like(mine) for _ in range(world)]
    with WAITS.ranks():
        dist.all_gather(rows, mine, group=all_ranks())
    return cast(list[list[int]], torch.stack(rows).tolist())


@final
class Gatherer:
    """The gathering of tensors on rank ``rank``; ``roles`` are those of all ranks. Its methods are collective."""

    def __init__(self, mesh: Mesh, rank: int, device: torch.device, roles: Sequence[Role]) -> None:
        self._mesh, self._rank, self._device, self._roles = mesh, rank, device, roles

    def whole(
        self, piece: torch.Tensor | None, type_: TensorType, owners: Collection[Role], pads: Sequence[Pad] = ()
    ) -> torch.Tensor:
        """Return a tensor that some roles own, whole, on the CPU, without padding. ``piece`` is this rank's, if it has
        one. Each piece is broadcast by the first rank that has it."""
        sources: dict[tuple[int, ...], int] = {}
        for rank, role in enumerate(self._roles):
            if role in owners:
                sources.setdefault(piece_place(rank, type_.placement, self._mesh), rank)
        sent = len(sources) > 1 or any(role not in owners for role in self._roles)
        pieces = {}
        for at, source in sources.items():
            here = at == piece_place(self._rank, type_.placement, self._mesh)
            if piece is not None and here and (self._rank == source or not sent):
                value = piece.detach().contiguous()
            else:  # never receive into a tensor that is trained
                value = torch.empty(type_.local(self._mesh), dtype=type_.dtype, device=self._device)
            if sent:
                dist.broadcast(value.view(-1).view(torch.uint8), source, group=all_ranks())  # gloo lacks some dtypes
            pieces[source] = value.cpu()
        if not type_.placement.split_axes():
            (only,) = pieces.values()
            return only.clone()
        return shrink(whole_tensor(pieces, type_.placement, self._mesh), pads)
