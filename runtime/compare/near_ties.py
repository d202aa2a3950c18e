"""Near ties: the distance between the last score that a top-k takes and the first that it leaves, as a router has it.

What is chosen is no continuous function of the scores. Where two are closer than rounding, ranks that add up in another
order may choose otherwise than one device, and no number behind it is comparable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...compiler.program.program import Line, Ref

DRAWS = 3
"""The number of times that random numbers are drawn, where those before nearly tied and results differed."""
NEAR = 1e-9
"""The margin below which rounding may decide in float64: numbers are compared to a tenth of it."""
_CHOICES = ("aten.topk.default",)


@dataclass(slots=True)
class Margin:
    """The smallest distance between a last score taken and a first one left, relative to the largest score beside them;
    infinite where nothing is chosen. Equal scores do not count: whoever has them chooses alike."""

    apart: float = math.inf
    at: str = ""

    def watch(self, line: Line, environments: Sequence[Mapping[str, Any]]) -> None:
        """Look at the scores of a line that chooses."""
        for environment in environments if line.op in _CHOICES else ():
            scores, *options = line.args
            assert isinstance(scores, Ref)
            apart = _apart(environment[scores.name], *options[:3])
            if apart < self.apart:
                self.apart, self.at = apart, f"{line.origin.module} {line.origin.source}".strip()


def _apart(scores: torch.Tensor, k: int, dim: int = -1, highest: bool = True) -> float:
    if not 0 < k < scores.shape[dim]:
        return math.inf
    scores = scores.detach().double()
    best = scores.topk(k + 1, dim, highest).values
    taken, left = best.select(dim, k - 1), best.select(dim, k)
    size = torch.where(scores.isfinite(), scores.abs(), 0.0).amax(dim)
    apart = ((taken - left).abs() / size)[(taken != left) & left.isfinite() & taken.isfinite()]
    return float(apart.min()) if apart.numel() else math.inf
