"""``vocab``: embedding tables and heads split by their vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from ...grammar.diagnostics import Diagnostic
from ...grammar.usage import Arguments
from ..constraints import SplitWeights
from ..directive import Directive, Scope


@dataclass(frozen=True)
class Vocab(Directive):
    """Splits the vocabulary of embedding tables and of linear heads over an axis.

    Lookup, projection and loss then never hold whole logits. With `pad` the vocabulary need not divide: 50257
    entries over 4 ranks become 50260, of which 3 are no tokens. `WHERE` names modules, or weights.
    """

    USAGE = "vocab WHERE over AXIS [pad]"
    ONCE = False

    constraint: SplitWeights

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        axis = arguments.word("over")
        assert axis is not None
        where = arguments.words("where")
        return cls(arguments, SplitWeights("vocab", where, axis, None, arguments.statement.span, "pad" in arguments))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from scope.check_axis(self.constraint.axis)
