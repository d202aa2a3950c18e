"""Models whose loss reads the logits of every layer's router, added up in different ways."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A layer that returns its router's logits beside its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.router = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.down(F.gelu(self.up(x))), self.router(x)


class Routers(nn.Module):
    """Layers, and a loss of all logits that is made in one of several ways."""

    def __init__(self, way: str, layers: int = 5, width: int = 16) -> None:
        super().__init__()
        self.way, self.embed, self.head = way, nn.Embedding(24, width), nn.Linear(width, 24)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x, logits, means = self.embed(tokens), list[Tensor](), list[Tensor]()
        for block in self.blocks:
            x, scores = block(x)
            logits.append(scores)
            if self.way == "means":
                means.append(scores.logsumexp(-1).square().mean())
        loss: Any = 0
        if self.way == "from zero":
            loss = sum(scores.logsumexp(-1).square() for scores in logits)
        elif self.way == "zeros":
            loss = x.new_zeros(tokens.shape)
            for scores in logits:
                loss = loss + scores.logsumexp(-1).square()
        elif self.way == "reversed":
            for scores in reversed(logits):
                loss = loss * 0.5 + scores.logsumexp(-1).square()
        elif self.way == "means":
            loss = sum(means) / len(means)
        elif self.way == "weighted":
            loss = sum(scores.logsumexp(-1).square() * (at + 1) for at, scores in enumerate(logits))
        elif self.way == "cat":
            loss = torch.cat(logits).logsumexp(-1).square()
        elif self.way == "stack":
            loss = torch.stack(logits).logsumexp(-1).square()
        return {"logits": self.head(x), "aux": loss.mean()}
