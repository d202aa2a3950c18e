"""Small attention layers with fused rows and grouped heads, written as in real models; a few lines of a plan place
each."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, VOCAB = 32, 48


class Grouped(nn.Module):
    """Attention with queries, keys, values and maybe a gate for each head, one after the other in one weight, or the
    first three in three weights. Keys are never repeated."""

    def __init__(self, heads: int, groups: int, fused: bool, size: int, gated: bool) -> None:
        super().__init__()
        self.size = size or WIDTH // heads
        self.rows = [heads * self.size, groups * self.size, groups * self.size]
        if fused:
            self.rows += [heads] * gated
            self.qkv = nn.Linear(WIDTH, sum(self.rows))
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, rows) for rows in self.rows)
        self.out = nn.Linear(self.rows[0], WIDTH)
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).split(self.rows, dim=-1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts[:3])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        for gate in parts[3:]:
            y = y * gate.sigmoid().unsqueeze(-1)
        return self.out(y.flatten(2))


class Gated(nn.Module):
    """A mixing layer without attention: values and one gate for each head in one weight, as in state space models."""

    def __init__(self, heads: int, repeat: bool) -> None:
        super().__init__()
        self.rows, self.repeat = [WIDTH, heads], repeat
        self.both, self.out = nn.Linear(WIDTH, WIDTH + heads), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, gates = self.both(x).split(self.rows, dim=-1)
        each = WIDTH // self.rows[1]
        if self.repeat:
            gates = gates.repeat_interleave(each, -1)
        else:
            gates = gates.unsqueeze(-1).expand(*gates.shape, each).flatten(2)
        return self.out(values * gates.sigmoid())


class Interleaved(nn.Module):
    """Attention whose weight has, group after group, its queries, a key and a value; attention is written out."""

    def __init__(self, heads: int, groups: int) -> None:
        super().__init__()
        self.groups, self.size = groups, WIDTH // heads
        self.qkv = nn.Linear(WIDTH, groups * (heads // groups + 2) * self.size)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.qkv(x).view(*x.shape[:2], self.groups, -1, self.size)
        q, k, v = rows[..., :-2, :], rows[..., [-2], :], rows[..., [-1], :]
        q, k, v = (part.expand(q.shape).flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        weights = (q @ k.transpose(-1, -2) / self.size**0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Einsum(nn.Module):
    """Attention with queries in groups that share a key: heads are two dims."""

    def __init__(self, heads: int, groups: int) -> None:
        super().__init__()
        self.groups, self.size = groups, WIDTH // heads
        self.q, self.k, self.v = (nn.Linear(WIDTH, rows * self.size) for rows in (heads, groups, groups))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).view(*x.shape[:2], self.groups, -1, self.size)
        k, v = (part.unflatten(-1, (-1, self.size)) for part in (self.k(x), self.v(x)))
        weights = torch.einsum("bngrd,bmgd->bgrnm", q, k).softmax(-1)
        return self.out(torch.einsum("bgrnm,bmgd->bngrd", weights, v).flatten(2))


class Model(nn.Module):
    """A model of one attention between an embedding and a head."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.embed, self.attention, self.head = nn.Embedding(VOCAB, WIDTH), attention, nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.attention(x))


def grouped(heads: int = 8, groups: int = 4, fused: bool = True, size: int = 0, gated: bool = False) -> nn.Module:
    """Make a model with grouped attention."""
    return Model(Grouped(heads, groups, fused, size, gated))


def gated(heads: int = 8, repeat: bool = True) -> nn.Module:
    """Make a model whose mixing is gates."""
    return Model(Gated(heads, repeat))


def interleaved(heads: int = 8, groups: int = 4) -> nn.Module:
    """Make a model with interleaved rows."""
    return Model(Interleaved(heads, groups))


def einsum(heads: int = 4, groups: int = 2) -> nn.Module:
    """Make a model whose queries are groups of heads."""
    return Model(Einsum(heads, groups))


def encoder(heads: int = 4) -> nn.Module:
    """Make a model of torch's own layer, whose rows are fused in thirds."""
    return Model(nn.TransformerEncoderLayer(WIDTH, heads, 64, dropout=0.0, batch_first=True))
