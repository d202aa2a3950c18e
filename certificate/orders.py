"""Orders: in which order the reads of an operator that commutes stand, so that equal ones stand in one order.

They stand by what they read. Reads of one node, alike but for their letters, are ties: ``x[i] * x[j] * y[j]`` may begin
with either ``x``. Of all orders of these, a node has the one whose reads are least once letters are numbered as they
are first read. It is found a read at a time: orders that begin with more than the least are left at once, and so is one
that another gives by an exchange of letters, as in ``x[i] * x[j]``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from .letters import Groups, Letter, Maps, Number, Read, Terms

_MOST_BEGINNINGS = 720
"""The most beginnings that are equal, and are all continued; of more, the later ones are left."""


def order_of(
    reads: Sequence[Read],
    terms: Terms,
    groups: Groups,
    inside: frozenset[Letter],
    alone: Sequence[Letter],
    keep: Sequence[Letter],
) -> Sequence[int]:
    """Return the order of the reads of an operator that commutes."""
    nodes = [read.node for read in reads]
    if len(set(nodes)) == len(nodes):
        return sorted(range(len(nodes)), key=nodes.__getitem__)
    keys = [
        (
            read.node,
            tuple([
                (offset, tuple(sorted([(stride, groups[key][1], key in inside) for key, stride in row])))
                for (offset, _), row in zip(read.maps, rows, strict=True)
            ]),
        )
        for read, rows in zip(reads, terms, strict=True)
    ]  # fmt: skip
    order = sorted(range(len(reads)), key=keys.__getitem__)
    ties: list[list[int]] = []
    for at in order:
        if ties and keys[ties[-1][0]] == keys[at]:
            ties[-1].append(at)
        else:
            ties.append([at])
    if len(ties) == len(order):
        return order
    return _Ties(reads, terms, ties, inside).least(alone, keep)


class _Beginning(NamedTuple):
    """The first reads of an order, the others of the last one's tie, and the numbers of the letters read so far."""

    order: tuple[int, ...]
    rest: tuple[int, ...]
    numbers: dict[Letter, int]
    free: tuple[int, int]
    """The next numbers: of an entry letter and of an inner one."""


class _Ties:
    """The reads of an operator, those that nothing but their letters tells apart together."""

    def __init__(
        self, reads: Sequence[Read], terms: Terms, ties: Sequence[Sequence[int]], inside: frozenset[Letter]
    ) -> None:
        self.reads, self.terms, self.ties, self.inside = reads, terms, ties, inside

    def least(self, alone: Sequence[Letter], keep: Sequence[Letter]) -> Sequence[int]:
        """Return the first of the orders whose numbered reads are least; ``alone`` and ``keep`` have numbers before."""
        outside = {letter for rows in self.terms for row in rows for letter, _ in row if letter not in self.inside}
        entry, within = list(dict.fromkeys(alone)), list(dict.fromkeys(keep))
        inner = len(outside.union(entry))
        numbers = {**{at: i for i, at in enumerate(entry)}, **{at: i for i, at in enumerate(within, inner)}}
        beginnings = [_Beginning((), (), numbers, (len(entry), inner + len(within)))]
        for tie in self.ties:
            beginnings = [beginning._replace(rest=tuple(tie)) for beginning in beginnings]
            for _ in tie:
                beginnings = self._longer(beginnings)
        return beginnings[0].order

    def _longer(self, beginnings: Sequence[_Beginning]) -> list[_Beginning]:
        """Return beginnings with one more read each: the least one, and all that are equal."""
        least: tuple[Number, Maps] | None = None
        longer: dict[tuple[tuple[int, ...], tuple[Letter, ...]], _Beginning] = {}
        for beginning in beginnings:
            tried: list[int] = []
            for at in beginning.rest:
                code, numbers, free = self._numbered(at, beginning)
                if least is not None and (code > least or (len(longer) >= _MOST_BEGINNINGS and code == least)):
                    continue
                if least is None or code < least:
                    least, tried = code, []
                    longer.clear()
                if len(beginning.rest) > 1 and any(self._exchanged(one, at, beginning) for one in tried):
                    continue
                tried.append(at)
                rest = tuple([other for other in beginning.rest if other != at])
                key = rest, tuple(sorted(numbers, key=numbers.__getitem__))
                longer.setdefault(key, _Beginning((*beginning.order, at), rest, numbers, free))
        return list(longer.values())

    def _numbered(
        self, at: int, beginning: _Beginning
    ) -> tuple[tuple[Number, Maps], dict[Letter, int], tuple[int, int]]:
        """Return a read with letters numbered, if it comes next, and the numbers of letters from there on."""
        numbers, (entry, inner) = beginning.numbers, beginning.free
        for row in self.terms[at]:
            for letter, _ in row:
                if letter in numbers:
                    continue
                if numbers is beginning.numbers:
                    numbers = dict(numbers)
                if letter in self.inside:
                    numbers[letter], inner = inner, inner + 1
                else:
                    numbers[letter], entry = entry, entry + 1
        read = self.reads[at]
        maps = [
            (offset, tuple([(numbers[letter], stride) for letter, stride in row]))
            for (offset, _), row in zip(read.maps, self.terms[at], strict=True)
        ]
        return (read.coefficient, tuple(maps)), numbers, (entry, inner)

    def _exchanged(self, one: int, other: int, beginning: _Beginning) -> bool:
        """Return whether the reads that are left are the same reads once the letters that one read is the first to
        have, and those of another, take each other's places."""
        instead: dict[Letter, Letter] = {}
        for row, there in zip(self.terms[one], self.terms[other], strict=True):
            for (letter, _), (new, _) in zip(row, there, strict=True):
                if letter in beginning.numbers and letter == new:
                    continue
                if instead.setdefault(letter, new) != new or instead.setdefault(new, letter) != letter:
                    return False
        left = [at for at, rows in enumerate(self.terms) if at not in beginning.order and _has(rows, instead)]
        return Counter(self._renamed(at, {}) for at in left) == Counter(self._renamed(at, instead) for at in left)

    def _renamed(self, at: int, instead: Mapping[Letter, Letter]) -> tuple[Number, int, Maps]:
        """Return a read by other letters."""
        read = self.reads[at]
        maps = [
            (offset, tuple([(instead.get(letter, letter), stride) for letter, stride in row]))
            for (offset, _), row in zip(read.maps, self.terms[at], strict=True)
        ]
        return read.coefficient, read.node, tuple(maps)


def _has(rows: Sequence[Sequence[tuple[Letter, int]]], letters: Container[Letter]) -> bool:
    return any(letter in letters for row in rows for letter, _ in row)
