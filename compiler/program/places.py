"""Places: the memory that computes, and where ``offload`` lines keep values until a program reads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..ops.rules import TABLE
from .binding import KINDS, Binding
from .program import Value

CARRIERS: Mapping[str, str] = {row.carries: op for op, row in TABLE.items() if row.carries}
"""The operators that carry a value ``away`` and ``back``."""


def kept_away(binding: Binding | None, value: Value, offload: Collection[str]) -> str:
    """Return the word of the ``offload`` lines under which a bound value is kept away, or "". Single numbers never
    are."""
    word = KINDS[binding.kind].offloaded if binding is not None and value.type.shape else ""
    return word if word in offload else ""
