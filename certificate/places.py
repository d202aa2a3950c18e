"""Places: products with identity matrices, of which ``delta[i, j]`` is 1 where i is j, and how they are simplified."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from .letters import (
    Affine,
    Divide,
    Instead,
    Letter,
    Maps,
    NothingPickedError,
    Read,
    apart,
    digits,
    joined_letters,
    length_of,
    range_of,
    rank_of,
    replaced,
    substitute,
)
from .nodes import Node, Nodes
from .text import Refused

_MOST_STEPS = 1000
"""The most steps in which a product with identity matrices is simplified."""


class Places(Nodes):
    """The store of nodes, with the steps by which what identity matrices pick is read in its place."""

    def __init__(self, mesh: Mapping[str, int]) -> None:
        super().__init__()
        self.mesh = dict(mesh)
        self._fresh = 0

    def fresh(self) -> Letter:
        """Return a letter that nothing else has."""
        self._fresh += 1
        return ("fresh", self._fresh)

    def inside(self, read: Read, node: Node) -> list[Read]:
        """Return what a node reads, by the letters by which it is read."""
        index = dict(enumerate(read.maps))
        return [self.straight(Read(r.coefficient, r.node, substitute(r.maps, index))) for r in node.reads]

    def opened(
        self, node: Node, index: Mapping[Letter, Affine], sizes: Mapping[Letter, int], over: set[Letter]
    ) -> tuple[list[Read], dict[Letter, int], set[Letter]]:
        """Return what a product with summed letters reads, with fresh letters for these."""
        letters, inside = dict(index), dict(sizes)
        more = set(over)
        for at, size in enumerate(node.inner, len(node.sizes)):
            letter = self.fresh()
            letters[at] = (0, ((letter, 1),))
            inside[letter] = size
            more.add(letter)
        reads = [Read(r.coefficient, r.node, substitute(r.maps, letters)) for r in node.reads]
        return reads, inside, more

    def _placed(
        self, factors: list[Read], summed: set[Letter], sizes: Mapping[Letter, int]
    ) -> tuple[list[Read], set[Letter], Mapping[Letter, int]] | None:
        """Simplify a product with identity matrices: sum over letters that one of them picks, divide those that compare
        several digits, and read the other factors at the place that is picked. None where nothing is picked."""
        for _ in range(_MOST_STEPS):
            joined = self._joined_first(factors, summed, sizes)
            if joined is not None:
                factors, sizes, summed = joined
            for at, read in enumerate(factors):
                if read.node != self.delta:
                    continue
                try:
                    step = self._step(read.maps, [*factors[:at], *factors[at + 1 :]], summed, sizes)
                except NothingPickedError:
                    return None
                if step is not None:
                    factors, summed = step
                    break
            else:
                return factors, summed, sizes
        raise Refused("places are compared in too many ways")

    def _step(
        self, maps: Maps, others: list[Read], summed: set[Letter], sizes: Mapping[Letter, int]
    ) -> tuple[list[Read], set[Letter]] | None:
        """Do one step for an identity matrix: return all factors after it, and the letters that are still summed; None
        where there is nothing to do.

        Raises:
            NothingPickedError: its two indices are never equal.
        """
        never = apart(maps, sizes, self.mesh)
        if never:
            raise NothingPickedError
        if never is False:
            return others, summed
        if (parts := digits(maps, sizes, self.mesh)) is not None:
            return [*(Read(1, self.delta, each) for each in parts), *others], summed
        for here, there in (maps, maps[::-1]):
            if len(here[1]) != 1 or abs(here[1][0][1]) != 1 or any(here[1][0][0] == key for key, _ in there[1]):
                continue
            # here = offset + stride * letter = there, so letter = stride * (there - offset)
            ((letter, stride),) = here[1]
            index = (stride * (there[0] - here[0]), tuple((k, stride * s) for k, s in there[1]))
            low, high = range_of(index, sizes, self.mesh)
            size = length_of(letter, sizes, self.mesh)
            if high < 0 or low >= size:
                raise NothingPickedError
            if low < 0 or high >= size:
                continue
            moved = [r._replace(maps=substitute(r.maps, Instead({letter: index}))) for r in others]
            if letter in summed:
                return moved, summed - {letter}
            back = there[1][0][0] if len(there[1]) == 1 and there[0] == 0 and there[1][0][1] == 1 else None
            if back is not None and back not in summed and rank_of(letter) < rank_of(back):
                continue  # of two letters that are equal, one stands in the place of the other, and never back
            if here[0] == 0 and stride == 1 and moved != others:
                return [Read(1, self.delta, (here, there)), *moved], summed
        for here, there in (maps, maps[::-1]):
            if len(here[1]) > 1 and there[0] == 0 and len(there[1]) == 1 and there[1][0][1] == 1:
                letter = there[1][0][0]  # several letters that are one letter together
                moved = [r._replace(maps=tuple(replaced(index, here, letter) for index in r.maps)) for r in others]
                if letter in summed and moved != others:
                    return [Read(1, self.delta, (here, there)), *moved], summed
        if self.form.in_digits:
            for here, there in (maps, maps[::-1]):
                self._divide_by_size(here, there, summed, sizes)
        for here, there in (maps, maps[::-1]):
            if any(letter in summed for letter, _ in there[1]):
                self._divide(here, [stride for _, stride in there[1]], summed, sizes)
        return None

    def _divide(self, index: Affine, strides: list[int], summed: set[Letter], sizes: Mapping[Letter, int]) -> None:
        """Ask for a letter of an index to be divided where another index has a digit."""
        for letter, stride in index[1]:
            if letter in summed or isinstance(letter, str):
                continue
            size = length_of(letter, sizes, self.mesh)
            for other in strides:
                inner, rest = divmod(other, stride)
                if not rest and 1 < inner < size and not size % inner:
                    raise Divide(letter, (size // inner, inner))

    def _divide_by_size(self, here: Affine, there: Affine, summed: set[Letter], sizes: Mapping[Letter, int]) -> None:
        """Ask for a letter to be divided into equal parts where one of these is placed, and the others are zero."""
        if len(here[1]) != 1 or len(there[1]) != 1:
            return
        ((letter, stride),), ((other, step),) = here[1], there[1]
        if letter in summed or isinstance(letter, str) or other not in summed or (stride, step) != (1, 1):
            return
        size, part = length_of(letter, sizes, self.mesh), length_of(other, sizes, self.mesh)
        if 1 < part < size and not size % part and not (there[0] - here[0]) % part:
            raise Divide(letter, (size // part, part))

    def _joined_first(
        self, factors: list[Read], summed: set[Letter], sizes: Mapping[Letter, int]
    ) -> tuple[list[Read], dict[Letter, int], set[Letter]] | None:
        """Join summed letters that are always read together; None where there are none."""
        groups, _terms = joined_letters(factors, frozenset(summed), sizes, self.mesh, [])
        groups = {letter: group for letter, group in groups.items() if len(group[0]) > 1 and letter in summed}
        if not groups:
            return None
        gone = {letter for members, _ in groups.values() for letter, _ in members} - groups.keys()
        names = {letter: self.fresh() for letter in groups}

        def renamed(index: Affine) -> Affine:
            return index[0], tuple((names.get(key, key), stride) for key, stride in index[1] if key not in gone)

        reads = [read._replace(maps=tuple(map(renamed, read.maps))) for read in factors]
        lengths = {names[key]: size for key, (_, size) in groups.items()}
        return reads, {**sizes, **lengths}, (summed - gone - groups.keys()) | lengths.keys()

    def _cancelled(self, factors: list[Read]) -> list[Read]:
        """Return factors without those that stand beside their own inverse."""
        for read in factors:
            if self.node(read.node).op == "inverse":
                (inner,) = self.node(read.node).reads
                other = Read(1, inner.node, substitute(inner.maps, dict(enumerate(read.maps))))
                if other in factors:
                    rest = list(factors)
                    rest.remove(other)
                    rest.remove(read)
                    return self._cancelled(rest)
        return factors

    def _unflattened(
        self, factors: list[Read], summed: set[Letter], sizes: Mapping[Letter, int]
    ) -> tuple[list[Read], dict[Letter, int], set[Letter]] | None:
        """Sum over the loops that a ``flat`` node makes one of, where all of this one is summed: other factors are read
        at ``8 * a + b`` in the place of ``i``. None where there is no such node."""
        flat = [r for r in factors if r.node != self.delta and self.node(r.node).op == "flat"]
        if not any(letter in summed for read in flat for letter, _ in read.maps[0][1]):
            return None
        factors, sizes, summed = self._joined_first(factors, summed, sizes) or (factors, dict(sizes), summed)
        for at, read in enumerate(factors):
            node = self.node(read.node)
            if read.node == self.delta or node.op != "flat" or read.maps[0][0] or len(read.maps[0][1]) != 1:
                continue
            ((letter, stride),) = read.maps[0][1]
            if letter not in summed or stride != 1 or length_of(letter, sizes, self.mesh) != node.sizes[0]:
                continue
            inside, lengths, every = self.opened(node, dict(enumerate(read.maps)), sizes, summed)
            places, step = [], node.sizes[0]
            for part in (part for part in lengths if part in every - summed):
                step //= lengths[part]
                places.append((part, step))
            index = Instead({letter: (0, tuple(places))})
            reads = [*factors[:at], *factors[at + 1 :], *inside]
            return [r._replace(maps=substitute(r.maps, index)) for r in reads], lengths, every - {letter}
        return None

    def cuts(self, read: Read, sizes: Mapping[Letter, int]) -> list[int]:
        """Return the loops of a node of which a read is of some entries alone."""
        loops = enumerate(zip(read.maps, self.node(read.node).sizes, strict=True))
        return [loop for loop, (index, size) in loops if range_of(index, sizes, self.mesh) != (0, size - 1)]

    def padded(self, read: Read, sizes: Mapping[Letter, int]) -> bool:
        """Return whether a read is of the first entries of a node, as where the rest is padding. Parts of others, such
        as one token, would be parts of all that is behind it."""
        cut = [read.maps[loop] for loop in self.cuts(read, sizes)] if read.node != self.delta else []
        return bool(cut) and all(index[0] == 0 and index[1] for index in cut)

    def cut_apart(self, read: Read, summed: Collection[Letter], sizes: Mapping[Letter, int]) -> list[int]:
        """Return those of these loops that no summed letter indexes, and no identity matrix compares."""
        loops = self.cuts(read, sizes)
        compared = self.look(read.node)[1] if loops else ()
        return [loop for loop in loops
                if loop not in compared and not any(letter in summed for letter, _ in read.maps[loop][1])]  # fmt: skip

    def touches(self, read: Read, summed: Iterable[Letter], sizes: Mapping[Letter, int]) -> bool:
        """Return whether an identity matrix in a node may be simpler where the node is read so: its rows are summed, or
        not all of them are read one by one."""
        node, compared = self.node(read.node), self.look(read.node)[1]
        if not compared:
            return False
        plain = {
            at for at, (offset, terms) in enumerate(read.maps)
            if offset == 0 and len(terms) == 1 and terms[0][1] == 1 and terms[0][0] not in summed
            and length_of(terms[0][0], sizes, self.mesh) == node.sizes[at]
        }  # fmt: skip
        return not compared <= plain
