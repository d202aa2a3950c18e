"""The number that padding holds, and pointwise operators at that one number: their value, and whether they have a
slope."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..ops.factors import OpCall, Operand
from ..program.program import operator

UNKNOWN = math.nan
Held = float | None
"""The contents of all padding of a dim: one number, which may be infinite; None for finite numbers that depend on data;
UNKNOWN for data that may be infinite or not a number."""


_known: dict[tuple[Any, ...], tuple[float, bool]] = {}


def point(call: OpCall, held: Sequence[Held], dtypes: Sequence[torch.dtype]) -> tuple[float, bool]:
    """Compute a pointwise operator at one point: its value, and whether it and its derivatives are finite numbers. None
    reads as 0."""
    key = call.op, repr((call.args, sorted(call.kwargs.items()))), *held, *dtypes
    if key not in _known:
        _known[key] = _computed(call, held, dtypes)
    return _known[key]


def _computed(call: OpCall, held: Sequence[Held], dtypes: Sequence[torch.dtype]) -> tuple[float, bool]:
    def wide(item: Any) -> Any:
        return torch.float64 if isinstance(item, torch.dtype) and item.is_floating_point else item

    with torch.enable_grad():
        values = [
            torch.tensor([value or 0.0], dtype=wide(dtype)).requires_grad_(dtype.is_floating_point)
            for value, dtype in zip(held, dtypes, strict=True)
        ]

        def fill(item: Any) -> Any:
            return values[item.index] if isinstance(item, Operand) else wide(item)

        options = {key: fill(item) for key, item in call.kwargs.items()}
        made = operator(call.op)(*map(fill, call.args), **options)
        made = made[0] if isinstance(made, (tuple, list)) else made
        slopes = []
        if made.requires_grad:
            wanted = [value for value in values if value.requires_grad]
            slopes = [g for g in torch.autograd.grad(made.sum(), wanted, allow_unused=True) if g is not None]
    value = float(made.detach().to(torch.float64).sum())
    numbers = math.isfinite(value) and all(bool(torch.isfinite(slope).all()) for slope in slopes)
    return (UNKNOWN if math.isnan(value) else value), numbers
