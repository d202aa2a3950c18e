"""Small models and losses of which a build was refused as parc's own fault once, or trained as something else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

CLASSES = 27


class Words(nn.Module):
    """Logits ``[b, s, 27]`` of tokens ``[b, s]``, from a table that the head may share."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 16, padding_idx=0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, CLASSES)
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        """``[b, s]`` to ``[b, s, 27]``."""
        x = self.embed(tokens)
        return self.head(x + self.down(F.gelu(self.up(x))))


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """``[b, s, 27]`` and ``[b, s]`` to ``[b, s]``."""
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def _multi_hot(logits: Tensor, targets: Tensor, _: Tensor) -> Tensor:
    hot = F.one_hot(targets, CLASSES).amax(1).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits.amax(1), hot, pos_weight=logits.new_full((CLASSES,), 2.0))


def _focal(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    losses = token_losses(logits, targets)
    return ((1 - torch.exp(-losses)) ** 2 * losses * mask).sum() / mask.sum()


def _squares_of_classes(logits: Tensor, mask: Tensor) -> Tensor:
    return torch.logsumexp(logits, -1).square() * mask


def _preferences(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    scores = -(token_losses(logits, targets) * mask).sum(-1)
    return -F.logsigmoid(0.1 * (scores - scores.detach() * 0.9)).mean()


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
SPLIT: dict[str, Loss] = {
    "smooth": lambda o, t, m: F.cross_entropy(o.flatten(0, 1), t.flatten(), label_smoothing=0.1, ignore_index=0),
    "weighted": lambda o, t, m: F.cross_entropy(
        o.flatten(0, 1), t.flatten(), torch.linspace(0.5, 1.5, CLASSES, dtype=o.dtype), label_smoothing=0.1
    ),
    "squares_of_classes": lambda o, t, m: (token_losses(o, t) * m + 1e-2 * _squares_of_classes(o, m)).sum() / m.sum(),
    "capped": lambda o, t, m: F.cross_entropy(5.0 * torch.tanh(o / 5.0).flatten(0, 1), t.flatten(), ignore_index=0),
    "focal": _focal,
    "several_classes": _multi_hot,
    "greatest": lambda o, t, m: (o.amax(1) * m[:, :1]).square().mean(),
    "least": lambda o, t, m: (o.amin(1) * m[:, :1]).square().mean(),
    "spread": lambda o, t, m: (o.std(1) - 1).square().mean(),
    "norms": lambda o, t, m: (o.norm(dim=1) - 1).square().mean(),
    "product": lambda o, t, m: torch.sigmoid(o).prod(1).square().mean(),
    "some": lambda o, t, m: o.topk(3, -1).values.mean((1, 2)).square().mean(),
    "entropy": lambda o, t, m: torch.special.entr(o.softmax(-1)).sum(-1).mean(),
}
"""Losses of logits whose classes ranks hold in padded parts."""
COUNTED: dict[str, Loss] = {
    "means_of_sequences": lambda o, t, m: ((token_losses(o, t) * m).sum(-1) / m.sum(-1).clamp(min=1.0)).mean(),
    "clamped": lambda o, t, m: (token_losses(o, t) * m).sum() / m.sum().clamp(min=1.0),
    "by_a_size": lambda o, t, m: (token_losses(o, t) * m).sum() / (len(t) * 8),
    "where": lambda o, t, m: torch.where(m > 0, token_losses(o, t), 0.0).sum() / (m > 0).sum(),
    "selected": lambda o, t, m: token_losses(o, t).masked_select(m > 0).mean(),
    "total": lambda o, t, m: 0.01 * (token_losses(o, t) * m).sum(),
    "two_fractions": lambda o, t, m: (
        (token_losses(o, t) * m).sum() / m.sum() + 1e-2 * _squares_of_classes(o, m).sum() / m.sum()
    ),
    "a_fraction_and_a_mean": lambda o, t, m: (
        (token_losses(o, t) * m).sum() / m.sum() + 1e-2 * _squares_of_classes(o, m).mean()
    ),
    "preferences": _preferences,
}
"""Losses of sequences of unequal lengths, in microbatches on two ranks."""


globals().update(SPLIT | COUNTED)  # plans name them


class Given(nn.Module):
    """A table of rows, and a layer: what takes tokens in some way."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.down = nn.Embedding(12, 8), nn.Linear(8, 3)
        self.double()

    def classes(self, tokens: Tensor) -> Tensor:
        """``[b, s]`` to ``[b, 3]``."""
        return self.down(self.rows(tokens % 12).mean(1))


class ByKeyword(Given):
    """It takes all inputs by name."""

    def forward(self, **batch: Tensor) -> Tensor:
        """``[b, s]`` to ``[b, 3]``."""
        return self.classes(batch["tokens"])


class ByPosition(Given):
    """It takes tokens by position alone."""

    def forward(self, tokens: Tensor, /, scale: float = 1.0) -> Tensor:
        """``[b, s]`` to ``[b, 3]``."""
        return self.classes(tokens) * scale


class Nested(Given):
    """It returns logits in a tuple of a list of a dict."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None, *, extra: Tensor | None = None) -> dict[str, Any]:
        """``[b, s]`` to ``[b, 3]``."""
        return {"out": [(self.classes(tokens), None)], "none": None, "number": 3}


class OneDict(Given):
    """It takes a dict."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """``[b, s]`` to ``[b, 3]``."""
        return self.classes(batch["tokens"])


class OnePair(Given):
    """It takes a tuple in a dict."""

    def forward(self, batch: dict[str, tuple[Tensor]]) -> Tensor:
        """``[b, s]`` to ``[b, 3]``."""
        (tokens,) = batch["pair"]
        return self.classes(tokens)


class Scaled(nn.Module):
    """A layer times a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        """``[b, 8]`` to ``[b, 8]``."""
        return self.inner(x) * self.factor


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "batch": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
    "layer": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
    "scaled": Scaled,
    "untracked": lambda: nn.BatchNorm1d(8, track_running_stats=False),
    "pruned": lambda: prune.random_unstructured(nn.Linear(8, 8), "weight", 0.5),
}


class Copies(nn.Module):
    """Three layers, of which two are copies of the first where torch can copy it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        first = LAYERS[kind]()
        others = [LAYERS[kind]() if kind == "pruned" else copy.deepcopy(first) for _ in range(2)]
        self.layers, self.down = nn.ModuleList([first, *others]), nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """``[b, 8]`` to ``[b, 3]``."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.down(x)
