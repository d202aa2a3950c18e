"""Models whose programs follow the sizes of their inputs, each in its own way, or do not."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Positions(nn.Module):
    """A model with learned positions and a mask, cut to the length of the input; the words of ``how`` say what else
    depends on the length."""

    def __init__(self, length: int = 32, how: str = "") -> None:
        super().__init__()
        self.how = how.split()
        self.embed = nn.Embedding(32, 16)
        self.mask: Tensor
        self.positions = nn.Parameter(torch.randn(1, length, 16))
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 32)
        self.register_buffer("mask", torch.ones(length, length).tril())

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) + self.positions[:, :length]
        if "rate" in self.how:
            x = x * (2.0 / (3 * length)) + x.mean(1, keepdim=True)
        if "tensor" in self.how:
            x = x / torch.tensor(float(length))
        if "root" in self.how:
            x = x / math.sqrt(length)
        if "branch" in self.how and length > 20:
            x = x * 2
        if "prefix" in self.how:
            x = torch.cat([self.positions[:, :4].expand(len(x), -1, -1), x], 1)[:, : length + 4]
        if "blocks" in self.how:
            x = x + x[:, : length // 16 * 16].sum(1, keepdim=True)
        if "moved" in self.how:
            padded = nn.functional.pad(x.transpose(1, 2), (2, 0), mode="replicate").transpose(1, 2)
            x = x + x.roll(1, 1) + padded[:, :-2] + torch.cat(x.chunk(2, 1)[::-1], 1)
        if "statistics" in self.how:  # whose derivatives have numbers that no line of the model has
            wide = nn.functional.pad(x.transpose(1, 2), (1, 0), mode="circular").transpose(1, 2)[:, :-1]
            x = x + x.std(1, keepdim=True) + torch.var_mean(x, (0, 1), correction=0)[0] + wide
            x = nn.functional.group_norm(x.transpose(1, 2), 4).transpose(1, 2) * x.sigmoid().prod(1, keepdim=True)
            x = x + torch.diff(x, dim=1).sum(1, keepdim=True)
        if "lone" in self.how:  # at one size in the middle of a long range
            x = x * (3.0 if length == 88 else 2.0)
        total = x.shape[1]
        scores = (x @ x.transpose(1, 2)).masked_fill(self.mask[:total, :total] == 0, -1e4)
        x = (x + scores.softmax(-1) @ x)[:, total - length :]
        return self.head(x + self.down(torch.relu(self.up(x))))


class Pictures(nn.Module):
    """A model of convolutions that shrink a picture, statistics over batch and places, and the mean of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.second, self.head = nn.Conv2d(4, 8, 2, stride=2), nn.Linear(8, 5)

    def forward(self, pictures: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.norm(self.first(pictures)))))
        return self.head(x.mean((2, 3)))


TASK = """
input tokens int64 [B, S]
input targets int64 [B, S]
loss cross_entropy(output, targets)
optimizer adamw lr 1e-3 eps 1e-5 clip 1.0
seed 1
mesh dp=2, tp=2
shard tokens, targets [B/dp, _]
column up over tp
row down over tp
vocab embed, head over tp
"""
"""The rest of a plan of such a model, on four ranks."""


def positions(how: str = "", sizes: str = "B=4..16 by 4, S=4..28 by 4", length: int = 32) -> str:
    """Return a plan of ``Positions``."""
    return f'model "tests.ranged_models:Positions" (how="{how}", length={length})\nsizes {sizes}{TASK}'
