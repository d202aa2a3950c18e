"""Neutral elements, proved: the value that padding must hold so that a reduction over more entries gives the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import sympy

from .rules import facts

_n, _m, _i, _j = sympy.symbols("n m i j", integer=True, nonnegative=True)
_s, _c = sympy.symbols("s c", real=True)


@dataclass(frozen=True, slots=True)
class Reduction:
    """A way to reduce entries, and the ``value`` that extra entries must hold to change nothing.

    ``adds`` is what one entry adds to a sum, or, where ``joins``, what it makes of the result ``s`` so far. ``c`` is
    whatever else an entry is multiplied by.
    """

    value: float
    adds: Callable[[sympy.Expr], sympy.Expr]
    joins: bool = False


_WAYS = {
    "sum": Reduction(0.0, lambda x: _c * x),
    "squares": Reduction(0.0, lambda x: x**2),
    "max": Reduction(-math.inf, lambda x: sympy.Max(_s, x), joins=True),
    "exponentials": Reduction(-math.inf, lambda x: sympy.exp(x - _s)),
}
"""The reductions that rows name, by name: how an operator reduces its first operand over a factor that results lack."""


def reduction_of(op: str) -> Reduction | None:
    """Return the reduction of an operator's first operand. It is None where the operator is linear in its summands, or
    reduces nothing."""
    way = facts(op).reduces
    return None if way in ("", "sum") else _WAYS[way]


@lru_cache(maxsize=256)
def is_neutral(op: str, held: float | None) -> bool:
    """Return whether m extra entries that hold ``held`` leave a reduction of n others as it is, for all n and m. Sympy
    proves it from what one entry does. ``held`` is None for data, of which nothing is known."""
    if facts(op).looks_up:  # no row n + i is one of the numbers below n, which are n - 1 - j
        return ((_n + _i) - (_n - 1 - _j)).is_positive is True
    if held is None or math.isnan(held):
        return False
    reduction = reduction_of(op) or _WAYS["sum"]
    entry = {math.inf: sympy.oo, -math.inf: -sympy.oo}.get(held)
    made = reduction.adds(sympy.Rational(held) if entry is None else entry)
    left = made - _s if reduction.joins else sympy.Sum(made, (_i, _n, _n + _m - 1)).doit()
    return bool(sympy.simplify(left) == 0)
