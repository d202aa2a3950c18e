"""A model whose numbers in ``eval()`` are others than in training: it has batch statistics and dropout."""

import torch
from torch import nn


class Moody(nn.Module):
    """A classifier of two layers, with BatchNorm and dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.second = nn.Dropout(0.5), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of 8 classes, [batch, 8]."""
        scores: torch.Tensor = self.second(self.drop(self.norm(torch.relu(self.first(x)))))
        return scores


def wide() -> Moody:
    """Return the classifier in float64."""
    return Moody().double()
