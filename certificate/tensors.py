"""Tensors: values with the arithmetic and the views of torch, in local sizes. Rows are written in these."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from .equal import equal
from .letters import (
    Affine,
    Divide,
    DivideAxis,
    Instead,
    Letter,
    Number,
    Read,
    divided,
    length_of,
    ordered,
    reduced,
    substitute,
)
from .meaning import Table, Value
from .text import Atom, Dim, Mesh, Refused, Type, within

MICROBATCH = "#"
"""The letter of the number of a microbatch, as if it were an axis of the mesh."""
Dims = Sequence[Sequence[Letter]]


def _ends(chain: Sequence[int]) -> set[int]:
    """Return the sizes of all last parts of a list of factors."""
    return {math.prod(chain[at:]) for at in range(len(chain) + 1)}


def refined(chains: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the factors of a size into which several lists of its factors all divide, major first.

    >>> refined([(8, 128), (4, 256), (1024,)])
    (4, 2, 128)

    Raises:
        Refused: they have no common factors in this order.
    """
    ordered = sorted(set[int]().union(*map(_ends, chains)))
    factors = []
    for small, large in itertools.pairwise(ordered):
        if not small or large % small:
            raise Refused(f"dims of {' and '.join(map(str, chains))} have no common parts")
        factors.append(large // small)
    return tuple(reversed(factors))


class Tensors:
    """The operations on values of one table."""

    def __init__(self, table: Table, mesh: Mesh) -> None:
        self.table, self.mesh = table, mesh
        self.constant = table.constant
        self._reversed = False
        """True where some value counts ranks in reverse in every second part."""

    def leaf(self, name: str, shape: Sequence[int], args: Hashable = (), sizes: Sequence[int] | None = None) -> Value:
        """Return a tensor that nothing is known of but its name, or the first entries of one with other sizes."""
        node = self.table.leaf(name, shape if sizes is None else sizes, args)
        maps = tuple((0, ((at, 1),)) for at in range(len(shape)))
        return self.table.value(Read(1, node, maps), [[at] for at in range(len(shape))], dict(enumerate(shape)))

    # ---- operators over labels

    def bind(
        self, values: Sequence[Value], labels: Sequence[Sequence[Hashable]]
    ) -> tuple[list[Read], dict[Hashable, list[Letter]], dict[Letter, int]]:
        """Give every label of the values' dims letters that suit all of them. A dim of size 1 fits every label.

        Raises:
            Refused: two dims of one label have different sizes.
        """
        chains: dict[Hashable, list[tuple[int, ...]]] = {}
        for value, names in zip(values, labels, strict=True):
            if len(value.dims) != len(names):
                raise Refused(f"an operand has {len(value.dims)} dims, and {len(names)} were to be read")
            for dim, name in zip(value.dims, names, strict=True):
                known = chains.setdefault(name, [])
                if dim and dim not in known:
                    known.append(dim)
        letters: dict[Hashable, list[Letter]] = {}
        sizes: dict[Letter, int] = {}
        for name, known in chains.items():
            if len({math.prod(dim) for dim in known}) > 1:
                raise Refused(f"dims of {' and '.join(map(str, known))} do not fit each other")
            try:
                parts = known[0] if len(known) == 1 else refined(known) if known else ()
            except Refused:
                counted = [self._counted(*each, name, min(known)) for each in zip(values, labels, strict=True)]
                if counted == list(values):
                    raise
                return self.bind(counted, labels)
            letters[name] = [(name, at) for at in range(len(parts))]
            sizes.update(zip(letters[name], parts, strict=True))
        reads = []
        for value, names in zip(values, labels, strict=True):
            rows = (
                row for dim, name in zip(value.dims, names, strict=True) for row in _spread(dim, letters[name], sizes)
            )
            reads.append(Read(value.coefficient, value.node, substitute(value.maps, dict(enumerate(rows)))))
        return reads, letters, sizes

    def _counted(self, value: Value, names: Sequence[Hashable], name: Hashable, parts: tuple[int, ...]) -> Value:
        """Return a value of which the dims of a label count by other parts: an identity matrix says which entries have
        the same number."""
        for dim, other in enumerate(names):
            if other == name and value.dims[dim] not in ((), parts):
                read, dims, sizes = self.table.letters(value)
                old, dims[dim] = dims[dim], [("part", at) for at in range(len(parts))]
                sizes.update(zip(dims[dim], parts, strict=True))
                both = [_spread([value.shape[dim]], letters, sizes)[0] for letters in (dims[dim], old)]
                value = self._summed([Read(1, self.table.delta, tuple(both)), read], dims, sizes, old)
        return value

    def _summed(self, reads: Sequence[Read], dims: Dims, sizes: dict[Letter, int], over: Sequence[Letter]) -> Value:
        """Return a product of reads, summed over letters, as a value with these dims."""
        return self.settled(reads, dims, sizes, lambda reads, sizes: self.table.product(1, reads, sizes, over))

    def settled(
        self,
        reads: Sequence[Read],
        dims: Dims,
        sizes: dict[Letter, int],
        compute: Callable[[Sequence[Read], Mapping[Letter, int]], Read],
    ) -> Value:
        """Return what is computed of reads as a value with these dims, after dividing letters as it asks."""
        while True:
            try:
                return self.table.value(compute(reads, sizes), dims, sizes)
            except Divide as request:
                if request.letter not in sizes:
                    raise Refused("places are compared in too many ways") from None
                reads, dims, sizes = divided(request, reads, dims, sizes)

    def product(
        self,
        values: Sequence[Value],
        labels: Sequence[Sequence[Hashable]],
        result: Sequence[Hashable],
        coefficient: Number = 1,
    ) -> Value:
        """Return the product of values, summed over the labels that the result lacks. ``None`` in the result is a dim
        of size 1."""
        reads, letters, sizes = self.bind(values, labels)
        self._demand_order(reads, sizes)
        kept = {name for name in result if name is not None}
        summed = [letter for name, row in letters.items() if name not in kept for letter in row]
        dims = [letters.get(name, ()) if name is not None else () for name in result]
        return self.settled(
            reads, dims, sizes, lambda reads, sizes: self.table.product(coefficient, reads, sizes, summed)
        )

    def pointwise(self, op: str, values: Sequence[Value], args: Hashable = ()) -> Value:
        """Return an opaque function of the values' entries at each place, after broadcasting."""
        reads, dims, sizes = self._broadcast(values)
        self._demand_order(reads, sizes, ())
        node, maps, _ = self.table.make(op, args, reads, sizes)
        return self.table.value(Read(1, node, maps), dims, sizes)

    def times(self, *values: Value, by: Number = 1) -> Value:
        """Return the product of values after broadcasting."""
        reads, dims, sizes = self._broadcast(values)
        self._demand_order(reads, sizes)
        return self.settled(reads, dims, sizes, lambda reads, sizes: self.table.product(by, reads, sizes))

    def plus(self, *values: Value, by: Sequence[Number] = ()) -> Value:
        """Return the sum of values, each ``by`` a number, after broadcasting."""
        reads, dims, sizes = self._broadcast(values)
        if by:
            reads = [r._replace(coefficient=reduced(r.coefficient * c)) for r, c in zip(reads, by, strict=True)]
        return self.settled(reads, dims, sizes, self.table.sum)

    def factored(self, value: Value) -> tuple[Value, Value]:
        """Return a value as a single number times the rest, for what is linear in it."""
        read, dims, sizes = self.table.letters(value)
        scalars = [factor for factor in self.table.common(read) if not factor.maps]
        number = self.table.product(read.coefficient, scalars, {})
        rest = self.table.without(read._replace(coefficient=1), scalars, sizes)
        return self.table.value(number, [], {}), self.table.value(rest, dims, sizes)

    def scaled(self, value: Value, by: Number) -> Value:
        """Return a multiple of a value."""
        coefficient = reduced(value.coefficient * by)
        return value._replace(coefficient=coefficient) if coefficient else self.table.constant(0, value.shape)

    def _broadcast(self, values: Sequence[Value]) -> tuple[list[Read], list[list[Letter]], dict[Letter, int]]:
        rank = max((len(value.dims) for value in values), default=0)
        labels = [list(range(rank - len(value.dims), rank)) for value in values]
        reads, letters, sizes = self.bind(values, labels)
        return reads, [letters.get(name, []) for name in range(rank)], sizes

    def total(self, value: Value, dims: Sequence[int], keep: bool = False) -> Value:
        """Return the sum over some dims."""
        gone = {within(dim, len(value.dims)) for dim in dims} if value.dims else set()
        names = list(range(len(value.dims)))
        result = [None if name in gone else name for name in names if keep or name not in gone]
        return self.product([value], [names], result)

    def squares(self, value: Value) -> Value:
        """Return the sum of the squares of all entries. It is a node of its own, as nothing else is known of the square
        of a gradient's parts."""
        read, dims, sizes = self.table.letters(value)
        self._demand_order([read], sizes, ())
        return self.table.value(self.table.squares(read, sizes, [letter for dim in dims for letter in dim]), [], {})

    def largest(self, value: Value, dims: Sequence[int], keep: bool, axes: Sequence[str] = ()) -> Value:
        """Return the maximum over some dims, and over ranks."""
        gone = {within(dim, len(value.dims)) for dim in dims}
        read, letters, sizes = self.table.letters(value)
        inner = [letter for dim in gone for letter in letters[dim]]
        self._demand_order([read], sizes, inner)
        used = {letter for _, terms in read.maps for letter, _ in terms}
        inner = [letter for letter in (*inner, *self._ranks_in(value, axes)) if letter in used]
        if inner:
            node, maps, _ = self.table.make("largest", (), [read], sizes, inner)
            read = Read(1, node, maps)
        kept = [[] if at in gone else dim for at, dim in enumerate(letters) if keep or at not in gone]
        return self.table.value(read, kept, sizes)

    # ---- views

    def view(self, value: Value, dims: Dims, index: Mapping[Letter, Affine], sizes: Mapping[Letter, int]) -> Value:
        """Return a value whose letters are other indices now."""
        read = Read(value.coefficient, value.node, substitute(value.maps, index))
        return self.table.value(read, dims, sizes)

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Return a value with the same entries, in their order, in another shape.

        Raises:
            Refused: the shapes have different numbers of entries.
        """
        if value.shape == tuple(shape):
            return value
        flat = [size for dim in value.dims for size in dim]
        if math.prod(flat) != math.prod(shape):
            raise Refused(f"{list(value.shape)} is reshaped to {list(shape)}")
        try:
            parts = refined([tuple(flat), tuple(size for size in shape if size != 1)])
        except Refused:
            return self.reshape(self._even(value, flat, shape), shape)
        sizes = dict(enumerate(parts))
        index = dict(enumerate(_spread(flat, range(len(parts)), sizes)))
        dims, at = [], 0
        for size in shape:
            dim, end = [], 1
            while end < size:
                dim.append(at)
                end *= parts[at]
                at += 1
            dims.append(dim)
        return self.view(value, dims, index, sizes)

    def _even(self, value: Value, flat: Sequence[int], shape: Sequence[int]) -> Value:
        """Return a value in which dims that a shape splits unevenly are one loop of a node."""
        common = sorted(_ends(flat) & _ends(shape), reverse=True)
        value = self.reshape(value, [whole // inner for whole, inner in itertools.pairwise(common)])
        for dim, (whole, inner) in enumerate(itertools.pairwise(common)):
            new = sorted({end // inner for end in _ends(shape) if inner <= end <= whole})
            try:
                refined([value.dims[dim], [large // small for small, large in itertools.pairwise(new)][::-1]])
            except Refused:
                value = self.flat(value, dim)
        return value

    def permute(self, value: Value, order: Sequence[int]) -> Value:
        """Return a value with its dims in another order."""
        read, dims, sizes = self.table.letters(value)
        return self.table.value(read, [dims[at] for at in order], sizes)

    def transpose(self, value: Value, one: int, other: int) -> Value:
        """Return a value with two dims exchanged."""
        order = list(range(len(value.dims)))
        one, other = within(one, len(order)), within(other, len(order))
        order[one], order[other] = order[other], order[one]
        return self.permute(value, order)

    def expand(self, value: Value, shape: Sequence[int]) -> Value:
        """Return a value whose dims of size 1, and new first ones, are repeated."""
        read, dims, sizes = self.table.letters(value)
        new: list[list[Letter]] = [[] for _ in range(len(shape) - len(dims))] + dims
        if len(shape) < len(dims):
            raise Refused(f"{list(value.shape)} is expanded to {list(shape)}")
        for at, size in enumerate(shape):
            have = math.prod(sizes[letter] for letter in new[at])
            if size not in (have, -1):
                if have != 1:
                    raise Refused(f"{list(value.shape)} is expanded to {list(shape)}")
                new[at] = [("repeat", at)]
                sizes[new[at][0]] = size
        return self.table.value(read, new, sizes)

    def unsqueeze(self, value: Value, dim: int) -> Value:
        """Return a value with one more dim, of size 1."""
        dim = within(dim, len(value.dims) + 1)
        return value._replace(dims=(*value.dims[:dim], (), *value.dims[dim:]))

    def squeeze(self, value: Value, dims: Sequence[int]) -> Value:
        """Return a value without some dims of size 1; others stay."""
        gone = {within(dim, len(value.dims)) for dim in dims if not value.dims[within(dim, len(value.dims))]}
        return value._replace(dims=tuple(dim for at, dim in enumerate(value.dims) if at not in gone))

    def part(self, value: Value, dim: int, start: int, size: int, step: int = 1) -> Value:
        """Return some entries of a dim: ``size`` of them from ``start`` on, every ``step``-th.

        Raises:
            Refused: they are no such entries.
        """
        dim = within(dim, len(value.dims))
        whole = math.prod(value.dims[dim])
        if start < 0 or start + (size - 1) * step >= whole:
            raise Refused(f"entries {start} to {start + (size - 1) * step} of a dim of {whole}")
        if (size, step) == (whole, 1):
            return value
        read, dims, sizes = self.table.letters(value)
        letters, index = dims[dim], Instead()
        inner, begin = whole, start
        kept: list[Letter] = []
        for at, letter in enumerate(letters):
            inner //= sizes[letter]
            first, last = start // inner, (start + (size - 1) * step) // inner
            if first == last:  # all entries have one number of this factor
                index[letter] = (first, ())
                start -= first * inner
                continue
            if inner == 1 or (step == 1 and start % inner == 0 and size % inner == 0):
                kept = [("part", letter), *letters[at + 1 :]]
                count = size // inner
                sizes[kept[0]] = count
                index[letter] = (start // inner, ((kept[0], step if inner == 1 else 1),))
                break
            return self.picked(value, dim, begin, (size, step))
        dims[dim] = kept
        read = Read(read.coefficient, read.node, substitute(read.maps, index))
        return self.settled([read], dims, sizes, lambda reads, sizes: self.table.part(reads[0], sizes))

    def picked(self, value: Value, dim: int, start: int, *rows: tuple[int, int]) -> Value:
        """Return entries of a dim, across its parts: those where an identity matrix has their numbers. These count from
        ``start`` on along rows, each of a size and with a step; all rows but the first are dims behind the last."""
        read, dims, sizes = self.table.letters(value)
        letters: list[Letter] = [("row", at) for at in range(len(rows))]
        sizes.update((letter, size) for letter, (size, _) in zip(letters, rows, strict=True))
        whole = _spread([math.prod(value.dims[dim])], dims[dim], sizes)[0]
        steps = ordered({letter: step for letter, (_, step) in zip(letters, rows, strict=True)})
        mark = Read(1, self.table.delta, (whole, (start, steps)))
        summed, dims[dim] = dims[dim], letters[:1]
        dims += [[letter] for letter in letters[1:]]
        return self._summed([mark, read], dims, sizes, summed)

    def select(self, value: Value, dim: int, at: int) -> Value:
        """Return one entry of a dim, without the dim."""
        dim = within(dim, len(value.dims))
        return self.squeeze(self.part(value, dim, within(at, math.prod(value.dims[dim])), 1), [dim])

    def place(self, value: Value, dim: int, start: int, whole: int, step: int = 1) -> Value:
        """Return a value whose dim is longer: its entries stand from ``start`` on, among zeros."""
        dim = within(dim, len(value.dims))
        read, dims, sizes = self.table.letters(value)
        size = math.prod(value.dims[dim])
        if (size, step) == (whole, 1):
            return value
        terms, inner = [], step
        for letter in reversed(dims[dim]):
            terms.append((letter, inner))
            inner *= sizes[letter]
        row = ("row", 0)
        sizes[row] = whole
        mark = Read(1, self.table.delta, ((0, ((row, 1),)), (start, tuple(reversed(terms)))))
        summed, dims[dim] = dims[dim], [row]
        return self._summed([mark, read], dims, sizes, summed)

    def cat(self, values: Sequence[Value], dim: int) -> Value:
        """Return the entries of all values, one behind the other along a dim."""
        dim = within(dim, len(values[0].dims))
        whole, start, placed = sum(value.shape[dim] for value in values), 0, []
        for value in values:
            placed.append(self.place(value, dim, start, whole))
            start += value.shape[dim]
        return self.plus(*placed)

    def opaque(
        self,
        op: str,
        args: Hashable,
        values: Sequence[Value],
        labels: Sequence[Sequence[Hashable]],
        result: Sequence[Hashable],
        looked: Sequence[Hashable],
        more: Mapping[Hashable, int] = {},
    ) -> Value:
        """Return a function that the checker knows nothing of, but that it looks along some labels, and does the same
        along the others. A label of the result that it looks along is a loop of the node's own, as are labels that only
        the result has, with sizes in ``more``."""
        reads, letters, sizes = self.bind(values, labels)
        lengths = tuple(math.prod(sizes[letter] for letter in letters[name]) for name in looked)
        inner = [letter for name in looked for letter in letters[name]]
        self._demand_order(reads, sizes, inner)
        alone: list[Letter] = []
        dims: list[Sequence[Letter]] = []
        for name in result:
            if name in looked or name in more:
                letter = ("own", name)
                sizes[letter] = more[name] if name in more else lengths[list(looked).index(name)]
                alone.append(letter)
                dims.append([letter])
            else:
                dims.append(letters.get(name, ()))
        node, maps, _ = self.table.make(op, (args, lengths), reads, sizes, inner, alone, keep=inner)
        return self.table.value(Read(1, node, maps), dims, sizes)

    def canonical(self, one: Value, other: Value) -> bool:
        """Return whether two values are the same, however their dims are divided into letters."""
        if one.shape != other.shape:
            return False
        names = [list(range(len(one.dims)))] * 2
        reads, letters, sizes = self.bind([one, other], names)
        dims: Dims = [letters[name] for name in names[0]]
        while True:
            try:
                return equal(self.table, reads[0], reads[1], sizes)
            except Divide as request:
                reads, dims, sizes = divided(request, reads, dims, sizes)

    # ---- ranks that count in reverse: which place ``~cp`` is depends on the part of a dim that it stands in

    def _parts_of(self, read: Read, sizes: Mapping[Letter, int]) -> dict[Letter, Letter | None]:
        """Return, for each letter of ranks that count in reverse in every second part, the letter of the parts; None
        where the read does not have it just above, as after a sum over parts, or one of them alone."""
        parts: dict[Letter, Letter | None] = {}
        for offset, terms in read.maps:
            turned = [letter for letter, _ in terms if isinstance(letter, str) and letter[0] == "~"]
            if not turned:
                continue
            strides = dict(terms)
            low = min(strides[letter] for letter in turned)
            whole = low * math.prod(self.table.mesh[letter[1:]] for letter in turned)
            above = [letter for letter, stride in terms if stride == whole]
            inside = [(letter, stride) for letter, stride in terms if stride < low]
            known = (
                len(above) == 1
                and not isinstance(above[0], str)
                and sizes[above[0]] % 2 == 0
                and offset % (2 * whole) == 0
                and all(letter in turned or low > stride > 0 or stride % (2 * whole) == 0
                        for letter, stride in terms if letter != above[0])
                and sum(stride * (length_of(letter, sizes, self.table.mesh) - 1) for letter, stride in inside) < low
            )  # fmt: skip
            for letter in turned:
                part = above[0] if known else None
                parts[letter] = part if parts.get(letter, part) == part else None
        return parts

    def _demand_order(
        self, reads: Sequence[Read], sizes: Mapping[Letter, int], looked: Collection[Letter] | None = None
    ) -> None:
        """Refuse operands that count ranks in reverse in different parts. What is linear in one of them may sum over
        the parts; ``looked`` are the letters along which another function looks.

        Raises:
            Refused: they do.
        """
        if not self._reversed:
            return
        every = [self._parts_of(read, sizes) for read in reads]
        for letter in {letter for parts in every for letter in parts}:
            parts = [each[letter] for each in every if letter in each]
            unknown = parts[0] is None or len(set(parts)) > 1 or (looked and parts[0] in looked)
            if unknown and (len(parts) > 1 or looked is not None):
                raise Refused(f"reads parts along `{letter}`, of which every second one is in reverse, together")

    def _demand_ranks(
        self, read: Read, sizes: Mapping[Letter, int], ranks: Sequence[tuple[int, str]], outer: Sequence[Letter]
    ) -> None:
        """Refuse to place what ranks have by another order of the ranks than it has.

        Raises:
            Refused: it counts ranks in reverse and the collective does not, or in other parts.
        """
        parts = self._parts_of(read, sizes)
        used = {letter for _, terms in read.maps for letter, _ in terms}
        for _, name in ranks:
            other = name[1:] if name[0] == "~" else f"~{name}"
            if other in used or (name in parts and (not outer or parts[name] != outer[-1])):
                raise Refused(f"places parts along `{name}` in another order than they have")

    def _ranks_in(self, value: Value, axes: Sequence[str]) -> list[str]:
        """Return the letters of some axes' ranks, as a value has them.

        Raises:
            Refused: it counts them in both ways.
        """
        used = value.letters
        names = [name for _, name in self.ranks(axes)]
        if both := [name for name in names if {name, f"~{name}"} <= used]:
            raise Refused(f"counts the ranks of `{both[0]}` in two ways")
        return [f"~{name}" if f"~{name}" in used else name for name in names]

    # ---- ranks

    def ranks(self, axes: Sequence[str]) -> list[tuple[int, str]]:
        """Return the sizes and letters of the ranks of some axes, major first. Those of ``~cp`` count in reverse within
        every second part.

        Raises:
            Refused: one is an axis that no rank has.
        """
        if unknown := [axis for axis in axes if axis.lstrip("~") not in self.table.axes]:
            raise Refused(f"`{unknown[0]}` is no axis of the mesh")
        self._reversed = self._reversed or any(axis.startswith("~") for axis in axes)
        return [
            (size, "~" * axis.startswith("~") + name)
            for axis in axes
            for size, name in self.table.axes[axis.lstrip("~")]
        ]

    def _atoms(self, stretch: Sequence[Atom]) -> list[tuple[int, str]]:
        atoms: list[tuple[int, str]] = []
        for atom in stretch:
            if atom.axis:
                atoms += self.ranks([atom.axis])
            elif atom.size > 1:
                atoms.append((atom.size, ""))
        return atoms

    def piece(self, node: int, type_: Type, microbatches: int = 1) -> Value:
        """Return one rank's piece of a node, as a type splits it. Of a dim of several stretches, each is split."""
        if 0 in type_.local:  # it has no entries
            return self.constant(0, type_.local)
        loops: list[Affine] = [(0, ((MICROBATCH, 1),))] if microbatches > 1 else []
        return self._stretched(node, loops, [], {}, type_.dims)

    def _stretched(
        self, node: int, loops: list[Affine], dims: list[list[Letter]], sizes: dict[Letter, int], left: Sequence[Dim]
    ) -> Value:
        if not left:
            return self.table.value(Read(1, node, tuple(loops)), dims, sizes)
        parts, start = [], 0
        for stretch in left[0]:
            atoms = self._atoms(stretch)
            whole = inner = math.prod(size for size, _ in atoms)
            terms, dim, lengths = [], [], dict(sizes)
            for at, (size, axis) in enumerate(atoms):
                inner //= size
                letter = axis or ("dim", len(dims), at)
                terms.append((letter, inner))
                if not axis:
                    dim.append(letter)
                    lengths[letter] = size
            index = (start, tuple(terms))
            parts.append(self._stretched(node, [*loops, index], [*dims, dim], lengths, left[1:]))
            start += whole
        return parts[0] if len(parts) == 1 else self.cat(parts, len(dims))

    def cut(self, value: Value, type_: Type) -> Value:
        """Return one rank's piece of a whole value, as a type splits it.

        Raises:
            Refused: it is the type of values of another shape.
        """
        if value.shape != type_.shape:
            raise Refused(f"a value of {list(value.shape)} is split as one of {list(type_.shape)}")
        for dim, stretches in enumerate(type_.dims):
            parts, start = [], 0
            for stretch in stretches:
                atoms = self._atoms(stretch)
                whole = math.prod(size for size, _ in atoms)
                parts.append(self._at_ranks(self.part(value, dim, start, whole), dim, atoms))
                start += whole
            value = parts[0] if len(parts) == 1 else self.cat(parts, dim)
        return value

    def _at_ranks(self, value: Value, dim: int, atoms: Sequence[tuple[int, str]]) -> Value:
        """Return the part of a dim that a rank has: the dim's factors are entries of the part, or (named) coordinates.

        Raises:
            DivideAxis: a coordinate is more than one letter of the dim.
        """
        if not any(name for _, name in atoms):
            return value
        try:
            parts = refined([value.dims[dim], tuple(size for size, _ in atoms)])
        except Refused:
            named = [at for at, (_, name) in enumerate(atoms) if name]
            if len(named) == 1:
                return self._at_ranks(self.flat(value, dim), dim, atoms)
            # one axis after the other, as ranks of the next one split what the first one's have
            before, (_, *rest) = atoms[: named[0]], atoms[named[0] :]
            inner = math.prod(size for size, _ in rest)
            value = self._at_ranks(value, dim, [*before, atoms[named[0]], (inner, "")])
            return self._at_ranks(value, dim, [*before, *rest])
        read, dims, sizes = self.table.letters(value)
        letters = [("part", at) for at in range(len(parts))]
        sizes.update(zip(letters, parts, strict=True))
        index = Instead(zip(dims[dim], _spread(value.dims[dim], letters, sizes), strict=True))
        ranks = Instead()
        at, dims[dim] = 0, []
        for size, name in atoms:
            first, inner = at, 1
            while inner < size:
                inner *= parts[at]
                at += 1
            if not name:
                dims[dim] += letters[first:at]
            elif at - first > 1:
                axis = name.lstrip("~").split(".")[0]
                known = [part for part, other in self.table.axes[axis]]
                where = [other for _, other in self.table.axes[axis]].index(name.lstrip("~"))
                raise DivideAxis(axis, (*known[:where], *parts[first:at], *known[where + 1 :]))
            else:
                ranks[letters[first]] = (0, ((name, 1),))
        maps = substitute(substitute(read.maps, index), ranks)
        return self.settled(
            [read._replace(maps=maps)], dims, sizes, lambda reads, sizes: self.table.part(reads[0], sizes)
        )

    def flat(self, value: Value, dim: int) -> Value:
        """Return a value whose dim is one loop of a node: ranks split it across its parts."""
        factor, rest = self.factored(value)
        names = list(range(len(value.dims)))
        return self.times(factor, self.opaque("flat", (), [rest], [names], names, [dim]))

    def _by_stretch(self, value: Value, dim: int, outer: Sequence[int], change: Callable[[Value], Value]) -> Value:
        """Return a value whose parts along a dim, of these proportions, are changed each."""
        pieces, start, size = [], 0, value.shape[dim]
        for share in outer:
            length = size * share // sum(outer)
            pieces.append(change(self.part(value, dim, start, length)))
            start += length
        return self.cat(pieces, dim)

    def gathered(self, value: Value, axes: Sequence[str], dim: int, outer: int | Sequence[int]) -> Value:
        """Return a value whose dim has the entries of all ranks of some axes, in the place of one rank's: of every one
        of ``outer`` parts."""
        if not isinstance(outer, int):
            return self._by_stretch(value, dim, outer, lambda part: self.gathered(part, axes, dim, 1))
        ranks, read, dims, sizes = self._among(value, axes, dim, outer)
        index = Instead({name: (0, ((("rank", name), 1),)) for _, name in ranks})
        return self.table.value(read._replace(maps=substitute(read.maps, index)), dims, sizes)

    def _among(
        self, value: Value, axes: Sequence[str], dim: int, outer: int
    ) -> tuple[list[tuple[int, str]], Read, list[list[Letter]], dict[Letter, int]]:
        """Return the ranks of axes, and a read of a value with letters for each rank's place in a dim."""
        ranks = self.ranks([f"~{axis}" if outer < 0 else axis for axis in axes])
        outer = abs(outer)
        value = self.reshape(value, (*value.shape[:dim], outer, value.shape[dim] // outer, *value.shape[dim + 1 :]))
        read, dims, sizes = self.table.letters(value)
        self._demand_ranks(read, sizes, ranks, dims[dim])
        sizes.update((("rank", name), size) for size, name in ranks)
        dims[dim : dim + 2] = [[*dims[dim], *(("rank", name) for _, name in ranks), *dims[dim + 1]]]
        return ranks, read, dims, sizes

    def kept(self, value: Value, axes: Sequence[str], dim: int, outer: int | Sequence[int]) -> Value:
        """Return the part of a dim that a rank of some axes has: of every one of ``outer`` parts its share."""
        if not isinstance(outer, int):
            return self._by_stretch(value, dim, outer, lambda part: self.kept(part, axes, dim, 1))
        ranks = self.ranks([f"~{axis}" if outer < 0 else axis for axis in axes])
        outer, size = abs(outer), value.shape[dim]
        parts = outer * math.prod(size for size, _ in ranks)
        if size % parts:
            raise Refused(f"a dim of {size} is split in {parts} parts")
        atoms = [(outer, ""), *ranks, (size // parts, "")]
        return self._at_ranks(value, dim, [atom for atom in atoms if atom[0] > 1])

    def padded(self, value: Value, axes: Sequence[str], dim: int, outer: int | Sequence[int]) -> Value:
        """Return a value with the entries of this rank in their place among those of all, and zeros elsewhere."""
        if not isinstance(outer, int):
            return self._by_stretch(value, dim, outer, lambda part: self.padded(part, axes, dim, 1))
        ranks, read, dims, sizes = self._among(value, axes, dim, outer)
        marks = [Read(1, self.table.delta, ((0, ((("rank", name), 1),)), (0, ((name, 1),)))) for _, name in ranks]
        return self._summed([*marks, read], dims, sizes, [])

    def over(self, value: Value, axes: Sequence[str]) -> Value:
        """Return the sum of a value over the ranks of some axes."""
        read, dims, sizes = self.table.letters(value)
        summed = self._ranks_in(value, axes)
        return self._summed([read], dims, sizes, summed)


def _spread(dim: Sequence[int], parts: Sequence[Letter], sizes: Mapping[Letter, int]) -> list[Affine]:
    """Return the index of each letter of a dim in finer parts of it."""
    rows, left = [], len(parts)
    for size in reversed(dim):
        inner, terms = 1, []
        while inner < size:
            left -= 1
            terms.append((parts[left], inner))
            inner *= sizes[parts[left]]
        rows.append((0, tuple(reversed(terms))))
    return rows[::-1]
