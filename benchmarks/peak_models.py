"""Models of ``peaks.py`` whose operators take room of their own."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal attention whose weights are dropped, between an embedding and a head; values may have their own width."""

    def __init__(self, width: int, heads: int, vocab: int, value: int = 0, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.embed, self.q, self.k = nn.Embedding(vocab, width), nn.Linear(width, width), nn.Linear(width, width)
        self.v, self.head = nn.Linear(width, value or width), nn.Linear(value or width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[b, s]`` to logits ``[b, s, vocab]``."""
        x = self.embed(tokens)
        q, k, v = (of(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for of in (self.q, self.k, self.v))
        p = self.dropout if self.training else 0.0
        return self.head(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p).transpose(1, 2).flatten(2)
        )


class Convolutions(nn.Module):
    """Convolutions, each followed by the statistics of the batch, over images."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
            for _ in range(layers)
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """``[b, 3, h, w]`` to logits ``[b, 10]``."""
        x = self.stem(pixels)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))
