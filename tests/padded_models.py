"""Models with dims that axes do not divide, for the plans in the tests of padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ACTIVATIONS: dict[str, Any] = {
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,  # what it makes of zero is no zero
    "log": lambda x: torch.log(x.square() + 0.5),
    "singular": lambda x: torch.log(x.abs()),  # neither a value nor a slope at zero
    "inverse": lambda x: 1.0 / (x + 0.1 * x.sign()),
    "softmax": lambda x: torch.softmax(x, -1),  # sees the dim whole
    "sorted": lambda x: torch.sort(x, -1).values,
    "total": lambda x: x / (1.0 + x.abs().sum(-1, keepdim=True)),
    "peak": lambda x: x - x.amax(-1, keepdim=True),
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "halves": lambda x: torch.cat([x[..., 1::2], x[..., ::2]], -1),
    "flat": lambda x: x.flatten(1).tanh().view(x.shape),
    "heads": lambda x: x.unflatten(-1, (5, -1)).sigmoid().flatten(-2),
    "positions": lambda x: x * torch.arange(1.0, x.shape[-1] + 1) / x.shape[-1],
    "split": lambda x: torch.cat([part.tanh() for part in x.split([3, x.shape[-1] - 3], -1)], -1),
    "cumulative": lambda x: x.cumsum(-1) / x.shape[-1],
    "batch": lambda x: x - x.mean(0, keepdim=True),
    "outer": lambda x: (x.tanh()[..., None] * x.sigmoid()[..., None, :]).sum(-1),
}


class Mlp(nn.Module):
    """A model with a table, one hidden layer with a residual, and a head."""

    def __init__(self, vocab: int = 13, width: int = 8, hidden: int = 10, kind: str = "gelu", bias: bool = True,
                 tied: bool = False, gated: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.up = nn.Linear(width, hidden * (2 if gated else 1), bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.head = nn.Linear(width, vocab, bias=bias and not tied)
        self.kind, self.gated = kind, gated
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        y = self.up(x)
        if self.gated:
            gate, y = y.chunk(2, -1)
            y = F.silu(gate) * y
        return self.head(x + self.down(ACTIVATIONS[self.kind](y)))


LAYERS: dict[str, Any] = {
    "layer_norm": lambda size: nn.Sequential(nn.GELU(), nn.LayerNorm(size)),
    "rms_norm": lambda size: nn.Sequential(nn.GELU(), nn.RMSNorm(size)),
    "dropout": lambda _: nn.Sequential(nn.GELU(), nn.Dropout(0.3)),
    "sigmoid_dropout": lambda _: nn.Sequential(nn.Sigmoid(), nn.Dropout(0.3)),
}


class Hidden(nn.Module):
    """A hidden layer with one of the activations, or of the layers."""

    def __init__(self, width: int, hidden: int, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.between = LAYERS[kind](hidden) if kind in LAYERS else ACTIVATIONS[kind]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.between(self.up(x)))
        return y


class Several(nn.Module):
    """A model of hidden layers of all kinds, beside one another."""

    def __init__(self, vocab: int = 12, width: int = 8, hidden: int = 10) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.parts = nn.ModuleDict({kind: Hidden(width, hidden, kind) for kind in (*ACTIVATIONS, *LAYERS)})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for part in self.parts.values():
            x = x + part(x)
        return self.head(x)
