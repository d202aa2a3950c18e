"""``steps``: the length of a run."""

from __future__ import annotations

from dataclasses import dataclass

from ..directive import ONE_OR_MORE, Directive, argument


@dataclass(frozen=True)
class Steps(Directive):
    """The number of optimizer steps of a run. `parc run --steps` trains for another number, with the same learning
    rates.
    """

    USAGE = "steps N"
    LIMITS = (("n", ONE_OR_MORE),)
    TRAINING = (("", "counts steps"),)

    value: int = argument(lambda line: int(line.number("n", 0)))
