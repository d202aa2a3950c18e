"""What padding holds, and a pointwise operator at that one point: its value there, and whether it has a slope."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .factors import OpCall, Operand
from .program import operator

UNKNOWN = math.nan
Held = float | None
"""What all padding of a dim holds: one number, which may be infinite; None for numbers that depend on data; UNKNOWN,
which may be no number at all."""


def point(call: OpCall, held: Sequence[Held], dtypes: Sequence[torch.dtype]) -> tuple[float, bool]:
    """A pointwise operator at one point: its value, and whether it and its derivatives are numbers; None reads as 0."""
    arguments = repr((call.args, sorted(call.kwargs.items())))
    return _point(_Point(call.op, arguments, call.args, tuple(call.kwargs.items())), tuple(held), tuple(dtypes))


@dataclass(frozen=True, eq=False, slots=True)
class _Point:
    op: str
    text: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Point) and (self.op, self.text) == (other.op, other.text)

    def __hash__(self) -> int:
        return hash((self.op, self.text))


@lru_cache(maxsize=4096)
def _point(call: _Point, held: tuple[Held, ...], dtypes: tuple[torch.dtype, ...]) -> tuple[float, bool]:
    def wide(item: Any) -> Any:
        return torch.float64 if isinstance(item, torch.dtype) and item.is_floating_point else item

    with torch.enable_grad():
        values = [
            torch.tensor([value or 0.0], dtype=wide(dtype)).requires_grad_(dtype.is_floating_point)
            for value, dtype in zip(held, dtypes, strict=True)
        ]

        def fill(item: Any) -> Any:
            return values[item.index] if isinstance(item, Operand) else wide(item)

        made = operator(call.op)(*(fill(item) for item in call.args), **{key: fill(item) for key, item in call.kwargs})
        made = made[0] if isinstance(made, (tuple, list)) else made
        slopes = []
        if made.requires_grad:
            wanted = [value for value in values if value.requires_grad]
            slopes = [g for g in torch.autograd.grad(made.sum(), wanted, allow_unused=True) if g is not None]
    value = float(made.detach().to(torch.float64).sum())
    numbers = math.isfinite(value) and all(bool(torch.isfinite(slope).all()) for slope in slopes)
    return (UNKNOWN if math.isnan(value) else value), numbers
