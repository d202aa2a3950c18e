"""A model whose layers do not repeat: DenseNet-121. Each of its 58 dense layers reads all layers before it in its
block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DenseLayer(nn.Module):
    """Two normed convolutions, from ``inputs`` channels to four times ``growth``, and on to ``growth`` channels."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, before: Sequence[Tensor]) -> Tensor:
        """[B, c, H, W] of several → [B, growth, H, W]."""
        x = self.conv1(F.relu(self.norm1(torch.cat(list(before), 1))))
        y: Tensor = self.conv2(F.relu(self.norm2(x)))
        return y


class DenseBlock(nn.Module):
    """Layers that each read the block's input and the results of all layers before them."""

    def __init__(self, layers: int, inputs: int, growth: int) -> None:
        super().__init__()
        self.layers = layers
        for index in range(layers):
            self.add_module(f"layer{index}", DenseLayer(inputs + index * growth, growth))

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] → [B, inputs + layers * growth, H, W]."""
        features = [x]
        for index in range(self.layers):
            features.append(self.get_submodule(f"layer{index}")(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """A model from pictures to class scores."""

    def __init__(self, blocks: Sequence[int] = (6, 12, 24, 16), growth: int = 32, classes: int = 10) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.steps = len(blocks)
        for index, layers in enumerate(blocks):
            self.add_module(f"block{index}", DenseBlock(layers, width, growth))
            width += layers * growth
            if index + 1 < len(blocks):
                self.add_module(f"norm{index}", nn.BatchNorm2d(width))
                self.add_module(f"half{index}", nn.Conv2d(width, width // 2, 1, bias=False))
                width //= 2
        self.last = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] → [B, classes]."""
        x = F.max_pool2d(F.relu(self.norm(self.stem(pixels))), 3, stride=2, padding=1)
        for index in range(self.steps):
            x = self.get_submodule(f"block{index}")(x)
            if index + 1 < self.steps:
                x = self.get_submodule(f"half{index}")(F.relu(self.get_submodule(f"norm{index}")(x)))
                x = F.avg_pool2d(x, 2)
        scores: Tensor = self.head(F.relu(self.last(x)).mean((2, 3)))
        return scores
