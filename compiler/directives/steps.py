"""``steps``: how long a run is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from ...grammar.diagnostics import Diagnostic
from ...grammar.usage import Arguments
from ..directive import Directive, Scope, check_number


@dataclass(frozen=True)
class Steps(Directive):
    """The number of optimizer steps of a run; `parc run --steps` replaces it."""

    USAGE = "steps N"

    value: int

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        return cls(arguments, int(arguments.number("n") or 0))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from check_number(self.arguments, "n", lambda value: value >= 1, "1 or more")
