"""All ranks in one process: a collective joins the pieces that stand side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...compiler.collectives import COLLECTIVES
from ...compiler.mesh import Mesh


class InProcess:
    """The backend of the simulator."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    @property
    def ranks(self) -> Sequence[int]:
        """All of them."""
        return range(self.mesh.world)

    def collective(
        self, op: str, args: Sequence[Any], pieces: Sequence[torch.Tensor], spare: bool = False
    ) -> tuple[list[torch.Tensor], None]:
        """Every group's pieces in axis order become the group's results."""
        row = COLLECTIVES[op]
        results: list[torch.Tensor] = list(pieces)
        for group in self.mesh.groups(row.axes(args)):
            made = row.group([pieces[rank] for rank in group], args)
            for index, (rank, piece) in enumerate(zip(group, made, strict=True)):
                # each rank may write over what it got
                results[rank] = piece.clone() if any(piece is other for other in made[:index]) else piece
        return results, None
