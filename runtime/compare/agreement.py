"""The agreement of a simulation with the captured graph: the largest errors, and where they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import TensorType
from ...compiler.program.program import Line, Ref
from ..ranks.gather import whole_tensor

# ---- near ties
# A top-k is no continuous function of its scores. If two are closer than rounding, ranks that sum in another order may
# choose another one than a single device, and nothing after that is comparable.


DRAWS = 3
"""The number of draws of random data, if results differed on those before, which nearly tied."""
NEAR = 1e-9
"""The margin below which rounding may decide in float64: numbers are compared to a tenth of it."""
_CHOICES = ("aten.topk.default",)


@dataclass(slots=True)
class Margin:
    """The smallest distance between the last score that a top-k takes and the first that it leaves, relative to the
    largest score beside them; infinite without a top-k. Equal scores do not count, as every rank has them equal."""

    apart: float = math.inf
    at: str = ""

    def watch(self, line: Line, environments: Sequence[Mapping[str, Any]]) -> None:
        """Measure the scores of a line that is a top-k."""
        for environment in environments if line.op in _CHOICES else ():
            scores, *options = line.args
            assert isinstance(scores, Ref)
            apart = _score_margin(environment[scores.name], *options[:3])
            if apart < self.apart:
                self.apart, self.at = apart, f"{line.origin.module} {line.origin.source}".strip()


def _score_margin(scores: torch.Tensor, k: int, dim: int = -1, highest: bool = True) -> float:
    if not 0 < k < scores.shape[dim]:
        return math.inf
    scores = scores.detach().double()
    best = scores.topk(k + 1, dim, highest).values
    taken, left = best.select(dim, k - 1), best.select(dim, k)
    size = torch.where(scores.isfinite(), scores.abs(), 0.0).amax(dim)
    apart = ((taken - left).abs() / size)[(taken != left) & left.isfinite() & taken.isfinite()]
    return float(apart.min()) if apart.numel() else math.inf


# ---- returned tensors


def stacked(returned: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors of all microbatches by name, stacked along a new first dim."""
    return {name: torch.stack([*values]) for name, values in returned.items()}


def joined(
    pieces: Sequence[Mapping[str, torch.Tensor]], types: Mapping[str, TensorType], mesh: Mesh
) -> dict[str, torch.Tensor]:
    """Return the whole tensors by name. ``pieces`` are each rank's parts; their first dim is that of microbatches, and
    ``types`` are those of one microbatch."""
    whole = {}
    for name, type_ in types.items():
        held = {rank: of_rank[name] for rank, of_rank in enumerate(pieces) if name in of_rank}
        parts = zip(*(piece.unbind() for piece in held.values()), strict=True)
        microbatches = [whole_tensor(dict(zip(held, part, strict=True)), type_.placement, mesh) for part in parts]
        whole[name] = torch.stack(microbatches)
    return whole


# ---- agreement


TOLERANCE = 1e-10
"""The largest relative error in float64 that counts as none."""


@dataclass(slots=True)
class Agreement:
    """The largest relative errors over all steps, and the tensor that each belongs to."""

    loss: float = 0.0
    gradient: float = 0.0
    norm: float = 0.0
    metric: float = 0.0
    parameter: float = 0.0
    """The error of updated parameters, and of the optimizer's state, beside its formula."""
    buffer: float = 0.0
    output: float = 0.0
    worst: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    not_finite: str = ""
    """The value of the captured graph that is not finite, and its step, after which nothing is compared; "" if there is
    none."""
    amplified: str = ""
    """The value that a perturbation by one rounding changes too much to be tested, which explains a large error; "" if
    there is none."""
    margin: Margin = field(default_factory=Margin)
    """The margin of the captured graph's top-k lines."""

    @property
    def tied(self) -> bool:
        """True if numbers differ, and rounding may have decided a top-k."""
        return not self.largest <= TOLERANCE and self.margin.apart < NEAR

    @property
    def largest(self) -> float:
        """The largest of these errors."""
        return max(self.loss, self.gradient, self.norm, self.metric, self.parameter, self.buffer, self.output)

    def note(self, kind: str, error: float, where: str) -> None:
        """Keep an error if it is the largest of its kind; a number that is not finite is the largest of all."""
        error = error if error == error else float("inf")
        if error > getattr(self, kind):
            setattr(self, kind, error)
            self.worst[kind] = where
