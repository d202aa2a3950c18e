"""The part that ``make test`` tries, where ``make fuzz`` tries all: examples that are drawn, and rows of a test.

A row is wide if other rows run the same code of parc on another model, size or number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import settings

_LEAST = 3


def share(part: float) -> settings:
    """Return settings to draw ``part`` of the profile's number of examples: 2.0 are twice as many, where one takes
    little time, and 0.1 a tenth."""
    return settings(max_examples=max(_LEAST, round(part * settings().max_examples)))


def wide(*values: Any) -> Any:
    """Return a row of a test that ``make fuzz`` runs alone."""
    return pytest.param(*values, marks=pytest.mark.wide)


def all_but(wide_ones: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return values of one parameter, of which some are wide.

    Raises:
        AssertionError: one of these is no value.
    """
    values, marked = list(values), set(wide_ones)
    assert marked <= {*values}, marked - {*values}
    return [wide(value) if value in marked else value for value in values]


def star(*parameters: Sequence[Any]) -> list[Any]:
    """Return all combinations of the values of parameters. Those are wide in which two or more are not the first of
    their parameter: so every value is tried, beside the first of all others."""
    first = [values[0] for values in parameters]
    return [
        wide(*row) if sum(value != usual for value, usual in zip(row, first, strict=True)) > 1 else row
        for row in product(*parameters)
    ]


def each_once(*parameters: Sequence[Any]) -> list[Any]:
    """Return all combinations of the values of parameters. Those are not wide in which all parameters are at the same
    place, of which a shorter one begins anew: so every value is tried, in as few rows as there can be."""
    longest = max(map(len, parameters))
    kept = {tuple(at % len(values) for values in parameters) for at in range(longest)}
    return [
        tuple(value for _, value in row) if tuple(at for at, _ in row) in kept else wide(*(value for _, value in row))
        for row in product(*(list(enumerate(values)) for values in parameters))
    ]
