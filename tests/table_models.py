"""Models of one layer of attention that compute with positions, each in its own way, as in real models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Angles(nn.Module):
    """Positions times frequencies; its callers make tables of them."""

    def __init__(self, half: int) -> None:
        super().__init__()
        self.frequencies: Tensor
        self.register_buffer("frequencies", 100.0 ** (-torch.arange(half) / half))

    def forward(self, positions: Tensor) -> Tensor:
        """[s] → [s, half]."""
        return positions[:, None].float() * self.frequencies


class Waves(nn.Module):
    """Sines and cosines of each position, as in the first Transformer; kept, and cut to the length of the input."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        angles = torch.arange(length)[:, None] * 100.0 ** (-torch.arange(width // 2) / (width // 2))
        self.table: Tensor
        self.register_buffer("table", torch.cat([angles.sin(), angles.cos()], 1))

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, width] → [s, width]."""
        return self.table[: x.shape[1]]


class Attends(nn.Module):
    """A model whose ``how`` is ``angles`` (rotary, of angles made elsewhere), ``waves`` (added), ``slopes`` (ALiBi:
    distances in scores), ``given`` (rotary, of positions that are an input) or ``scores`` (of products written out)."""

    def __init__(self, how: str, vocab: int = 32, width: int = 16, heads: int = 2, length: int = 64) -> None:
        super().__init__()
        self.how, self.heads = how, heads
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.qkv, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width)
        self.angles, self.waves = Angles(width // heads // 2), Waves(width, length)
        self.slopes: Tensor
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """[b, s] → [b, s, vocab]."""
        x = self.embed(tokens)
        steps = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions[0]
        if self.how == "waves":
            x = x + self.waves(x)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None
        if self.how in ("angles", "given"):
            angles = self.angles(steps)
            q, k = (turn(y, angles.cos(), angles.sin()) for y in (q, k))
        if self.how in ("slopes", "scores"):
            apart = (steps[None, :] - steps[:, None]).float()
            mask = self.slopes[:, None, None] * apart
        if self.how == "scores":
            made = ((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5 + mask).softmax(-1) @ v
        else:
            made = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.head(self.norm(x + made.transpose(1, 2).flatten(2)))


def turn(y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate entries by their positions."""
    first, second = y.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
