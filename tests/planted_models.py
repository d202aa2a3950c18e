"""Small models for planted bugs, whose plans need every collective, and their loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Stack(nn.Module):
    """A model of three products and two nonlinearities."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] → [B, width]."""
        return self.c(torch.tanh(self.b(F.gelu(self.a(x)))))


def square(output: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean squared error."""
    return ((output - wanted) ** 2).mean()


class Same(nn.Module):
    """A layer that does nothing to float32 values."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return x.float()


class Looked(nn.Module):
    """A model of three layers, the first of which reads the weight of the last without a gradient."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.same = Same()

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] → [B, width]."""
        return self.c(torch.tanh(self.b(self.same(self.a(x) * self.c.weight.detach().sum()))))


class Tied(nn.Module):
    """A model of layers that add to the first one's result. The first and the last share one matrix; batch statistics
    follow."""

    def __init__(self, layers: int, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.layers[-1].weight = self.layers[0].weight
        self.drop, self.norm = nn.Dropout(0.25), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] → [B, width]."""
        first, *others = self.layers
        skip = made = self.drop(torch.tanh(first(x)))
        for layer in others:
            made = torch.tanh(layer(made)) + skip
        return self.norm(made)


class _Layer(nn.Module):
    """A layer of batch statistics, two products, and a factor that is the layer's own or frozen."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale, self.rate = nn.Parameter(torch.full((width,), 0.5)), rate

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] → [B, width]."""
        return x + self.rate * self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    """A model of layers with buffers, frozen weights and a factor that falls with depth; all read the input again."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(width, 1.0 / (depth + 1)) for depth in range(layers))
        self.mix = nn.Parameter(torch.full((layers,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] → [B, width]."""
        first = x
        for depth, layer in enumerate(self.layers):
            x = layer(x + self.mix[depth] * first)
        return x
