"""Letters: indices of loops, how they are substituted, and which of them are always read together."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from math import isfinite
from typing import Any, NamedTuple

Letter = Any
"""The index of a loop: a number in a node, an axis' name or any key elsewhere."""
Affine = tuple[int, tuple[tuple[Letter, int], ...]]
"""An index: an offset, and letters with their strides, the largest first."""
Maps = tuple[Affine, ...]
"""An index for each loop of a node."""
Number = int | Fraction


class Read(NamedTuple):
    """A multiple of a node, at some index of each of its loops."""

    coefficient: Number
    node: int
    maps: Maps


def product_of(sizes: Iterable[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def number(value: int | float) -> Any:
    """Return a number of a text as an exact one: ``0.3333333333333333`` is a third, and 0.1 a tenth. Infinity stays."""
    if isinstance(value, float) and not isfinite(value):
        return value
    if isinstance(value, int) or value.is_integer():
        return int(value)
    near = Fraction(value).limit_denominator(1 << 20)
    return near if float(near) == value else Fraction(repr(value))


def reduced(value: Number) -> Number:
    """Return an exact number as an int where it is whole."""
    return value.numerator if isinstance(value, Fraction) and value.denominator == 1 else value


def substitute(maps: Maps, letters: Mapping[Letter, Affine]) -> Maps:
    """Return maps with an index in the place of each letter. Axes that are not among ``letters`` stay."""
    result = []
    for index in maps:
        offset, terms = index
        if len(terms) == 1:  # most are one letter in the place of another
            ((letter, stride),) = terms
            at = letters.get(letter) if isinstance(letter, str) else letters[letter]
            if at is None:
                result.append(index)
                continue
            if len(at[1]) < 2:
                result.append((offset + stride * at[0], tuple([(key, stride * inner) for key, inner in at[1]])))
                continue
        strides: dict[Letter, int] = {}
        for letter, stride in terms:
            at = letters.get(letter) if isinstance(letter, str) else letters[letter]
            if at is None:
                strides[letter] = strides.get(letter, 0) + stride
                continue
            offset += stride * at[0]
            for key, inner in at[1]:
                strides[key] = strides.get(key, 0) + stride * inner
        result.append((offset, ordered(strides)))
    return tuple(result)


def ordered(strides: Mapping[Letter, int]) -> tuple[tuple[Letter, int], ...]:
    if len(strides) < 2:
        return tuple(strides.items())
    return tuple(sorted((item for item in strides.items() if item[1]), key=lambda item: (-abs(item[1]), str(item[0]))))


def letters_of(read: Read) -> set[Letter]:
    """Return the letters by which a node is read."""
    return {letter for _, terms in read.maps for letter, _ in terms}


def replaced(index: Affine, here: Affine, letter: Letter) -> Affine:
    """Return an index with a letter in the place of a sum of letters, at any multiple of it."""
    strides = dict(index[1])
    times, rest = divmod(strides.get(here[1][-1][0], 0), here[1][-1][1])
    if not times or rest or any(strides.get(key) != times * stride for key, stride in here[1]) or letter in strides:
        return index
    for key, _ in here[1]:
        del strides[key]
    return index[0] - times * here[0], ordered({**strides, letter: times})


def rank_of(letter: Letter) -> tuple[bool, str]:
    """Return by what letters are ordered: axes come last."""
    return isinstance(letter, str), str(letter)


def in_order(maps: Maps, groups: Sequence[Sequence[int]], rank: Callable[[Letter], Any]) -> Maps:
    """Return maps in which the loops of each group are indexed in order, by the ranks of letters."""
    result = list(maps)
    for group in groups:
        indices = sorted(
            [maps[at] for at in group], key=lambda index: (index[0], [(stride, rank(key)) for key, stride in index[1]])
        )
        for at, index in zip(group, indices, strict=True):
            result[at] = index
    return tuple(result)


class Instead(dict[Letter, Affine]):
    """A substitution of some letters, which leaves all others as they are."""

    def __missing__(self, key: Letter) -> Affine:
        return (0, ((key, 1),))


def length_of(letter: Letter, sizes: Mapping[Letter, int], mesh: Mapping[str, int]) -> int:
    size = sizes.get(letter)
    return mesh[letter.removeprefix("~")] if size is None else size


def range_of(index: Affine, sizes: Mapping[Letter, int], mesh: Mapping[str, int]) -> tuple[int, int]:
    """Return the least and the largest number of an index."""
    low = high = index[0]
    for letter, stride in index[1]:
        reach = stride * (length_of(letter, sizes, mesh) - 1)
        low, high = low + min(reach, 0), high + max(reach, 0)
    return low, high


def apart(maps: Maps, sizes: Mapping[Letter, int], mesh: Mapping[str, int]) -> bool | None:
    """Return whether two indices are never equal, or (False) always; None where it depends on letters."""
    (one, first), (other, second) = maps
    strides = dict(first)
    for letter, stride in second:
        strides[letter] = strides.get(letter, 0) - stride
    low, high = range_of((one - other, tuple(strides.items())), sizes, mesh)
    return False if low == high == 0 else True if low > 0 or high < 0 else None


def digits(maps: Maps, sizes: Mapping[Letter, int], mesh: Mapping[str, int]) -> tuple[Maps, Maps] | None:
    """Return two indices, less what both begin with, as their higher and their lower digits, where these compare
    separately."""
    first = min(offset for offset, _ in maps)
    maps = tuple([(offset - first, terms) for offset, terms in maps])
    for base in sorted({stride for _, terms in maps for _, stride in terms if stride > 1}):
        high: list[Affine] = []
        low: list[Affine] = []
        for offset, terms in maps:
            high.append((offset // base, tuple((k, s // base) for k, s in terms if s % base == 0)))
            low.append((offset % base, tuple((k, s) for k, s in terms if s % base)))
        ends = [range_of(index, sizes, mesh) for index in low]
        separate = all(least >= 0 and most < base for least, most in ends)
        if separate and all(any(index[1] or index[0] for index in part) for part in (high, low)):
            return tuple(high), tuple(low)
    return None


Groups = dict[Letter, tuple[list[tuple[Letter, int]], int]]
"""Joined letters by the most minor of them: each with its stride in the joined letter, and the size of that."""
Terms = Sequence[Sequence[Sequence[tuple[Letter, int]]]]
"""The letters, with strides, of each loop of each read."""


def joined_letters(
    reads: Sequence[Read],
    inside: frozenset[Letter],
    sizes: Mapping[Letter, int],
    mesh: Mapping[str, int],
    order: list[Letter],
) -> tuple[Groups, Terms]:
    """Join the letters that are always read one behind the other. Return the joined letters, and the terms of each
    read's loops with these alone. Those in ``order`` are joined only where they are neighbours there, and leave it: an
    operator sees their entries in this order."""
    rows: dict[Letter, list[tuple[int, int]]] = {}
    for at, read in enumerate(reads):
        for loop, (_, terms) in enumerate(read.maps, at << 16):
            for letter, stride in terms:
                rows.setdefault(letter, []).append((loop, stride))
    groups: Groups = {letter: ([(letter, 1)], length_of(letter, sizes, mesh)) for letter in rows}
    places: dict[Hashable, list[Letter]] = {}
    for letter, row in rows.items():
        places.setdefault((letter in inside, *[place for place, _ in row]), []).append(letter)
    for letters in places.values():
        if len(letters) > 1:
            _join(letters, rows, groups, order)
    if len(groups) == len(rows):
        return groups, [[terms for _, terms in read.maps] for read in reads]
    return groups, [[[term for term in terms if term[0] in groups] for _, terms in read.maps] for read in reads]


def _join(
    letters: Sequence[Letter], rows: Mapping[Letter, list[tuple[int, int]]], groups: Groups, order: list[Letter]
) -> None:
    """Join letters that are read at the same places, where one counts what the other does all of."""
    by_row = {tuple(rows[letter]): letter for letter in letters}
    changed = True
    while changed:
        changed = False
        for letter in letters:
            if letter not in groups:
                continue
            members, size = groups[letter]
            major = by_row.get(tuple([(place, stride * size) for place, stride in rows[letter]]))
            if major is None or major not in groups or major == letter:
                continue
            if letter in order:
                if major not in order[: order.index(letter)][-1:]:
                    continue
                order.remove(major)
            before, count = groups.pop(major)
            groups[letter] = ([(key, inner * size) for key, inner in before] + members, size * count)
            changed = True


def numbered(
    reads: Sequence[Read],
    terms: Terms,
    order: Sequence[int],
    inside: frozenset[Letter],
    alone: Sequence[Letter],
    keep: Sequence[Letter],
    equals: Sequence[Sequence[Sequence[int]]],
) -> tuple[tuple[Read, ...], list[Letter], list[Letter]]:
    """Return the reads in an order, with letters numbered as they are first read, and these letters. Reads with groups
    of loops that may be exchanged are numbered last, each group in the order of the numbers that its letters have."""
    entry, within = dict.fromkeys(alone), dict.fromkeys(keep)
    maps = [
        tuple([(offset, tuple(row)) for (offset, _), row in zip(read.maps, rows, strict=True)])
        for read, rows in zip(reads, terms, strict=True)
    ]
    for at in (*(at for at in order if not equals[at]), *(at for at in order if equals[at])):
        if equals[at]:
            known = defaultdict(lambda: sys.maxsize, {key: index for index, key in enumerate((*entry, *within))})
            maps[at] = in_order(maps[at], equals[at], known.__getitem__)
        for _, row in maps[at]:
            for letter, _ in row:
                (within if letter in inside else entry).setdefault(letter)
    numbers = {letter: index for index, letter in enumerate((*entry, *within))}
    encoded = []
    for at in order:
        rows = tuple([(offset, tuple([(numbers[key], stride) for key, stride in row])) for offset, row in maps[at]])
        rows = in_order(rows, equals[at], int)
        encoded.append(Read(reads[at].coefficient, reads[at].node, rows))
    return tuple(encoded), list(entry), list(within)


def nested(letters: Sequence[set[Letter]], over: set[Letter]) -> tuple[frozenset[int], set[Letter]] | None:
    """Return some factors and letters that are summed first, as no other letter is read by some of these factors and
    others: every letter is read by all of them, or by none; None where all letters are summed at once."""
    readers: dict[frozenset[int], set[Letter]] = {}
    for letter in over:
        readers.setdefault(frozenset(at for at, used in enumerate(letters) if letter in used), set()).add(letter)
    for members in sorted(readers, key=lambda members: (len(members), sorted(members))):
        if len(members) < len(letters) and all(members <= o or members.isdisjoint(o) for o in readers):
            return members, readers[members]
    return None


def components(letters: Sequence[set[Letter]], summed: set[Letter]) -> list[tuple[list[int], set[Letter]]]:
    """Return the groups of factors that summed letters connect, each with these letters."""
    groups: list[tuple[list[int], set[Letter]]] = []
    for at, used in enumerate(letters):
        over = used & summed
        if not over:
            continue
        members = [at]
        rest = []
        for group in groups:
            if group[1].isdisjoint(over):
                rest.append(group)
            else:
                members, over = group[0] + members, over | group[1]
        groups = [*rest, (members, over)]
    return groups


class Divide(Exception):
    """The request to divide a letter of a value's dims into several, as its entries come from different places."""

    def __init__(self, letter: Letter, sizes: tuple[int, int]) -> None:
        super().__init__(letter, sizes)
        self.letter, self.sizes = letter, sizes


def divided(
    request: Divide, reads: Sequence[Read], dims: Sequence[Collection[Letter]], sizes: Mapping[Letter, int]
) -> tuple[list[Read], list[list[Letter]], dict[Letter, int]]:
    """Divide a letter into two."""
    letter, (outer, inner) = request.letter, request.sizes
    major, minor = (letter, "major"), (letter, "minor")
    index = Instead({letter: (0, ((major, inner), (minor, 1)))})
    reads = [read._replace(maps=substitute(read.maps, index)) for read in reads]
    parts = [[part for at in dim for part in ((major, minor) if at == letter else (at,))] for dim in dims]
    return reads, parts, {**sizes, major: outer, minor: inner}


class NothingPickedError(Exception):
    """The error of an identity matrix of which no entry that is read is 1."""


class DivideAxis(Exception):
    """The request to count the ranks of an axis by several digits: its parts are split over different letters."""

    def __init__(self, axis: str, sizes: tuple[int, ...]) -> None:
        super().__init__(axis, sizes)
        self.axis, self.sizes = axis, sizes
