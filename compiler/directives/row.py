"""``row``: linear layers split by their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from ...grammar.diagnostics import Diagnostic
from ...grammar.usage import Arguments
from ..constraints import SplitWeights
from ..directive import Directive, Scope


@dataclass(frozen=True)
class Row(Directive):
    """Splits the inputs of linear layers over an axis: every rank has a part of the sum, added up after.

    The bias stays whole. With `pad` the inputs need not divide, as in `column`. `WHERE` names modules, or weights.
    """

    USAGE = "row WHERE over AXIS [pad]"
    ONCE = False

    constraint: SplitWeights

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        axis = arguments.word("over")
        assert axis is not None
        where = arguments.words("where")
        return cls(arguments, SplitWeights("row", where, axis, None, arguments.statement.span, "pad" in arguments))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from scope.check_axis(self.constraint.axis)
