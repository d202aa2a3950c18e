"""The tensors that a model returns in an evaluation, beside those of the captured graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import TensorType
from ..owners import piece_place, whole_tensor


def joined(
    pieces: Sequence[Mapping[str, Sequence[torch.Tensor]]], types: Mapping[str, TensorType], mesh: Mesh
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return, by name, the whole tensors of all microbatches, stacked, and the largest difference of two ranks that
    hold the same entries. ``pieces`` are those of each rank."""
    whole, spread = dict[str, torch.Tensor](), dict[str, float]()
    for name, type_ in types.items():
        held = {rank: torch.stack([*of_rank[name]]) for rank, of_rank in enumerate(pieces) if name in of_rank}
        first: dict[tuple[int, ...], torch.Tensor] = {}
        for rank, piece in held.items():
            kept = first.setdefault(piece_place(rank, type_.placement, mesh), piece)
            apart = (piece.double() - kept.double()).abs()
            spread[name] = max(spread.get(name, 0.0), float(apart.max()) if apart.numel() else 0.0)
        parts = zip(*(piece.unbind() for piece in held.values()), strict=True)
        together = [whole_tensor(dict(zip(held, part, strict=True)), type_.placement, mesh) for part in parts]
        whole[name] = torch.stack(together)
    return whole, spread
