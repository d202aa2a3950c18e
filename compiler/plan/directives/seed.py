"""``seed``: the number that all randomness depends on."""

from __future__ import annotations

from dataclasses import dataclass

from ..directive import Directive, argument


@dataclass(frozen=True)
class Seed(Directive):
    """The number from which initial weights and dropout masks are computed; 0 without this line. They are the same
    however a plan splits the model.

    Dropout masks are drawn for each microbatch, so a plan with another number of microbatches has other masks.
    """

    USAGE = "seed N"
    LIMITS = (("n", (lambda value: 0 <= value < 2**63, "0 or more, below 2**63")),)

    value: int = argument(lambda line: int(line.number("n", 0)))
