"""The loads of experts in a step: the tokens that each got, and how far the busiest is above the mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch

from ...compiler.build.build import Build
from ...compiler.program.loads import LOAD

Loads = Mapping[str, Sequence[int]]
"""The tokens of each expert in a step, by the module of the experts."""


class Layer(NamedTuple):
    """A layer of ``experts``, which ``ranks`` share; each has as many as the others."""

    module: str
    experts: int
    ranks: int
    load: float
    """The load of the busiest rank, over the mean, for which memory was planned."""


def layers_of(build: Build) -> tuple[Layer, ...]:
    """Return the layers of experts of a build, in the order in which its metric has their loads."""
    facts: Mapping[str, Any] = build.manifest.get("experts", {})
    modules = build.reference.main.returned("load")
    return tuple(
        Layer(module, facts[module]["experts"], facts[module]["ranks"], facts[module]["load"]) for module in modules
    )


def planned_load(build: Build) -> float:
    """Return the load of the busiest rank, over the mean, for which a build's memory was planned."""
    return max((layer.load for layer in layers_of(build)), default=1.0)


def taken_loads(metrics: Mapping[str, torch.Tensor], layers: Sequence[Layer]) -> dict[str, list[int]]:
    """Return the loads of a step from its metrics."""
    if LOAD.name not in metrics:
        return {}
    parts = metrics[LOAD.name].split([layer.experts for layer in layers])
    return {layer.module: part.tolist() for layer, part in zip(layers, parts, strict=True)}


def load_figures(loads: Loads, layers: Sequence[Layer]) -> dict[str, float]:
    """Return the load of the busiest expert, and of the busiest rank, over the mean: 1 is a perfect balance. Of several
    layers, the one with the worst."""
    if not loads:
        return {}
    experts = (_over_mean(loads[layer.module]) for layer in layers)
    ranks = (_over_mean(_by_rank(loads[layer.module], layer.ranks)) for layer in layers)
    return {"imbalance": max(experts), "rank_imbalance": max(ranks)}


def _by_rank(load: Sequence[int], ranks: int) -> list[int]:
    each = len(load) // ranks
    return [sum(load[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def _over_mean(load: Iterable[int]) -> float:
    tokens = list(load)
    return max(tokens) * len(tokens) / max(sum(tokens), 1)


@final
class LoadWatch:
    """A watch over the balance of experts: it speaks when the busiest rank has had more than ``limit`` times the mean
    for ``patience`` steps on end, and when it first has more than ``planned`` times, if a plan states that.

    >>> watch = LoadWatch(patience=2)
    >>> watch.note(7, 1.9), watch.note(8, 1.8)[:42], watch.note(9, 1.8)
    ('', 'for 2 steps the busiest rank of experts ha', '')
    """

    def __init__(self, planned: float = 1.0, limit: float = 1.5, patience: int = 20) -> None:
        self._planned, self._limit, self._patience, self._steps = planned, limit, patience, 0

    def note(self, step: int, imbalance: float) -> str:
        """Take the imbalance of a step's ranks; return a warning, or an empty text."""
        if imbalance > self._planned > 1:
            planned, self._planned = self._planned, 1.0
            return (
                f"in step {step} the busiest rank of experts had {imbalance:.2f} times the mean of their rows: memory "
                f"was planned for {planned:g}; nothing is lost while there is more"
            )
        self._steps = self._steps + 1 if imbalance > self._limit else 0
        if self._steps != self._patience:
            return ""
        return (
            f"for {self._patience} steps the busiest rank of experts has had more than {self._limit} times the mean "
            f"({imbalance:.2f} in step {step}); others wait for it: add a term such as `+ 0.01 output.aux_loss` to the "
            "loss, or `balance bias 0.001` to the line of `experts`"
        )
