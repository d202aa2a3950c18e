"""The tensors that a model returns in an evaluation, in the programs of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..compiler.layout.placement import TensorType
from ..compiler.program.actions import FORWARD
from ..compiler.program.roles import Role


def returned_types(roles: Sequence[Role]) -> dict[str, tuple[TensorType, tuple[Role, ...]]]:
    """Return the type of each tensor that the model returns, one microbatch of it, and the roles that have it."""
    found: dict[str, tuple[TensorType, tuple[Role, ...]]] = {}
    for role in roles:
        for program in role.programs.values():
            if program.action == FORWARD:
                values = program.main.values()
                for name, value in program.main.returned("output").items():
                    _, owners = found.get(name, (None, ()))
                    found[name] = values[value].type, (*owners, role)
    return found


def real_part(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a whole tensor without the padding behind its entries, of which the model has ``shape``."""
    for dim, size in enumerate(shape):
        value = value.narrow(dim, 0, size)
    return value
