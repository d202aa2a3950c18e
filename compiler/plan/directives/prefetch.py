"""``prefetch``: how early the weights of a block are gathered."""

from __future__ import annotations

from dataclasses import dataclass

from ..directive import NOT_NEGATIVE, Directive, argument

DEFAULT = 1


@dataclass(frozen=True)
class Prefetch(Directive):
    """The number of blocks by which `zero 3` gathers weights ahead of their use; 1 without this line.

    While a block computes, the weights of the next N blocks are on their way, and take memory for that long. With
    `prefetch 0` the weights of a block are gathered when it is its turn. If `zero` names units, N counts units.
    """

    USAGE = "prefetch N"
    LAYOUT = True
    LIMITS = (("n", NOT_NEGATIVE),)

    units: int = argument(lambda line: int(line.number("n", DEFAULT)))
