"""``replicate``: tensors that are whole on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ...grammar.usage import Arguments
from ..constraints import Fix
from ..directive import Directive


@dataclass(frozen=True)
class Replicate(Directive):
    """Places parameters or inputs whole on every rank: `shard V [...]` of all whole dims."""

    USAGE = "replicate VALUES"
    ONCE = False

    constraint: Fix

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        return cls(arguments, Fix(arguments.words("values"), None, arguments.statement.span))
