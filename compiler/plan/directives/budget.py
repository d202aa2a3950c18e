"""``budget``: a promise about the memory of a rank."""

from __future__ import annotations

from dataclasses import dataclass

from ..directive import Directive, argument


@dataclass(frozen=True)
class Budget(Directive):
    """A promise that a build keeps or is refused: no rank needs more memory, as estimated from its programs. The error
    names up to three changes of the plan, or several together, each compiled and within the budget.

    The memory of float32 products depends on the library that a CPU multiplies with. The larger estimate counts.
    """

    USAGE = "budget memory SIZE"

    memory: int = argument(lambda line: int(line.number("memory", 0)))
