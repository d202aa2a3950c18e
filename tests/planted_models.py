"""A small model for planted bugs whose plan needs every collective, and its loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Stack(nn.Module):
    """Three products and two nonlinearities."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] → [B, width]."""
        made: Tensor = self.c(torch.tanh(self.b(F.gelu(self.a(x)))))
        return made


def square(output: Tensor, wanted: Tensor) -> Tensor:
    """The mean squared error."""
    return ((output - wanted) ** 2).mean()
