"""Models of bags of embeddings: one of every kind of bag, and a DLRM."""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, SAMPLES, ENTRIES = 12, 8, 6
KINDS = [
    *product(("table", "ragged"), ("sum", "mean", "max"), (None, 0, -2), (False,)),
    *product(("equal", "given"), ("sum", "mean", "max"), (None,), (False,)),
    *product(("ended",), ("sum", "mean", "max"), (-1,), (False,)),
    *product(("table", "given"), ("sum",), (None, 11), (True,)),
]
"""The source of each bag's offsets, its mode, its padding row, and whether its entries have weights."""
RAGGED = [0, 1, 1, 9, 20, 21, 47, 48]
"""Offsets of bags of which one in the middle and the last are empty."""


class Bags(nn.Module):
    """A sum of bags of every kind in ``KINDS``, or of those at some positions."""

    def __init__(self, chosen: str = "") -> None:
        super().__init__()
        self.kinds = [KINDS[int(at)] for at in chosen.split()] or KINDS
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(ROWS, 4, mode=mode, padding_idx=padding, include_last_offset=offsets == "ended")
            for offsets, mode, padding, _ in self.kinds
        )
        self.weigh, self.head = nn.Linear(ENTRIES, ENTRIES), nn.Linear(4, 4)

    def forward(self, items: Tensor, starts: Tensor) -> Tensor:
        """Items ``[b, 6]`` and offsets ``[b]`` to ``[b, 4]``."""
        samples, entries = items.shape
        weights = torch.sigmoid(self.weigh(items.to(self.weigh.weight.dtype) - 4))
        offsets = {
            "equal": torch.arange(samples) * entries,
            "ragged": torch.tensor(RAGGED),
            "ended": torch.tensor([*RAGGED, samples * entries]),
            "given": starts,
        }
        total = torch.zeros(samples, 4, dtype=self.head.weight.dtype)
        for bag, (source, _, _, weighted) in zip(self.bags, self.kinds, strict=True):
            if source == "table":
                vectors = bag(items, None, weights if weighted else None)
            else:
                vectors = bag(items.flatten(), offsets[source], weights.flatten() if weighted else None)
            total = total + torch.tanh(vectors)
        return self.head(total)


class Dlrm(nn.Module):
    """A DLRM as facebookresearch/dlrm has it: a bag for each sparse feature, whose indices and offsets are inputs, a
    product of each pair of features, and two perceptrons."""

    def __init__(self, mode: str = "sum") -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 8, mode=mode) for rows in (12, 4, 30))
        self.bottom = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(14, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        """Numbers ``[b, 13]``, indices ``[3, n]`` and offsets ``[3, b]`` to a score for each sample."""
        x = self.bottom(dense)
        features = [x, *(table(indices[at], offsets[at]) for at, table in enumerate(self.tables))]
        every = torch.stack(features, 1)
        row, column = torch.tril_indices(4, 4, -1)
        crossed = torch.bmm(every, every.transpose(1, 2))[:, row, column]
        return self.top(torch.cat([x, crossed], 1)).squeeze(1)


def clicked(output: Tensor, click: Tensor) -> Tensor:
    """Return the mean loss of a score for each sample."""
    return F.binary_cross_entropy_with_logits(output, click)
