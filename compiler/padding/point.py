"""The number that padding holds, and pointwise operators at that one number: their value, and whether they have a
slope."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..ops.factors import OpCall, Operand
from ..ops.rules import facts
from ..program.program import operator

UNKNOWN = math.nan
Held = float | None
"""The contents of all padding of a dim: one number, which may be infinite; None for finite numbers that depend on data;
UNKNOWN for data that may be infinite or not a number."""


_DATA = 0.7
"""A number that stands for data, where the padding beside it decides whether a result is finite."""
_known: dict[tuple[Any, ...], tuple[float, bool]] = {}
_beyond: dict[tuple[Any, ...], bool] = {}


def point(call: OpCall, held: Sequence[Held], dtypes: Sequence[torch.dtype]) -> tuple[float, bool]:
    """Compute a pointwise operator at one point: its value, and whether it and its derivatives are finite numbers. None
    reads as 0."""
    key = _key(call, held, dtypes)
    if key not in _known:
        _known[key] = _computed(call, held, dtypes)
    return _known[key]


def beyond_numbers(call: OpCall, held: Sequence[Held], dtypes: Sequence[torch.dtype]) -> bool:
    """Return whether a pointwise operator makes no finite number of finite ones, as a quotient by padding of zeros.
    What depends on data counts as a usual number."""
    given = [_DATA if value is None else value for value in held]
    if not facts(call.op).elementwise or len(held) < 2 or held.count(None) == len(held):
        return False
    if not all(map(math.isfinite, given)) or not any(dtype.is_floating_point for dtype in dtypes):
        return False
    key = _key(call, held, dtypes)
    if key not in _beyond:
        with torch.no_grad():
            values = [torch.tensor([value], dtype=_wide(dtype)) for value, dtype in zip(given, dtypes, strict=True)]
            _beyond[key] = not bool(_applied(call, values).isfinite().all())
    return _beyond[key]


def _key(call: OpCall, held: Sequence[Held], dtypes: Sequence[torch.dtype]) -> tuple[Any, ...]:
    return call.op, repr((call.args, sorted(call.kwargs.items()))), *held, *dtypes


def _wide(item: Any) -> Any:
    return torch.float64 if isinstance(item, torch.dtype) and item.is_floating_point else item


def _applied(call: OpCall, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the first result of a call on these operands."""

    def fill(item: Any) -> Any:
        return values[item.index] if isinstance(item, Operand) else _wide(item)

    made = operator(call.op)(*map(fill, call.args), **{key: fill(item) for key, item in call.kwargs.items()})
    first: torch.Tensor = made[0] if isinstance(made, (tuple, list)) else made
    return first


def _computed(call: OpCall, held: Sequence[Held], dtypes: Sequence[torch.dtype]) -> tuple[float, bool]:
    with torch.enable_grad():
        values = [
            torch.tensor([value or 0.0], dtype=_wide(dtype)).requires_grad_(dtype.is_floating_point)
            for value, dtype in zip(held, dtypes, strict=True)
        ]
        made = _applied(call, values)
        slopes = []
        if made.requires_grad:
            wanted = [value for value in values if value.requires_grad]
            slopes = [g for g in torch.autograd.grad(made.sum(), wanted, allow_unused=True) if g is not None]
    value = float(made.detach().to(torch.float64).sum())
    numbers = math.isfinite(value) and all(bool(torch.isfinite(slope).all()) for slope in slopes)
    return (UNKNOWN if math.isnan(value) else value), numbers
