"""``schedule``: the order of a step's work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from ...grammar.codes_language import MISSING_STATEMENT, UNEVEN_BATCH
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.usage import Arguments
from ..directive import Directive, Scope, check_number
from .sizes import Sizes

BATCH = "B"


@dataclass(frozen=True)
class Schedule(Directive):
    """The order of a step's work: `microbatches N` runs the batch `B` in N parts and adds their gradients."""

    USAGE = "schedule microbatches N"

    microbatches: int

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        return cls(arguments, int(arguments.number("microbatches") or 1))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from check_number(self.arguments, "microbatches", lambda value: value >= 1, "1 or more")
        if self.microbatches <= 1 or "sizes" in scope.broken:
            return
        label = Label(self.arguments.span("microbatches"))
        batches = [(sizes, size) for sizes in scope.all(Sizes) for name, size in sizes.ranges if name == BATCH]
        if not batches:
            message = "there is no size `B` to divide into microbatches"
            yield Diagnostic(MISSING_STATEMENT, message, label, help="call the inputs' batch dim `B`")
        for sizes, size in batches:
            parts = size.low if size.fixed else size.step
            if parts % self.microbatches:
                what = f"B={size.low}" if size.fixed else f"B={size}"
                message = f"{what} does not divide into {self.microbatches} microbatches"
                related = (Label(sizes.span, "the batch of one step"),)
                help_ = f"choose a multiple of {self.microbatches}" + (
                    "" if size.fixed else " as the step of the range"
                )
                yield Diagnostic(UNEVEN_BATCH, message, label, related, help=help_)
