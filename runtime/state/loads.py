"""The loads of experts in a step: the tokens that each got, and how far the busiest is above the mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch

from ...compiler.build.build import Build
from ...compiler.program.step_values import LOAD, TAKEN

Loads = Mapping[str, Sequence[int]]
"""The tokens of each expert in a step, by the module of the experts."""


class Layer(NamedTuple):
    """A layer of ``experts``, which ``ranks`` share; each has as many as the others."""

    module: str
    experts: int
    ranks: int
    load: float
    """The load of the busiest rank, over the mean, for which memory was planned."""
    capacity: bool
    """True where experts leave tokens out."""


def layers_of(build: Build) -> tuple[Layer, ...]:
    """Return the layers of experts of a build, in the order in which its metric has their loads."""
    facts: Mapping[str, Any] = build.manifest.get("experts", {})
    known = [(name, facts[name]) for name in build.reference.main.returned("load") if name in facts]
    return tuple(
        Layer(name, fact["experts"], fact["ranks"], fact["load"], fact["capacity"] is not None) for name, fact in known
    )


def planned_load(build: Build) -> float:
    """Return the load of the busiest rank, over the mean, for which a build's memory was planned."""
    return max((layer.load for layer in layers_of(build)), default=1.0)


def loads_in(metrics: Mapping[str, torch.Tensor], layers: Sequence[Layer]) -> dict[str, list[int]]:
    """Return the loads of a step from its metrics; those of tokens that got a slot have names that end in ``TAKEN``."""
    if LOAD.name not in metrics:
        return {}
    sizes = {f"{layer.module}{end}": layer.experts for layer in layers for end in ("", TAKEN)[: 1 + layer.capacity]}
    parts = metrics[LOAD.name].split([*sizes.values()])
    return {name: part.tolist() for name, part in zip(sizes, parts, strict=True)}


def load_figures(loads: Loads, layers: Sequence[Layer]) -> dict[str, float]:
    """Return the load of the busiest expert, and of the busiest rank, over the mean: 1 is a perfect balance. Of several
    layers, the one with the worst. Where experts have a capacity, the share of choices that were left out too."""
    if not loads:
        return {}
    experts = (_over_mean(loads[layer.module]) for layer in layers)
    ranks = (_over_mean(_by_rank(loads[layer.module], layer.ranks)) for layer in layers)
    figures = {"imbalance": max(experts), "rank_imbalance": max(ranks)}
    taken = [(sum(loads[layer.module]), sum(loads[f"{layer.module}{TAKEN}"])) for layer in layers if layer.capacity]
    if taken:
        chosen = sum(one for one, _ in taken)
        figures["drop_rate"] = 1 - sum(kept for _, kept in taken) / max(chosen, 1)
    return figures


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
                f"was planned for {planned:g}; no token is lost as long as there is more"
            )
        self._steps = self._steps + 1 if imbalance > self._limit else 0
        if self._steps != self._patience:
            return ""
        return (
            f"for {self._patience} steps the busiest rank of experts has had more than {self._limit} times the mean "
            f"({imbalance:.2f} in step {step}); others wait for it: add a term such as `+ 0.01 output.aux_loss` to the "
            "loss, or `balance bias 0.001` to the line of `experts`"
        )
