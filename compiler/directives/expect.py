"""``expect``: a promise of how many collectives there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from ...grammar.diagnostics import Diagnostic
from ...grammar.usage import Arguments
from ..directive import Directive, Scope, check_number
from ..promises import Promise, check_promise, read_promise


@dataclass(frozen=True)
class Expect(Directive):
    """A promise that a build keeps or is refused: so many collectives in each of these modules.

    `expect 4 all_reduce in blocks.*`: four in every block with all that is inside it, counted over the forward and the
    backward of one microbatch. Of modules inside each other that a pattern matches, the outermost counts; `**` is the
    whole model. `OP`, `over` and `during` are those of `forbid`.
    """

    USAGE = "expect N OP in WHERE [over AXIS] [during NAME]"
    ONCE = False

    promise: Promise

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        return cls(arguments, read_promise(arguments, int(arguments.number("n") or 0)))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from check_number(self.arguments, "n", lambda value: value >= 0, "0 or more")
        yield from check_promise(self.promise, scope)
