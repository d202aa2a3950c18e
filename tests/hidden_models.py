"""Small models in which weights of zeros hide most of what is computed, as people initialise them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WAYS = ("head", "lora", "rezero", "adaln", "control")


class Hidden(nn.Module):
    """A table, a norm and a GELU behind zeros: of a head, of LoRA's second factor, of ReZero's factor, of the gates of
    adaLN-zero, or of ControlNet's convolutions."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.table, self.norm = nn.Embedding(12, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        zeros: list[nn.Module] = [self.head] if way == "head" else [self.down] if way == "lora" else []
        if way == "rezero":
            self.factor = nn.Parameter(torch.zeros(()))
        if way == "adaln":
            self.gates = nn.Linear(8, 24)
            zeros.append(self.gates)
        if way == "control":
            self.before, self.behind = nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 1)
            zeros += [self.before, self.behind]
        for parameter in (parameter for module in zeros for parameter in module.parameters()):
            nn.init.zeros_(parameter)

    def branch(self, h: Tensor) -> Tensor:
        """``[b, s, 8]`` to the same shape."""
        return self.down(nn.functional.gelu(self.up(h)))

    def forward(self, tokens: Tensor) -> Tensor:
        """``[b, s]`` to ``[b, s, 4]``."""
        h = self.table(tokens)
        if self.way in ("head", "lora"):
            h = h + self.branch(self.norm(h))
        elif self.way == "rezero":
            h = h + self.factor * self.branch(self.norm(h))
        elif self.way == "adaln":
            shift, scale, gate = self.gates(nn.functional.silu(h.mean(1, keepdim=True))).chunk(3, -1)
            h = h + gate * self.branch(self.norm(h) * (1 + scale) + shift)
        else:
            control = h + self.before(h.transpose(1, 2)).transpose(1, 2)
            h = h + self.behind(self.branch(self.norm(control)).transpose(1, 2)).transpose(1, 2)
        return self.head(h)


def square(output: Tensor, wanted: Tensor) -> Tensor:
    """The mean square of the difference from ``wanted``."""
    return (output - wanted).square().mean()
