"""The numbers among the arguments of a program's lines: those that stand there, and those that need not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from ..layout.collectives import COLLECTIVES
from .program import LocalSize, operator


@lru_cache(maxsize=1024)
def default_numbers(op: str) -> dict[str, float]:
    """Return the numbers of an operator's arguments that need not be given, by argument."""
    if op in COLLECTIVES or "." not in op:
        return {}
    named = ((argument.name, argument.default_value) for argument in operator(op)._schema.arguments)
    return {name: value for name, value in named if isinstance(value, (int, float)) and not isinstance(value, bool)}


def numbers_in(item: Any) -> Iterator[float]:
    """Return the numbers in an argument; of a size that is cut, the size of the whole tensor."""
    if isinstance(item, LocalSize):
        yield item.size
    elif isinstance(item, (dict, list, tuple)):
        for inner in item.values() if isinstance(item, dict) else item:
            yield from numbers_in(inner)
    elif isinstance(item, (int, float)) and not isinstance(item, bool):
        yield item
