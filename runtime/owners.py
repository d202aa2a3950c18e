"""The owners of tensors: the ranks of a pipeline that have each tensor of the model, and the piece that each holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from ..compiler.layout.mesh import Mesh
from ..compiler.layout.pieces import put_together
from ..compiler.layout.placement import Placement
from ..compiler.program.binding import BUFFERS, PARAMETERS, Binding, Kind
from ..compiler.program.roles import Role


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
    """Return the place of a rank's piece in a tensor, or of its part in a sum: ranks of one place hold the same
    numbers."""
    at = mesh.coordinates(rank)
    return tuple(at[axis] for axis in (*placement.split_axes(), *placement.partial))


def whole_tensor(pieces: Mapping[int, torch.Tensor], placement: Placement, mesh: Mesh) -> torch.Tensor:
    """Put a whole tensor together from the pieces of ranks; any rank of a place will do."""
    by_place = {piece_place(rank, placement, mesh): piece for rank, piece in pieces.items()}
    return put_together([by_place[piece_place(rank, placement, mesh)] for rank in range(mesh.world)], placement, mesh)
