"""Arguments of a smaller model: where a model is too large for its numbers to be tested, a twin of it is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping

from torch import nn

Make = Callable[[Mapping[str, int]], nn.Module | None]
"""A function that makes the model with some arguments replaced; None where it cannot be made so, or not be called."""

LARGE = 20_000_000
"""The most parameters of a model whose numbers are tested as it is."""
_LAYERS, _WIDTH, _MULTIPLE = 2, 256, 16
"""The layers, the least width, and the factor of the widths of a twin."""


def smaller_arguments(module: nn.Module, numbers: Mapping[str, int], make: Make) -> dict[str, int]:
    """Return arguments with which a model is as small as its structure allows: first fewer of equal blocks, then
    narrower ones. ``numbers`` are the whole numbers among its arguments."""
    chosen: dict[str, int] = {}
    kinds, count = kinds_of(module), entries(module)
    for name, value in numbers.items():
        if value > _LAYERS:
            fewer = make({**chosen, name: _LAYERS})
            if fewer is not None and kinds_of(fewer) == kinds and entries(fewer) < count:
                chosen[name], count = _LAYERS, entries(fewer)
    names = {name for name, _ in kinds}
    for name, value in numbers.items():
        for size in _widths(value) if name not in chosen else ():
            narrow = make({**chosen, name: size})
            if narrow is not None and {kind for kind, _ in kinds_of(narrow)} == names and entries(narrow) < count:
                chosen[name], count = size, entries(narrow)
                break
    return chosen


def _widths(value: int) -> Iterator[int]:
    """Yield sizes of a narrower model, the smallest first: a width halved as often as it stays a multiple of 16, as
    heads and ranks want it; and then one that divides by what the width divides by, up to 16."""
    sizes = []
    while value % (2 * _MULTIPLE) == 0 and value >= 2 * _WIDTH:
        value //= 2
        sizes.append(value)
    yield from reversed(sizes)
    if value > 8 * _WIDTH:
        yield 4 * _WIDTH + value % _MULTIPLE


def kinds_of(module: nn.Module) -> set[tuple[str, tuple[int, ...]]]:
    """Return the parameters of a model by name and shape, those of numbered blocks once."""
    return {(re.sub(r"\d+", "*", name), tuple(value.shape)) for name, value in module.named_parameters()}


def entries(module: nn.Module) -> int:
    """Return the entries of all parameters."""
    return sum(math.prod(value.shape) for value in module.parameters())
