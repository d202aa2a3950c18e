"""``forbid``: a promise that there is no such collective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from ...grammar.diagnostics import Diagnostic
from ...grammar.usage import Arguments
from ..directive import Directive, Scope
from ..promises import Promise, check_promise, read_promise


@dataclass(frozen=True)
class Forbid(Directive):
    """A promise that a build keeps or is refused: no such collective in these modules and what is inside them.

    `OP` is `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` or `any`; `over` counts those over one axis
    alone. Looked at are forward and backward, or the one phase that `during` names: `forward`, `backward`, or `step`,
    where gradients are summed once a step. `**` is the whole model.
    """

    USAGE = "forbid OP in WHERE [over AXIS] [during NAME]"
    ONCE = False

    promise: Promise

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        return cls(arguments, read_promise(arguments, 0))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from check_promise(self.promise, scope)
