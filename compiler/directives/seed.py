"""``seed``: what randomness is counted from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from ...grammar.diagnostics import Diagnostic
from ...grammar.usage import Arguments
from ..directive import Directive, Scope, check_number


@dataclass(frozen=True)
class Seed(Directive):
    """The number that initial weights and dropout masks are functions of: the same however a plan splits the model.

    Masks are drawn for each microbatch, so plans of other microbatches draw others. The default is 0.
    """

    USAGE = "seed N"

    value: int

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        return cls(arguments, int(arguments.number("n") or 0))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from check_number(self.arguments, "n", lambda value: 0 <= value < 2**63, "0 or more, below 2**63")
