"""Seven layers, as textbooks draw them to explain how a model is spread over devices."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


class Seven(nn.Module):
    """A model of seven layers: ``[B, 16]`` to logits of 10 classes, ``[B, 10]``."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [16, *[width] * 6]
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(sizes)])
        self.layers.append(nn.Linear(width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        *inner, last = self.layers
        for layer in inner:
            x = torch.tanh(layer(x))
        return last(x)  # type: ignore[no-any-return]
