"""Parts of a function: the lines that make some of its values, and the terms of a loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .binding import LOSS, Binding
from .program import Function, needed


def making(function: Function, returns: tuple[tuple[Binding, str], ...]) -> Function:
    """Return a function that returns these, with the lines and parameters alone that they need."""
    lines, read = needed(function.lines, (name for _, name in returns))
    parameters = tuple(value for value in function.parameters if value.name in read)
    return replace(function, parameters=parameters, lines=lines, returns=returns)


def weighted_terms(function: Function) -> Mapping[str, Function]:
    """Return the functions that make the terms of a loss which are multiplied by a weight of their own, by their
    numbers. Each returns its term as the loss."""
    terms = {}
    for number, weight in function.bound("term").items():
        (term,) = (name for line in function.readers[weight.name] for name in line.uses if name != weight.name)
        terms[number] = making(function, ((LOSS, term),))
    return terms
