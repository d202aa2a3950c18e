"""Neutral elements, proved: what padding must hold so that a reduction over more entries is that over the model's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import sympy

_n, _m, _i, _j = sympy.symbols("n m i j", integer=True, nonnegative=True)
_s, _c = sympy.symbols("s c", real=True)


@dataclass(frozen=True, slots=True)
class Reduction:
    """How entries are reduced, and the ``value`` that more of them must hold to change nothing.

    ``adds`` is what one entry adds to a sum, or, where ``joins``, what it makes of the result ``s`` so far. ``c`` is
    whatever else an entry is multiplied by.
    """

    value: float
    adds: Callable[[sympy.Expr], sympy.Expr]
    joins: bool = False


_EXPONENTIALS = Reduction(-math.inf, lambda x: sympy.exp(x - _s))

REDUCTIONS = {
    "sum": Reduction(0.0, lambda x: _c * x),
    "parc.square_sum.default": Reduction(0.0, lambda x: x**2),
    "parc.row_max": Reduction(-math.inf, lambda x: sympy.Max(_s, x), joins=True),
    "parc.token_loss.default": _EXPONENTIALS,
    "parc.loss_parts.default": _EXPONENTIALS,
}
"""Operator → how its first operand is reduced over a factor that results lack; others sum what they are linear in."""

LOOKUPS = frozenset({"parc.lookup.default", "aten.embedding.default"})
"""Operators that read rows of their first operand by numbers below how many the model has."""

COUNTED = {
    "aten.embedding.default": (0, 0),
    "parc.lookup.default": (0, 0),
    "parc.token_loss.default": (0, 1),
    "parc.loss_parts.default": (0, 1),
    "parc.loss_parts_backward.default": (1, 1),
}
"""Operator → the operand and its dim whose entries are named by their numbers, so that padding comes after them all."""


@lru_cache(maxsize=256)
def is_neutral(op: str, held: float | None) -> bool:
    """Whether m entries that hold ``held`` leave a reduction of n others as it is, for all n and m: proved in sympy
    from what one entry does. None is data, of which nothing is known."""
    if op in LOOKUPS:  # no row n + i is one of the numbers below n, which are n - 1 - j
        return ((_n + _i) - (_n - 1 - _j)).is_positive is True
    if held is None or math.isnan(held):
        return False
    entry = {math.inf: sympy.oo, -math.inf: -sympy.oo}.get(held)
    made = REDUCTIONS[op].adds(sympy.Rational(held) if entry is None else entry)
    left = made - _s if REDUCTIONS[op].joins else sympy.Sum(made, (_i, _n, _n + _m - 1)).doit()
    return bool(sympy.simplify(left) == 0)
