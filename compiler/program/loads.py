"""The loads of experts: the tokens that a step sent to each of them, and the biases by which a router balances them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .binding import Binding

LOAD = Binding("metric", "load")
"""The loads of all layers of a step, one behind the other in the order of the reference's results."""


TAKEN = ".taken"
"""The end of the name of a load that counts the tokens which got a slot, where experts have a capacity."""


class Bias(NamedTuple):
    """The bias that a router adds to the scores of experts before it chooses: a ``buffer`` of the model, and the
    ``rate`` by which a step moves it."""

    buffer: str
    rate: float


def capacities_in(manifest: Mapping[str, Any]) -> dict[str, float]:
    """Return the capacities of a build's experts, by their modules."""
    layers = manifest.get("experts", {}).items()
    return {module: fact["capacity"] for module, fact in layers if fact["capacity"] is not None}


def biases_in(manifest: Mapping[str, Any]) -> dict[str, Bias]:
    """Return the biases that a build's steps move, by the module of the experts."""
    layers = manifest.get("experts", {}).items()
    return {module: Bias(fact["buffer"], fact["rate"]) for module, fact in layers if fact["buffer"] is not None}
