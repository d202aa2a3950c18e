"""The terms of a loss: numbers that a plan adds up, each with a factor and a denominator of its own."""

from __future__ import annotations

from typing import NamedTuple

from .binding import Binding


class LossTerm(NamedTuple):
    """``factor`` times a number that the model's output gives. ``kind`` is ``cross_entropy``, ``output`` or
    ``callable``; ``ignore`` is the class that a cross entropy does not count."""

    kind: str
    target: str
    operands: tuple[str, ...]
    ignore: int | None = None
    factor: float = 1.0


def term_count(number: int | str) -> Binding:
    """Return the binding of the count that divides a term that is not the base: of a cross entropy, its targets."""
    return Binding("count", str(number))


def term_weight(number: int) -> Binding:
    """Return the binding of the number that multiplies a term; terms are numbered from 1.

    A step multiplies the whole loss by one over the count of its *base*, the first term that has one. F therefore
    multiplies every other term by that count over the term's own denominator: its own count, or the number of
    microbatches where it is averaged over these.
    """
    return Binding("term", str(number))
