"""Models of one sequence with attention under every kind of mask, for plans that split the sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MASKS = ("causal", "window", "document", "padding", "none")


class Block(nn.Module):
    """Attention with a mask of one kind, and an MLP."""

    def __init__(self, width: int, heads: int, groups: int, mask: str, p: float) -> None:
        super().__init__()
        self.heads, self.groups, self.mask, self.p = heads, groups, mask, p
        self.norm, self.q, self.out = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width * groups // heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(p), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.norm(x)
        q = self.q(normed).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = self.kv(normed).view(batch, length, 2, self.groups, -1).permute(2, 0, 3, 1, 4)
        at, mask = torch.arange(length), None
        if self.mask == "window":
            mask = (at[:, None] >= at) & (at[:, None] - at < 5)
        elif self.mask == "document":
            mask = (at[:, None] >= at) & (document[:, None, :, None] == document[:, None, None, :])
        elif self.mask == "padding":
            mask = (document > 0)[:, None, None, :]
        made = F.scaled_dot_product_attention(
            q, k, v, mask, self.p if self.training else 0.0, self.mask == "causal", enable_gqa=self.groups < self.heads
        )
        x = x + self.out(made.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


class Net(nn.Module):
    """Embedded tokens and positions through blocks. ``also`` is something that needs the whole sequence: ``conv`` or
    ``lstm``."""

    def __init__(
        self,
        mask: str = "causal",
        heads: int = 4,
        groups: int = 4,
        p: float = 0.0,
        also: str = "",
        width: int = 16,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.tokens, self.positions, self.also = nn.Embedding(32, width), nn.Embedding(48, width), also
        self.blocks = nn.ModuleList(Block(width, heads, groups, mask, p) for _ in range(layers))
        self.conv = nn.Conv1d(width, width, 3, padding=1) if also == "conv" else None
        self.lstm = nn.LSTM(width, width, batch_first=True) if also == "lstm" else None
        self.head = nn.Linear(width, 32)

    def forward(self, tokens: Tensor, document: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        if self.conv is not None:
            x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        if self.lstm is not None:
            x = self.lstm(x)[0]
        for block in self.blocks:
            x = block(x, document)
        return self.head(x)
