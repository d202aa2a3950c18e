"""``verify``: the reduced twin on which numbers are checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.diagnostics import Diagnostic
from ..directive import Directive, Literal, Scope, argument, check_literals, read_literals


@dataclass(frozen=True)
class Verify(Directive):
    """Arguments of the model that are smaller on the twin: the same code, built a second time, on which numbers are
    tested.

    Names of sizes may be given too. If the model or the plan already has a smaller number, it stays as it is. If the
    twin needs more blocks for the plan's stages, or other numbers of experts for its ranks, parc gives the arguments
    that these follow other values; `parc build` says which.
    """

    USAGE = "verify NAME=VALUE, ..."

    values: tuple[tuple[str, Literal], ...] = argument(lambda line: read_literals(line.bindings("name")))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from check_literals(self.arguments, "name")
