"""The tensors that a model returns in an evaluation, put together from the parts of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import TensorType
from ..owners import whole_tensor


def stacked(returned: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors of all microbatches by name, one behind the other along a new first dim."""
    return {name: torch.stack([*values]) for name, values in returned.items()}


def joined(
    pieces: Sequence[Mapping[str, torch.Tensor]], types: Mapping[str, TensorType], mesh: Mesh
) -> dict[str, torch.Tensor]:
    """Return the whole tensors by name. ``pieces`` are each rank's parts; their first dim is that of microbatches, and
    ``types`` are those of one microbatch."""
    whole = {}
    for name, type_ in types.items():
        held = {rank: of_rank[name] for rank, of_rank in enumerate(pieces) if name in of_rank}
        parts = zip(*(piece.unbind() for piece in held.values()), strict=True)
        together = [whole_tensor(dict(zip(held, part, strict=True)), type_.placement, mesh) for part in parts]
        whole[name] = torch.stack(together)
    return whole
