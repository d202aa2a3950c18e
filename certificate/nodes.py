"""Nodes: the store of meanings, and what a computation has seen of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from .letters import Affine, Instead, Maps, Number, Read, in_order, substitute

MOST_LOOKED = 1000
"""The most nodes that a computation looks at whose result is known for other nodes that look the same."""
MOST_TERMS = 6
"""The number of terms from which sums of a model get names."""


_COMMUTING = "sum", "product"


class Form(NamedTuple):
    """A normal form. Some builds are equal to their model in one of several forms alone."""

    in_pieces: bool = True
    """True where sums of pieces that identity matrices place stand outside of products, whatever is read of them."""
    in_digits: bool = False
    """True where a loop is two, which part and which entry of it, where one of its equal parts stands among zeros."""
    named: bool = True
    """True where long sums of the model have names. The model's cost would grow with the square of its layers else; but
    a build that never has all terms of such a sum together has no name for it."""


class Node(NamedTuple):
    """A node: operator, other arguments, sizes of its loops and of its inner letters, and what it reads. Letters count
    loops first and inner letters behind them."""

    op: str
    args: Hashable
    sizes: tuple[int, ...]
    inner: tuple[int, ...]
    reads: tuple[Read, ...]


Index = tuple[Number, Maps]
"""A way to read a node: a coefficient in front, and the maps."""
Shape = tuple[str, Hashable, tuple[int, ...], tuple[int, ...], tuple[Index, ...]]
"""A node without the numbers of what it reads: operator, other arguments, sizes and inner sizes, and how it reads."""
Look = tuple[int, frozenset[int], bool]
"""The look of a node: the number of its shape, the loops that identity matrices compare, and whether it is a product
with an identity matrix, which may stand in one of its factors, or a sum of such products. Beside it, the numbers of
what the node reads are seen, but no name of a leaf."""
Equals = tuple[tuple[int, ...], ...]
"""Groups of a node's loops that may be exchanged: both of ``a[i] * a[j]``."""


class Seen:
    """A record of what a computation has seen of a table, and made in it."""

    __slots__ = ("agreed", "deep", "equals", "looked", "made", "parts")

    def __init__(self) -> None:
        self.looked: dict[int, None] = {}
        """The nodes that were looked at, in this order."""
        self.made: dict[tuple[int, int, tuple[int, ...]], None] = {}
        """Nodes, each with the number of its shape and what it reads; -1 for the leaves that rows name."""
        self.agreed: dict[tuple[int, Hashable], None] = {}
        self.equals: dict[tuple[int, Equals], None] = {}
        """Nodes with their loops that may be exchanged."""
        self.parts: dict[tuple[int, int, Maps], None] = {}
        """Nodes that were found to be parts of others, with these and their places."""
        self.deep = False
        """True where more was seen than is worth to compare."""

    def take(self, other: Seen | None) -> None:
        """Add what another computation, a part of this one, has seen and made."""
        self.deep = self.deep or other is None or other.deep or len(self.looked) > MOST_LOOKED
        if other is not None and not self.deep:
            self.looked.update(other.looked)
            self.made.update(other.made)
            self.agreed.update(other.agreed)
            self.equals.update(other.equals)
            self.parts.update(other.parts)


class Nodes:
    """The store of nodes. Equal ones have one number."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        """All nodes. What computes asks `node` for one."""
        self.looks: list[Look] = []
        """The look of each node."""
        self.equals: list[Equals] = []
        self._shapes: dict[Hashable, int] = {}
        self._known_shapes: list[Shape] = []
        self._index: dict[tuple[int, tuple[int, ...]], int] = {}
        self._leaves: dict[Hashable, int] = {}
        self._wholes: dict[int, tuple[int, Maps]] = {}
        self.form = Form()
        self.naming = False
        """True while the model is read: its long sums get names, by which they are known from there on. A sum of one
        and others then has few terms. What is equal gets the name too, if all its terms are there together."""
        self.seen: Seen | None = None
        """The nodes that a computation sees and makes now, if that is recorded."""
        self.one = self.add(self._shape("one", (), (), (), ()), ())
        self.delta = self.add(self._shape("delta", (), (0, 0), (), ()), ())
        """The identity matrix: 1 where its two indices are equal, of any size."""
        self.facts: dict[int, Hashable] = {}

    def _shape(
        self, op: str, args: Hashable, sizes: tuple[int, ...], inner: tuple[int, ...], indices: Sequence[Index]
    ) -> int:
        """Return the number of a shape: all of a node but which nodes it reads."""
        shape = op, args, sizes, inner, tuple(indices)
        at = self._shapes.setdefault(shape, len(self._shapes))
        if at == len(self._known_shapes):
            self._known_shapes.append(shape)
        return at

    def add(self, shape: int, operands: tuple[int, ...]) -> int:
        """Return the node of a shape that reads some nodes, or the name of the sum that this is."""
        at = self._index.get((shape, operands))
        if at is None:
            op, args, sizes, inner, indices = self._known_shapes[shape]
            at = len(self.nodes)
            reads = tuple(Read(c, node, maps) for node, (c, maps) in zip(operands, indices, strict=True))
            self.nodes.append(Node(op, args, sizes, inner, reads))
            pieces = [self.looks[operand][2] for operand in operands]
            piece = op == "delta" or (any(pieces) if op == "product" else all(pieces) if op == "sum" else False)
            self.looks.append((shape, self._compared(op, len(sizes), reads), piece))
            self.equals.append(((0, 1),) if op == "delta" else self._exchanged(op, sizes, reads))
            if self.naming and op == "sum" and len(operands) >= MOST_TERMS and not piece:
                at = self._leaf("named sum", sizes, at)
            self._index[shape, operands] = at
        if self.seen is not None:
            self.seen.made[at, shape, operands] = None
        return at

    def commutes(self, shape: int) -> bool:
        """Return whether the operands of a shape stand in the order of their numbers."""
        return self._known_shapes[shape][0] in _COMMUTING

    def leaf(self, name: str, sizes: Sequence[int], args: Hashable = ()) -> int:
        """Return the node of a tensor that is read from outside, with a loop for each of its dims."""
        at = self._leaf(name, tuple(sizes), args)
        if self.seen is not None:
            self.seen.made[at, -1, ()] = None
        return at

    def _leaf(self, name: str, sizes: tuple[int, ...], args: Hashable) -> int:
        at = self._leaves.setdefault((name, sizes, args), len(self.nodes))
        if at == len(self.nodes):
            self.nodes.append(Node(name, args, sizes, (), ()))
            self.looks.append((self._shape("leaf", (), sizes, (), ()), frozenset(), False))
            self.equals.append(())
        return at

    def node(self, at: int) -> Node:
        """Return a node, of which all is seen but the name of a leaf."""
        if self.seen is not None:
            self.seen.looked[at] = None
        return self.nodes[at]

    def look(self, at: int) -> Look:
        """Return the look of a node."""
        if self.seen is not None:
            self.seen.looked[at] = None
        return self.looks[at]

    def straight(self, read: Read) -> Read:
        """Return a read in which loops that may be exchanged are read in order: ``a[j] * a[i]`` is ``a[i] * a[j]``."""
        groups = self.equals[read.node]
        if self.seen is not None and len(read.maps) > 1:
            self.seen.equals[read.node, groups] = None
        return read._replace(maps=in_order(read.maps, groups, str)) if groups else read

    def whole(self, at: int) -> tuple[int, Maps] | None:
        """Return the node of which a node is a part, and where, by the loops of the part, if that is known."""
        known = self._wholes.get(at)
        if known is not None and self.seen is not None:
            self.seen.deep = True
        return known

    def keep_whole(self, part: int, whole: int, maps: Maps) -> None:
        """Remember of which node a node is a part."""
        if self.seen is not None:
            self.seen.parts[part, whole, maps] = None
        self._wholes.setdefault(part, (whole, maps))

    def agree(self, at: int, fact: Hashable) -> bool:
        """Return whether a fact is what was first said of a node."""
        if self.seen is not None:
            self.seen.agreed[at, fact] = None
        return self.facts.setdefault(at, fact) == fact

    def _compared(self, op: str, loops: int, reads: Sequence[Read]) -> frozenset[int]:
        """Return the loops of a node that its identity matrices compare."""
        if op not in ("sum", "product"):
            return frozenset()
        indices: list[Affine] = []
        for read in reads:
            indices += read.maps if read.node == self.delta else [read.maps[at] for at in self.looks[read.node][1]]
        return frozenset(letter for _, terms in indices for letter, _ in terms if letter in range(loops))

    def _exchanged(self, op: str, sizes: tuple[int, ...], reads: Sequence[Read]) -> Equals:
        """Return the groups of loops of which each two may be exchanged, as what the node reads is the same then."""
        used = [{letter for _, terms in read.maps for letter, _ in terms} for read in reads]
        loops = {at for letters in used for at in letters if at < len(sizes)}
        groups: list[list[int]] = []
        for loop in sorted(loops):
            for group in groups:
                if sizes[group[0]] == sizes[loop] and self._alike(op, reads, group[0], loop):
                    group.append(loop)
                    break
            else:
                groups.append([loop])
        return tuple([tuple(group) for group in groups if len(group) > 1])

    def _alike(self, op: str, reads: Sequence[Read], one: int, other: int) -> bool:
        there = Instead({one: (0, ((other, 1),)), other: (0, ((one, 1),))})
        before, after = (
            [r._replace(maps=in_order(maps, self.equals[r.node], str)) for r, maps in zip(reads, each, strict=True)]
            for each in ([r.maps for r in reads], [substitute(r.maps, there) for r in reads])
        )
        return Counter(before) == Counter(after) if op in _COMMUTING else before == after
