"""``schedule``: the order of a step's work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from ...grammar.codes_language import BAD_VALUE, MISSING_STATEMENT, NO_EFFECT, UNEVEN_BATCH
from ...grammar.diagnostics import Diagnostic, Label, Severity
from ...grammar.usage import Arguments
from ..directive import Directive, Scope, check_number
from ..sub_dims import multiples
from .precision import TYPES
from .sizes import Sizes

BATCH = "B"
ACCUMULATE = TYPES
"""Types in which gradients of microbatches are added up."""


@dataclass(frozen=True)
class Schedule(Directive):
    """The order of a step's work: `microbatches N` runs the batch `B` in N parts and adds their gradients.

    `accumulate bf16` adds the parts' gradients up in bfloat16, which takes half the memory of them and rounds every
    sum; `accumulate fp32` is the default. The sum over ranks, the norm and the update stay in float32.
    """

    USAGE = "schedule microbatches N [accumulate TYPE]"

    microbatches: int
    accumulate: str

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        word = arguments.word("accumulate")
        return cls(arguments, int(arguments.number("microbatches") or 1), word.text if word is not None else "fp32")

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from check_number(self.arguments, "microbatches", lambda value: value >= 1, "1 or more")
        yield from self._check_accumulate()
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
                near = " or ".join(map(str, multiples(parts, self.microbatches)))
                which = "" if size.fixed else "a step of the range that is "
                help_ = f"choose {which}a multiple of {self.microbatches}, such as {near}"
                yield Diagnostic(UNEVEN_BATCH, message, label, related, help=help_)

    def _check_accumulate(self) -> Iterator[Diagnostic]:
        label = Label(self.arguments.span("accumulate"))
        if self.accumulate not in ACCUMULATE:
            message = f"gradients are not added up in `{self.accumulate}`"
            yield Diagnostic(BAD_VALUE, message, label, help="write `accumulate fp32` or `accumulate bf16`")
        elif self.accumulate != "fp32" and self.microbatches == 1:
            message = "one microbatch has nothing to add up"
            help_ = "remove `accumulate`, or give more microbatches"
            yield Diagnostic(NO_EFFECT, message, label, help=help_, severity=Severity.WARNING)
