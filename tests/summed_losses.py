"""A model whose output has several losses: logits of two heads, a balance of a gate over all tokens, and a penalty."""

from __future__ import annotations

import torch
from torch import nn


class Gated(nn.Module):
    """Two layers with a gate, as a mixture of experts has one, and two heads: the second looks further ahead."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.gate = nn.Linear(8, 4)
        self.heads = nn.ModuleList(nn.Linear(8, 17) for _ in range(2))
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + self.drop(block(hidden).tanh())
        scores = self.gate(hidden)
        chosen = scores.softmax(-1).flatten(0, 1).mean(0)
        return {
            "logits": self.heads[0](hidden), "ahead": self.heads[1](hidden), "aux_loss": 4 * (chosen * chosen).sum(),
            "z_loss": scores.logsumexp(-1).square().mean(),
        }  # fmt: skip
