"""Meanings: every value of every program as one node of a table, in a normal form.

A *node* is an operator over loops. It reads other nodes, and each read says by which of the node's letters every loop
of the other node is indexed, as an affine map. ``y = x @ w.t()`` is

    product[m, n; k]  x[m, k] * w[n, k]

where ``m`` and ``n`` are *entry* letters, one for each of the node's own loops, and ``k`` is summed. A *value* is a
view of a node: its dims are lists of letters, and a map from these to the node's loops. So a reshape, a transpose or an
expand changes the view alone, and equal numbers in another shape are one node.

What differs from rank to rank has an axis of the mesh among the letters of its map: the piece ``f32[256/tp, 8]`` of a
parameter reads its first loop at ``128 * tp + i``. A local product over ``i`` of such a piece sums it over ``i`` alone;
an all-reduce over ``tp`` sums the letter ``tp`` as well; the two letters, always read together, then become one, and
the node is the one of the unsharded model. Types need no rules: what does not commute with being split is another node.

The normal form (`Table`) is made where a node is made:

- letters that are always read together are one letter, and letters are numbered in the order of reading;
- products are flat, a letter is summed as far inside as it is read, and what does not depend on it stands outside;
- sums are flat, with equal terms joined, and the first term's coefficient stands in front;
- coefficients are exact fractions, and the only numbers outside of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import isnan
from typing import NamedTuple

from .letters import (
    Affine,
    Divide,
    Instead,
    Letter,
    Maps,
    Number,
    Read,
    components,
    divided,
    joined_letters,
    length_of,
    letters_of,
    nested,
    numbered,
    ordered,
    product_of,
    range_of,
    reduced,
    substitute,
)
from .nodes import Node, Seen
from .orders import order_of
from .places import Places
from .text import Refused


class Value(NamedTuple):
    """A view of a multiple of a node. ``dims`` has the sizes of each dim's letters, major first, which maps number from
    0 on; a dim of size 1 has none."""

    coefficient: Number
    node: int
    maps: Maps
    dims: tuple[tuple[int, ...], ...]
    chosen: Value | None = None
    """The rows that are present, of packed rows of tokens: which tokens each expert has, [experts, tokens]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dims."""
        return tuple(product_of(dim) for dim in self.dims)

    @property
    def letters(self) -> set[str]:
        """The letters of ranks among those that the value depends on."""
        return {letter for _, terms in self.maps for letter, _ in terms if isinstance(letter, str)}

    @property
    def axes(self) -> set[str]:
        """The axes along which the value differs from rank to rank."""
        return {letter.removeprefix("~").split(".")[0] for letter in self.letters}


class Table(Places):
    """The one table of nodes, in normal form. Equal meanings have equal numbers."""

    def __init__(self, mesh: Mapping[str, int]) -> None:
        super().__init__(mesh)
        self._made, self.most = 0, 30_000
        """The products and parts that were made, and the most of them; the largest models have a tenth of that."""
        self.axes = {axis: [(size, axis)] if size > 1 else [] for axis, size in mesh.items()}
        """The letters that count the ranks of each axis, major first, with their sizes."""
        self._known: dict[Hashable, tuple[Read, Seen | None]] = {}
        self.zero = Value(0, self.one, (), ())

    def divide(self, axis: str, sizes: tuple[int, ...]) -> None:
        """Count the ranks of an axis by several letters, of these sizes.

        Raises:
            Refused: they are counted so already.
        """
        letters = [(size, f"{axis}.{at}") for at, size in enumerate(sizes)]
        if self.axes[axis] == letters:
            raise Refused(f"`{axis}` is split over parts of a dim")
        self.axes[axis] = letters
        self.mesh.update((name, size) for size, name in letters)

    # ---- nodes

    def make(
        self,
        op: str,
        args: Hashable,
        reads: Sequence[Read],
        sizes: Mapping[Letter, int],
        inner: Iterable[Letter] = (),
        alone: Sequence[Letter] = (),
        commutes: bool = False,
        keep: Sequence[Letter] = (),
    ) -> tuple[int, Maps, Number]:
        """Return the node of an operator, the index of each of its loops, and a coefficient in front. ``alone`` are
        letters of the result that no operand is read by; ``keep`` inner letters that matter even where nothing is read
        by them. Other letters that nothing is read by are no part of the node."""
        inside = frozenset(inner)
        keep = list(keep)
        reads = [self.straight(read) for read in reads]
        groups, terms = joined_letters(reads, inside, sizes, self.mesh, keep)
        order: Sequence[int] = range(len(reads))
        if commutes and len(reads) > 1:
            order = order_of(reads, terms, groups, inside, alone, keep)
        encoded, entry, within = numbered(
            reads, terms, order, inside, alone, keep, [self.equals[read.node] for read in reads]
        )
        lead = encoded[0].coefficient if op == "sum" else 1
        if lead != 1:
            encoded = tuple(r._replace(coefficient=reduced(Fraction(r.coefficient) / lead)) for r in encoded)
        lengths = {letter: size for letter, (_, size) in groups.items()}
        loops = tuple(lengths[letter] if letter in lengths else length_of(letter, sizes, self.mesh) for letter in entry)
        depths = tuple(
            lengths[letter] if letter in lengths else length_of(letter, sizes, self.mesh) for letter in within
        )
        shape = self._shape(op, args, loops, depths, [(r.coefficient, r.maps) for r in encoded])
        node = self.add(shape, tuple([r.node for r in encoded]))
        index = ((0, ordered(dict(groups[letter][0])) if letter in groups else ((letter, 1),)) for letter in entry)
        return node, tuple(index), lead

    def product(
        self,
        coefficient: Number,
        reads: Sequence[Read],
        sizes: Mapping[Letter, int],
        summed: Iterable[Letter] = (),
        closed: Collection[int] = (),
    ) -> Read:
        """Return a product of reads, summed over some letters, in normal form. The places in a ``closed`` node are as
        simple as they get."""
        self._count()
        factors: list[Read] = []
        stack = list(reads)
        while stack:
            read = stack.pop()
            coefficient *= read.coefficient
            node = self.node(read.node)
            if node.op == "product" and not node.inner:
                stack += self.inside(read, node)
            elif read.node != self.one:
                factors.append(read if read.coefficient == 1 else read._replace(coefficient=1))
        if not coefficient:
            return Read(0, self.one, ())
        used = {letter for read in factors for _, terms in read.maps for letter, _ in terms}
        left, done = set(), frozenset(closed)
        for letter in summed:
            if letter in used:
                left.add(letter)
            else:
                coefficient *= length_of(letter, sizes, self.mesh)
        if left:
            result = self._settled(
                factors, sizes, left,
                lambda reads, sizes, over: self._once(
                    done, reads, sizes, over, lambda: self._product(list(reads), sizes, set(over), done)
                ),
            )  # fmt: skip
        else:
            result = self._product(factors, sizes, left, done)
        return result if coefficient == 1 else self._scaled(result, coefficient)

    def _scaled(self, read: Read, by: Number) -> Read:
        """Return a multiple of a read."""
        return Read(reduced(read.coefficient * by), read.node, read.maps)

    def _product(
        self, factors: list[Read], sizes: Mapping[Letter, int], summed: set[Letter], closed: frozenset[int]
    ) -> Read:
        """Return the product of factors that are no products themselves, summed over letters that some of them have."""
        pieces = (
            [r.node for r in factors if self.look(r.node)[2] and r.node != self.delta] if self.form.in_pieces else []
        )
        for at, read in enumerate(factors):
            node = self.node(read.node)
            if node.op not in ("sum", "product") or read.node in closed:
                continue
            # of two factors in pieces the product would have as many terms as both together
            if (pieces == [read.node] and len(factors) > 1) or self.touches(read, summed, sizes):
                if node.op == "sum" and not self._in_pieces(read, summed):
                    continue
                rest = factors[:at] + factors[at + 1 :]
                if node.op == "sum" and (whole := self._rejoined(factors, at, summed, sizes)) is not None:
                    return self.product(1, *whole)
                if node.op == "sum":
                    terms = self.inside(read, node)
                    return self.sum([self.product(1, [*rest, term], sizes, summed) for term in terms], sizes)
                reads, inside, more = self.opened(node, dict(enumerate(read.maps)), sizes, summed)
                return self.product(1, rest + reads, inside, more)
        coefficient: Number = 1
        left = set(summed)
        if any(read.node == self.delta for read in factors):
            simpler = self._placed(factors, left, sizes)
            if simpler is None:
                return Read(0, self.one, ())
            factors, left, sizes = simpler
            padded = self.form.in_pieces and any(self.padded(read, sizes) for read in factors)
            parts = [self.part(read, sizes) if padded and self.padded(read, sizes) else read for read in factors]
            if parts != factors:
                return self.product(coefficient, parts, sizes, left, closed)
        if (unflattened := self._unflattened(factors, left, sizes)) is not None:
            return self.product(coefficient, *unflattened)
        letters = [letters_of(read) for read in factors]
        for letter in list(left):
            if not any(letter in used for used in letters):
                coefficient *= length_of(letter, sizes, self.mesh)
                left.discard(letter)
        if not left:
            return self._pure(coefficient, factors, sizes)
        outside = [read for read, used in zip(factors, letters, strict=True) if used.isdisjoint(left)]
        results = list(outside)
        for members, over in components(letters, left):
            part = self._contract(
                [factors[at] for at in members], [letters[at] & over for at in members], over, sizes, closed
            )
            coefficient *= part.coefficient
            results.append(part._replace(coefficient=1))
        return self._pure(reduced(coefficient), results, sizes)

    def _pure(self, coefficient: Number, reads: Sequence[Read], sizes: Mapping[Letter, int]) -> Read:
        """Return a product without a sum."""
        factors: list[Read] = []
        for read in reads:
            node = self.node(read.node)
            coefficient *= read.coefficient
            if node.op == "product" and not node.inner:
                factors += self.inside(read, node)
            elif read.node != self.one:
                factors.append(self.straight(read._replace(coefficient=1)))
        coefficient = reduced(coefficient)
        factors = self._cancelled(factors)
        if not coefficient or not factors:
            return Read(coefficient, self.one, ())
        if len(factors) == 1:
            return factors[0]._replace(coefficient=coefficient)
        at, maps, _ = self.make("product", (), factors, sizes, commutes=True)
        return Read(coefficient, at, maps)

    def _contract(
        self,
        factors: list[Read],
        letters: list[set[Letter]],
        over: set[Letter],
        sizes: Mapping[Letter, int],
        closed: frozenset[int],
    ) -> Read:
        """Return the sum, over letters, of a product of factors that these letters connect."""
        if len(factors) == 1:
            known = self._sum_of_one(factors[0], letters, over, sizes, closed)
            if known is not None:
                return known
        else:
            counts: dict[Letter, int] = {}
            for factor, used in zip(factors, letters, strict=True):
                for letter in used:  # an identity matrix is not summed by itself: it would be opened again
                    counts[letter] = counts.get(letter, 0) + (2 if factor.node == self.delta else 1)
            alone = {letter for letter, count in counts.items() if count == 1}
            if alone:
                summed = [
                    self.product(1, [factor], sizes, used & alone) if used & alone else factor
                    for factor, used in zip(factors, letters, strict=True)
                ]
                return self.product(1, summed, sizes, over - alone)
            for at, factor in enumerate(factors):
                if self.node(factor.node).op == "flat":
                    rest = [*factors[:at], *factors[at + 1 :]]
                    loop = {letter for letter, _ in factor.maps[0][1]}
                    if loop.isdisjoint(over.union(*map(letters_of, rest))):
                        return self._flat_of_sum(factor, rest, sizes, over)
            rest = [factor for factor in factors if factor.node != self.delta]
            placed = {
                letter
                for factor, used in zip(factors, letters, strict=True)
                if factor.node == self.delta
                for letter in used
            }
            if self.form.in_pieces and placed and rest and over - placed:
                first = self.product(1, rest, sizes, over - placed)
                rest = [factor for factor in factors if factor.node == self.delta]
                return self.product(1, [first, *rest], sizes, placed, closed | self._with_factors(first))
            nest = nested(letters, over)
            if nest is not None and any(factors[at].node != self.delta for at in nest[0]):
                members, inside = nest
                first = self.product(1, [factors[at] for at in members], sizes, inside)
                rest = [factor for at, factor in enumerate(factors) if at not in members]
                return self.product(1, [first, *rest], sizes, over - inside, closed | self._with_factors(first))
        at, maps, _ = self.make("product", (), factors, sizes, over, commutes=True)
        return Read(1, at, maps)

    def _sum_of_one(
        self,
        read: Read,
        letters: list[set[Letter]],
        over: set[Letter],
        sizes: Mapping[Letter, int],
        closed: frozenset[int],
    ) -> Read | None:
        """Return the sum of one factor over letters, by what its node is made of; None for a node of another kind."""
        node, index = self.node(read.node), dict(enumerate(read.maps))
        if node.op in ("sum", "product", "squares") and (cut := self.cut_apart(read, over, sizes)):
            whole, back = Instead(), Instead()
            for loop in cut:  # some entries of the whole node's sum, as where it is summed before these are taken
                letter = self.fresh()
                whole[loop], back[letter] = (0, ((letter, 1),)), read.maps[loop]
                sizes = {**sizes, letter: node.sizes[loop]}
            maps = tuple([whole.get(loop, each) for loop, each in index.items()])
            result = self._contract([read._replace(maps=maps)], letters, over, sizes, closed)
            return result._replace(maps=substitute(result.maps, back))
        if node.op == "flat" and not over.intersection(letter for letter, _ in read.maps[0][1]):
            return self._flat_of_sum(read, [], sizes, over)
        if node.op == "sum":
            return self.sum([self.product(1, [term], sizes, over) for term in self.inside(read, node)], sizes)
        if node.op == "product":
            return self.product(1, *self.opened(node, index, sizes, over))
        if node.op == "squares":
            squared, sizes_inside, squared_over = self.opened(node, index, sizes, over)
            return self.squares(squared[0], sizes_inside, squared_over)
        return None

    def _flat_of_sum(self, read: Read, others: list[Read], sizes: Mapping[Letter, int], over: set[Letter]) -> Read:
        """Return the sum, over letters, of a node that makes one loop, its first, of several, times ``others`` that do
        not read this loop: that of the summed."""
        node = self.node(read.node)
        (inside,), lengths, summed = self.opened(node, dict(enumerate(read.maps)), sizes, over)
        inner = [letter for letter in lengths if letter in summed - over]
        total = self.product(1, [inside, *others], lengths, over)
        joined = self.fresh()
        result, maps, _ = self.make(
            "flat",
            node.args,
            [total._replace(coefficient=1)],
            {**lengths, joined: node.sizes[0]},
            inner,
            [joined],
            keep=inner,
        )
        return Read(total.coefficient, result, substitute(maps, Instead({joined: read.maps[0]})))

    def _with_factors(self, product: Read) -> set[int]:
        """Return the nodes of a product and of its factors, as which it is read where it has no sum."""
        return {product.node, *(read.node for read in self.node(product.node).reads)}

    def squares(self, read: Read, sizes: Mapping[Letter, int], over: Iterable[Letter]) -> Read:
        """Return the sum of the squares of a read over some letters."""
        used = {letter for _, terms in read.maps for letter, _ in terms}
        times = reduced(read.coefficient * read.coefficient)
        inner = []
        for letter in over:
            if letter in used:
                inner.append(letter)
            else:
                times *= length_of(letter, sizes, self.mesh)
        node, maps, _ = self.make("squares", (), [read._replace(coefficient=1)], sizes, inner)
        return Read(times, node, maps)

    def sum(self, terms: Iterable[Read], sizes: Mapping[Letter, int], apart: bool = True) -> Read:
        """Return a sum of reads in normal form; not ``apart`` where terms are joined already."""
        total: dict[tuple[int, Maps], Number] = {}
        stack = list(terms)
        while stack:
            read = self.part(stack.pop(), sizes) if self.form.in_pieces else stack.pop()
            node = self.node(read.node)
            if node.op == "sum":
                stack.extend(r._replace(coefficient=read.coefficient * r.coefficient) for r in self.inside(read, node))
            elif read.coefficient:
                key = read.node, self.straight(read).maps
                total[key] = total.get(key, 0) + read.coefficient
        reads = [Read(reduced(c), at, maps) for (at, maps), c in total.items() if c]
        if not reads:
            return Read(0, self.one, ())
        if len(reads) == 1:
            return reads[0]
        common = set.intersection(*(set(self.common(read)) for read in reads))
        if common:
            rest = self.sum([self.without(read, common, sizes) for read in reads], sizes)
            return self._pure(
                1, [*(read for read in dict.fromkeys(self.common(reads[0])) if read in common), rest], sizes
            )
        if apart and len(each := [term for read in reads for term in self._apart(read, sizes)]) > len(reads):
            return self.sum(each, sizes)
        if len(joined := self._joined(reads, sizes)) < len(reads):
            return self.sum(joined, sizes, apart=False)
        at, maps, lead = self.make("sum", (), reads, sizes, commutes=True)
        return Read(lead, at, maps)

    def _apart(self, read: Read, sizes: Mapping[Letter, int]) -> list[Read]:
        """Return the terms of a term that is a sum behind what all its terms have in common: other terms may have it
        too. What would be joined again stays."""
        node = self.node(read.node)
        if node.op != "product" or node.inner:
            return [read]
        factors = self.inside(read, node)
        sums = [r for r in factors if self.node(r.node).op == "sum"]
        others = [r for r in factors if r not in sums]
        if len(sums) != 1 or not all(self.common(r) for r in others):
            return [read]
        joined = any(r.node == self.delta or self.node(r.node).op == "exp" for r in others)
        if joined and not self.look(sums[0].node)[2]:
            return [read]
        terms = self.inside(sums[0], self.node(sums[0].node))
        return [self._pure(read.coefficient, [*others, term], sizes) for term in terms]

    def _joined(self, reads: Sequence[Read], sizes: Mapping[Letter, int]) -> list[Read]:
        """Return terms in which those are one that identity matrices place alike, and those of the same exponentials
        and inverses: what these stand before is added up first."""
        alike: dict[Hashable, list[tuple[Read, list[Read]]]] = {}
        lengths, inside = dict(sizes), set[Letter]()
        for at, read in enumerate(reads):
            (marks, rest, placed), lengths = self._marked(read, lengths, inside)
            alike.setdefault((tuple(marks), placed) if marks else at, []).append((read, rest))
        joined = []
        for key, terms in alike.items():
            if len(terms) == 1 or not isinstance(key, tuple):
                joined += [read for read, _ in terms]
                continue
            marks, placed = key
            parts = [
                self.product(read.coefficient, rest, lengths, inside & {k for r in rest for k in letters_of(r)})
                for read, rest in terms
            ]
            joined.append(self.product(1, [*marks, self.sum(parts, lengths)], lengths, placed))
        return joined

    def _marked(
        self, read: Read, sizes: dict[Letter, int], inside: set[Letter]
    ) -> tuple[tuple[list[Read], list[Read], tuple[Letter, ...]], dict[Letter, int]]:
        """Return the factors of a term by which it is known, the others, and the letters that are placed, with the
        sizes of all letters. Others that are summed are added to ``inside``."""
        node, (_, compared, piece) = self.node(read.node), self.look(read.node)
        if node.op != "product" or not (piece or not (node.inner or compared)):
            return ([], [], ()), sizes
        factors, sizes, inner = self.opened(node, dict(enumerate(read.maps)), sizes, set())
        if not piece:
            known = [r for r in factors if self.node(r.node).op in ("exp", "inverse")]
            known = known if any(self.node(r.node).op == "exp" for r in known) else []
            return (known, [r for r in factors if r not in known], ()), sizes
        for factor in list(factors):
            if (node := self.node(factor.node)).op == "product" and self.look(factor.node)[2]:
                factors.remove(factor)
                more, sizes, inner = self.opened(node, dict(enumerate(factor.maps)), sizes, inner)
                factors += more
        letters = dict.fromkeys(
            k for r in factors if r.node == self.delta for _, terms in r.maps for k, _ in terms if k in inner
        )
        names = {letter: ("placed", at, sizes[letter]) for at, letter in enumerate(letters)}
        sizes |= {name: sizes[letter] for letter, name in names.items()}
        inside |= inner - letters.keys()
        there = Instead({letter: (0, ((name, 1),)) for letter, name in names.items()})
        factors = [self.straight(r._replace(maps=substitute(r.maps, there))) for r in factors]
        marks = [r for r in factors if r.node == self.delta]
        return (marks, [r for r in factors if r.node != self.delta], tuple(names.values())), sizes

    def terms(self, read: Read) -> Iterator[Read]:
        """Yield the terms of a sum, and those of named sums among them."""
        node = self.node(read.node)
        if node.op == "named sum" and isinstance(node.args, int):
            node = self.node(node.args)
        if node.op == "sum":
            for term in self.inside(read, node):
                yield from self.terms(self._scaled(term, read.coefficient))
        else:
            yield read

    def common(self, read: Read) -> tuple[Read, ...]:
        """Return the factors of a read that stand outside of a sum whose terms all have them: those that are single
        numbers, and identity matrices."""
        node = self.node(read.node)
        if node.op != "product" or node.inner:
            outside = node.op not in ("one", "sum") and (not node.sizes or read.node == self.delta)
            return (self.straight(read._replace(coefficient=1)),) if outside else ()
        return tuple(r for r in self.inside(read, node) if not r.maps or r.node == self.delta)

    def without(self, read: Read, factors: Collection[Read], sizes: Mapping[Letter, int]) -> Read:
        """Return a read without one of each of these factors."""
        if not factors:
            return read
        node = self.node(read.node)
        if node.op != "product" or node.inner:
            return Read(read.coefficient, self.one, ())
        rest = self.inside(read, node)
        for factor in factors:
            rest.remove(factor)
        return self._pure(read.coefficient, rest, sizes)

    def _in_pieces(self, read: Read, summed: Iterable[Letter]) -> bool:
        """Return whether a product with a sum becomes a sum of products: each term is a piece that an identity matrix
        places, or one of them compares ranks that are summed. Else each product would have as many terms as both
        factors together."""
        axes = {letter for letter in summed if isinstance(letter, str)}
        compared = self.look(read.node)[1]
        if axes and any(letter in axes for loop in compared for letter, _ in read.maps[loop][1]):
            return True
        return self.look(read.node)[2]

    def _rejoined(
        self, factors: list[Read], at: int, summed: Iterable[Letter], sizes: Mapping[Letter, int]
    ) -> tuple[list[Read], dict[Letter, int], set[Letter]] | None:
        """Return factors in which ranks' parts of a node, which are summed over all ranks, are the node again; None
        where other factors have these parts otherwise."""
        read, axes = factors[at], {letter for letter in summed if isinstance(letter, str)}
        if (whole := self.whole(read.node)) is None or letters_of(read).isdisjoint(axes):
            return None
        again = Read(read.coefficient, whole[0], substitute(whole[1], dict(enumerate(read.maps))))
        joined = self._joined_first([*factors[:at], again, *factors[at + 1 :]], set(summed), sizes)
        return None if joined is None or axes <= joined[2] else joined

    def part(self, read: Read, sizes: Mapping[Letter, int]) -> Read:
        """Return the read of a part of a node in normal form: a part of what the node reads, as far as this goes, and
        zero outside of a place."""
        node = self.node(read.node)
        if not node.reads or not (self.cuts(read, sizes) or self.touches(read, (), sizes)):
            return read
        result = self._once("part", [read], sizes, (), lambda: self._kept_part(read, node, sizes))
        return self._scaled(result, read.coefficient)

    def _once(
        self,
        what: Hashable,
        reads: Sequence[Read],
        sizes: Mapping[Letter, int],
        summed: Collection[Letter],
        compute: Callable[[], Read],
    ) -> Read:
        """Return what is computed of reads, which is known of reads by other letters."""
        names: dict[Letter, Letter] = {}
        for read in reads:
            for _, terms in read.maps:
                for letter, _ in terms:
                    if not isinstance(letter, str):
                        names.setdefault(letter, len(names))
        there = {letter: (0, ((name, 1),)) for letter, name in names.items()}
        alike = tuple([(read.node, substitute(read.maps, there)) for read in reads])
        over = frozenset([names.get(letter, letter) for letter in summed])
        key = what, alike, tuple([sizes[letter] for letter in names]), over
        outer, known = self.seen, self._known.get(key)
        if known is None:
            self.seen = None if outer is None else Seen()
            try:
                result = compute()
                seen = None if self.seen is None or self.seen.deep else self.seen
                known = self._known[key] = result._replace(maps=substitute(result.maps, there)), seen
            finally:
                self.seen = outer
        if outer is not None:
            outer.take(known[1])
        back = {name: (0, ((letter, 1),)) for letter, name in names.items()}
        return known[0]._replace(maps=substitute(known[0].maps, back))

    def _kept_part(self, read: Read, node: Node, sizes: Mapping[Letter, int]) -> Read:
        """Return a part of a node, and remember of which node it is one."""
        part = self._part(read._replace(coefficient=1), node, sizes)
        loops: dict[Letter, Affine] = {
            terms[0][0]: (0, ((loop, 1),))
            for loop, (offset, terms) in enumerate(part.maps)
            if not offset and len(terms) == 1 and terms[0][1] == 1
        }
        if part.coefficient == 1 and letters_of(read) == loops.keys():
            self.keep_whole(part.node, read.node, substitute(read.maps, Instead(loops)))
        return part

    def _part(self, read: Read, node: Node, sizes: Mapping[Letter, int]) -> Read:
        self._count()
        index = dict(enumerate(read.maps))
        if node.op == "sum":
            return self.sum([self.part(term, sizes) for term in self.inside(read, node)], sizes)
        if node.op == "product":
            return self._settled(
                *self.opened(node, index, sizes, set()),
                lambda reads, sizes, over: self.product(1, [self.part(r, sizes) for r in reads], sizes, over),
            )
        shared = {letter for r in node.reads for _, terms in r.maps for letter, _ in terms}
        if node.op == "filled":  # what is real of it is what it reads
            (loop,) = (at for at in range(len(node.sizes)) if at not in shared)
            low, high = range_of(read.maps[loop], sizes, self.mesh)
            if low >= 0 and high < node.inner[0]:
                (real,), index[len(node.sizes)] = node.reads, read.maps[loop]
                return self.part(Read(real.coefficient, real.node, substitute(real.maps, index)), sizes)
        alone = {loop: self.fresh() for loop in range(len(node.sizes)) if loop not in shared}
        index.update((loop, (0, ((letter, 1),))) for loop, letter in alone.items())
        lengths = {**sizes, **{letter: node.sizes[loop] for loop, letter in alone.items()}}
        reads, lengths, over = self.opened(node, index, lengths, set())
        ordered_letters = [letter for letter in lengths if letter in over]
        place = Instead({letter: read.maps[loop] for loop, letter in alone.items()})

        def parted(reads: Sequence[Read], sizes: Mapping[Letter, int], within: Collection[Letter]) -> Read:
            keep = () if node.op in ("largest", "squares") else list(within)
            reads = [self.part(r, sizes) for r in reads]
            at, maps, _ = self.make(node.op, node.args, reads, sizes, within, list(alone.values()), keep=keep)
            return Read(1, at, substitute(maps, place))

        return self._settled(reads, lengths, ordered_letters, parted)

    def _settled(
        self,
        reads: Sequence[Read],
        sizes: Mapping[Letter, int],
        inner: Collection[Letter],
        compute: Callable[[Sequence[Read], Mapping[Letter, int], Collection[Letter]], Read],
    ) -> Read:
        """Return what is computed of reads over inner letters, after dividing these as it asks: nobody else can."""
        while True:
            try:
                return compute(reads, sizes, inner)
            except Divide as request:
                if request.letter not in inner:
                    raise
                reads, (inner,), sizes = divided(request, reads, [inner], sizes)

    @property
    def spent(self) -> bool:
        """True where more was made than is allowed."""
        return self._made > self.most

    def _count(self) -> None:
        """Count one more product or part, and refuse too many."""
        self._made += 1
        if self.spent:
            raise Refused("its meanings take more steps than any model has needed")

    # ---- values

    def value(self, read: Read, dims: Sequence[Sequence[Letter]], sizes: Mapping[Letter, int]) -> Value:
        """Return a view of a read whose dims have these letters, with letters joined that are read together."""
        used: dict[Letter, list[tuple[int, int]]] = {}
        for loop, (_, terms) in enumerate(read.maps):
            for letter, stride in terms:
                used.setdefault(letter, []).append((loop, stride))
        index: dict[Letter, Affine] = {}
        result, at = [], 0
        for dim in dims:
            lengths: list[int] = []
            groups: list[list[Letter]] = []
            for letter in dim:
                size = sizes[letter]
                if size == 1:
                    index[letter] = (0, ())
                    continue
                if groups:
                    last = groups[-1][-1]
                    if [(loop, stride * size) for loop, stride in used.get(letter, ())] == used.get(last, []):
                        groups[-1].append(letter)
                        lengths[-1] *= size
                        continue
                groups.append([letter])
                lengths.append(size)
            for group in groups:
                index.update(dict.fromkeys(group, (0, ())))
                index[group[-1]] = (0, ((at, 1),))
                at += 1
            result.append(tuple(lengths))
        return Value(read.coefficient, read.node, substitute(read.maps, index), tuple(result))

    def constant(self, coefficient: Number | float, shape: Sequence[int] = ()) -> Value:
        """Return a value whose entries are all one number. Infinity and NaN are nodes of their own."""
        if isinstance(coefficient, float):
            dims = tuple((size,) if size != 1 else () for size in shape)
            leaf = self.leaf("nan" if isnan(coefficient) else "infinity", ())
            return Value(-1 if coefficient < 0 else 1, leaf, (), dims)
        return Value(reduced(coefficient), self.one, (), tuple((size,) if size != 1 else () for size in shape))

    def letters(self, value: Value) -> tuple[Read, list[list[Letter]], dict[Letter, int]]:
        """Return a value as a read, with the letters of its dims and their sizes."""
        sizes: dict[Letter, int] = {}
        dims, at = [], 0
        for dim in value.dims:
            dims.append(list(range(at, at + len(dim))))
            sizes.update(zip(dims[-1], dim, strict=True))
            at += len(dim)
        return Read(value.coefficient, value.node, value.maps), dims, sizes
