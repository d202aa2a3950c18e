"""``prefetch``: how early the weights of a block are gathered."""

from __future__ import annotations

from dataclasses import dataclass

from ..directive import NOT_NEGATIVE, Directive, argument

DEFAULT = 1


@dataclass(frozen=True)
class Prefetch(Directive):
    """The number of blocks ahead of its use at which a block's weights are gathered under `zero 3`; 1 without a line.

    While a block computes, the weights of the next N are on their way: each takes its memory that much longer. With
    `prefetch 0` a block's weights are gathered when it is its turn. Where `zero` names units, it is these that count.
    """

    USAGE = "prefetch N"
    LIMITS = (("n", NOT_NEGATIVE),)

    units: int = argument(lambda given: int(given.number("n", DEFAULT)))
