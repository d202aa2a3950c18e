"""The terms of a loss: numbers that a plan adds up, each with a factor and a denominator of its own."""

from __future__ import annotations

from typing import NamedTuple

from .binding import COUNT, Binding


class LossTerm(NamedTuple):
    """``factor`` times a number that the model's output gives. ``kind`` is ``cross_entropy``, ``output`` or
    ``callable``; ``ignore`` is the class that a cross entropy does not count."""

    kind: str
    target: str
    operands: tuple[str, ...]
    ignore: int | None = None
    factor: float = 1.0


def term_count(number: int) -> Binding:
    """Return the binding of the count that divides a term; terms are numbered from 1."""
    return COUNT if number == 1 else Binding("count", str(number))


def term_weight(number: int) -> Binding:
    """Return the binding of the number that multiplies a term.

    A step multiplies the whole loss by one over the first term's count. A later term is multiplied by that count in F,
    and divided by its own denominator: by its own count, or by the number of microbatches where it is averaged over
    these.
    """
    return Binding("term", str(number))
