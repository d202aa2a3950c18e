"""Sizes: integers, or polynomials in positive integer symbols, with exact arithmetic and nothing inexact."""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

import sympy

Size: TypeAlias = int | sympy.Expr
Shape: TypeAlias = tuple[Size, ...]


def tidy(size: Size) -> Size:
    """The one form of a size: a plain `int` when it is a number, else an expanded polynomial."""
    return size if isinstance(size, int) else _tidy(size)


@lru_cache(maxsize=65536)
def _tidy(size: sympy.Expr) -> Size:
    expanded = sympy.expand(size)
    return int(expanded) if expanded.is_Integer else expanded


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for every value of their symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(a == b) or tidy(sympy.sympify(a) - b) == 0


def quotient(a: Size, b: Size) -> Size | None:
    """`a / b` when that is a size for every value of the symbols (`6*u / 3 = 2*u`), else None (`u / 2`)."""
    if isinstance(a, int) and isinstance(b, int):
        return None if b == 0 or a % b else a // b
    return _quotient(sympy.sympify(a), sympy.sympify(b))


@lru_cache(maxsize=65536)
def _quotient(a: sympy.Expr, b: sympy.Expr) -> Size | None:
    if b == 0:
        return None
    numerator, denominator = sympy.fraction(sympy.together(sympy.cancel(a / b)))
    return tidy(numerator) if denominator == 1 else None


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes; 1 for none."""
    total: Size = 1
    for size in sizes:
        total = total * size
    return tidy(total)


def common_divisor(sizes: Iterable[Size]) -> Size:
    """The greatest common divisor; 0 for none or only zeros."""
    divisor: Size = 0
    for size in sizes:
        if isinstance(divisor, int) and isinstance(size, int):
            divisor = math.gcd(divisor, size)
        else:
            divisor = tidy(sympy.gcd(divisor, size))
    return divisor
