"""Parts of a dim and their splits over ranks. A dim may consist of several stretches, each split by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Outer = int | tuple[int, ...]
"""The parts of a dim: their number where they are equal, else their proportions: ``(2, 1, 1)`` of 128 is 64, 32 and 32.
The number of zigzag parts is negative, also in a program's text; products and quotients keep it so. No other module
looks at the sign."""


def zigzag(parts: int) -> int:
    """Return equal parts of which every second one is split in reverse: of two parts over 3 ranks, the ranks have
    pieces 0 and 5, 1 and 4, 2 and 3 of six."""
    return -parts


def is_zigzag(outer: Outer) -> bool:
    """Return whether every second part is split in reverse."""
    return isinstance(outer, int) and outer < 0


def outer_of(sizes: Sequence[int]) -> Outer:
    """Return parts of these sizes as an ``Outer``, in its one canonical form."""
    unit = math.gcd(*sizes)
    return len(sizes) if len(set(sizes)) == 1 else tuple(size // unit for size in sizes)


def count(outer: Outer) -> int:
    """Return the number of parts."""
    return abs(outer) if isinstance(outer, int) else len(outer)


def inside(outer: Outer, ranks: int) -> Outer:
    """Return the parts after each is cut into ``ranks``: the parts that a more minor axis splits."""
    return abs(outer) * ranks if isinstance(outer, int) else tuple(part for part in outer for _ in range(ranks))


def sizes_of(outer: Outer, size: int) -> list[int]:
    """Return the sizes of the parts of a dim.

    Raises:
        ValueError: they are no whole numbers.
    """
    proportions = (1,) * abs(outer) if isinstance(outer, int) else outer
    if size % sum(proportions):
        what = f"{outer} parts" if isinstance(outer, int) else f"parts of {' + '.join(map(str, outer))}"
        raise ValueError(f"{size} does not divide into {what}")
    return [part * (size // sum(proportions)) for part in proportions]


def joined_stretches(stretches: Sequence[tuple[int, int]]) -> Outer:
    """Return the parts of a dim that consists of stretches, each a size with a number of equal parts."""
    if len(stretches) == 1:
        return stretches[0][1]
    scale = math.prod(number for _, number in stretches)
    return outer_of([size * scale // number for size, number in stretches for _ in range(number)])


@lru_cache(maxsize=4096)
def within(outer: Outer, stretches: tuple[int, ...]) -> tuple[Outer, ...]:
    """Return the parts of each stretch of a dim, which consists of stretches of these sizes.

    Raises:
        ValueError: a part crosses the end of a stretch.
    """
    whole = sum(stretches)
    if isinstance(outer, int):
        if any(stretch * outer % whole for stretch in stretches):
            raise ValueError(f"{outer} equal parts do not lie in stretches of {stretches}")
        return tuple(stretch * outer // whole for stretch in stretches)
    scale = math.lcm(whole, sum(outer))
    left = [part * scale // sum(outer) for part in outer]
    result: list[Outer] = []
    for stretch in stretches:
        end = stretch * scale // whole
        inner: list[int] = []
        while left and sum(inner) < end:
            inner.append(left.pop(0))
        if sum(inner) != end:
            raise ValueError(f"parts of {' + '.join(map(str, outer))} do not lie in stretches of {stretches}")
        result.append(outer_of(inner))
    return tuple(result)


def terms(size: int, splits: Sequence[tuple[Outer, str]]) -> list[tuple[int, list[tuple[int, str]]]]:
    """Return a dim as stretches, each with the splits over axes, which have equal parts there. Most dims are one
    stretch.

    Raises:
        ValueError: the splits do not fit each other, or the dim.
    """
    if not splits:
        return [(size, [])]
    base = min((outer for outer, _ in splits if not isinstance(outer, int)), key=len, default=(1,))
    stretches = tuple(sizes_of(base, size))
    inner = [within(outer, stretches) for outer, _ in splits] if len(base) > 1 else [(outer,) for outer, _ in splits]
    result = []
    for at, stretch in enumerate(stretches):
        equal: list[tuple[int, str]] = []
        for (_, axis), parts in zip(splits, inner, strict=True):
            outer = parts[at]
            if not isinstance(outer, int):
                raise ValueError(f"two axes split a dim of {size} into parts that do not fit")
            equal.append((outer, axis))
        result.append((stretch, equal))
    return result


def nest(size: int, splits: Iterable[tuple[Outer, int]]) -> bool:
    """Return whether splits, each over so many ranks, divide a dim together."""
    ordered = sorted(splits, key=lambda split: count(split[0]))
    try:
        for stretch, equal in terms(size, [(outer, str(ranks)) for outer, ranks in ordered]):
            atoms(stretch, equal, int)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Atom:
    """A factor of a dim, major to minor: ``size`` entries that an axis splits or (``axis`` None) that the rank keeps.
    ``mirrored``: the axis takes them in reverse at every second entry of the factors before."""

    size: int
    axis: str | None
    mirrored: bool = False

    def entry(self, before: Any, coordinate: Any) -> Any:
        """Return the entry that a rank has at these numbers (or this tensor of them) of the factors before; given an
        entry, the rank that has it."""
        if not self.mirrored:
            return coordinate
        return coordinate + before % 2 * (self.size - 1 - 2 * coordinate)


def atoms(size: int, splits: Sequence[tuple[int, str]], ranks: Callable[[str], int]) -> tuple[Atom, ...]:
    """Return a dim of ``size`` global entries, split into equal parts over axes of ``ranks``, as factors whose product
    is ``size``.

    Raises:
        ValueError: the splits do not nest, or do not divide the dim.
    """
    result: list[Atom] = []
    position = 1
    for parts, axis in splits:
        outer = count(parts)
        if outer < 1:
            raise ValueError(f"a split has at least one part, not {outer}")
        if outer % position:
            raise ValueError(f"a split at {outer} falls inside another that ends at {position}")
        if outer != position:
            result.append(Atom(outer // position, None))
        if is_zigzag(parts) and outer // position % 2:
            raise ValueError(f"a split in reverse at {outer} needs pairs of parts on a rank, after {position}")
        result.append(Atom(ranks(axis), axis, is_zigzag(parts)))
        position = outer * ranks(axis)
    if size % position:
        raise ValueError(f"{size} does not divide by {position}")
    if size != position or not result:
        result.append(Atom(size // position, None))
    return tuple(result)
