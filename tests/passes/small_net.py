"""The model of the passes' goldens: little of everything that a pass changes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A product that a plan may split, and one that is not trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Attention of one head under a mask that is known before anything runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return x + F.scaled_dot_product_attention(q, k, v, mask).squeeze(1)


class Experts(nn.Module):
    """Each token is computed by one of four experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        weight, chosen = self.router(rows).softmax(-1).topk(1)
        total = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            total.index_add_(0, token, expert(rows[token]) * weight[token, place, None])
        return x + total.view_as(x)


class Net(nn.Module):
    """``[B, S]`` tokens of 10 to scores of the next, and the running mean of what a block makes."""

    mean: torch.Tensor

    def __init__(self, kinds: str = "bb", width: int = 4) -> None:
        super().__init__()
        parts = {"b": Block, "a": Attention, "e": Experts}
        self.embed = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(parts[kind](width) for kind in kinds)
        self.head = nn.Linear(width, 10, bias=False)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean((0, 1))
        return self.head(x)


def smoothed(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A cross entropy that is smoothed, with the square of the logarithm of its sum."""
    rows = output.flatten(0, 1)
    return F.cross_entropy(rows, targets.flatten(), label_smoothing=0.1) + rows.logsumexp(-1).square().mean()
