"""``budget``: a promise about the memory of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ...grammar.usage import Arguments
from ..directive import Directive


@dataclass(frozen=True)
class Budget(Directive):
    """A promise that a build keeps or is refused: no rank needs more memory, as estimated from its programs."""

    USAGE = "budget memory SIZE"

    memory: int

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        return cls(arguments, int(arguments.number("memory") or 0))
