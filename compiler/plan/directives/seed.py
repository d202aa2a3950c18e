"""``seed``: the number that all randomness depends on."""

from __future__ import annotations

from dataclasses import dataclass

from ..directive import Directive, argument


@dataclass(frozen=True)
class Seed(Directive):
    """The number that initial weights and dropout masks are functions of: the same however a plan splits the model.

    Masks are drawn for each microbatch, so plans with another number of microbatches draw other masks. The default is
    0.
    """

    USAGE = "seed N"
    LIMITS = (("n", (lambda value: 0 <= value < 2**63, "0 or more, below 2**63")),)

    value: int = argument(lambda given: int(given.number("n", 0)))
