"""The mesh: ranks arranged along named axes, outermost (slowest links) first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, product
from operator import mul

Shape = tuple[int, ...]
"""The sizes of a tensor's dims."""
_NAME = r"[A-Za-z_]\w*"


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes; a rank's coordinate on the last axis varies fastest.

    Raises:
        ValueError: an axis is named twice, or has a size below 1.

    >>> mesh = Mesh.parse("dp=2, tp=3")
    >>> mesh.world, mesh.coordinates(4), mesh.groups(("dp",))
    (6, {'dp': 1, 'tp': 1}, [[0, 3], [1, 4], [2, 5]])

    An axis may be factored into sub-axes, which are axes like others: text says them together where all are meant.

    >>> mesh = Mesh.parse("dp=2, tp=2*2")
    >>> mesh.axes, mesh.joined(("dp", "tp_0", "tp_1")), str(mesh), str(mesh.declared)
    ((('dp', 2), ('tp_0', 2), ('tp_1', 2)), ('dp', 'tp'), 'dp=2, tp=2*2', 'dp=2, tp=4')

    Part of a model may see the same ranks along other axes, which consist of these.

    >>> mesh = Mesh.parse("dp=2*2, tp=2, edp=dp_0, ep=dp_1*tp")
    >>> mesh.names, mesh.parts("ep"), mesh.size("ep"), mesh.joined(("dp_0", "tp")), mesh.joined(("dp_1", "tp"))
    (('dp_0', 'dp_1', 'tp'), ('dp_1', 'tp'), 4, ('edp', 'tp'), ('ep',))
    """

    axes: tuple[tuple[str, int], ...] = ()
    factored: tuple[tuple[str, int], ...] = ()
    """The axes that are factored, with the number of their sub-axes."""
    views: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The axes of views that have several ranks, each with the axes of which it consists, in order."""
    seen: tuple[str, ...] = ()
    """The axes of the view that texts use to name axes."""

    def __post_init__(self) -> None:
        named = [*self.names, *(name for name, _ in (*self.factored, *self.views))]
        if len(set(named)) != len(named):
            raise ValueError(f"an axis is named twice: {tuple(named)}")
        if any(size < 1 for _, size in self.axes):
            raise ValueError(f"an axis has a size below 1: {self.axes}")
        if unknown := [name for name, parts in self.views if not parts or not {*parts} <= {*self.names}]:
            raise ValueError(f"an axis consists of others that are none: {unknown}")

    def __hash__(self) -> int:
        return hash(self.axes)

    @classmethod
    @lru_cache(maxsize=256)  # one object for all programs of a mesh: what is remembered of it is found at once
    def parse(cls, text: str) -> Mesh:
        """The mesh whose text this is.

        Raises:
            ValueError: the text is not ``name=size, ...``.
        """
        parts = [part.strip() for part in text.split(",")] if text.strip() else []
        matches = [re.fullmatch(rf"({_NAME})\s*=\s*([0-9]+(?:\*[0-9]+)*)", part) for part in parts]
        sizes = {match[1]: tuple(map(int, match[2].split("*"))) for match in matches if match}
        others = [re.fullmatch(rf"({_NAME})\s*=\s*({_NAME}(?:\*{_NAME})*)", part) for part in parts[len(sizes) :]]
        views = tuple((match[1], tuple(match[2].split("*"))) for match in others if match)
        if len(sizes) + len(views) != len(parts):
            raise ValueError(f"not a mesh: {text!r}")
        mesh = cls(tuple((name, math.prod(factors)) for name, factors in sizes.items())).factor(sizes)
        return replace(mesh, views=views)

    def factor(self, sizes: Mapping[str, Sequence[int]]) -> Mesh:
        """Return a mesh of the same ranks, with axes factored into sub-axes ``NAME_0``, ``NAME_1``, … of these sizes,
        major first."""
        axes: list[tuple[str, int]] = []
        for name, size in self.axes:
            parts = sizes.get(name, (size,))
            axes += [(f"{name}_{i}", part) for i, part in enumerate(parts)] if len(parts) > 1 else [(name, size)]
        return Mesh(tuple(axes), tuple((name, len(sizes[name])) for name in self.names if len(sizes.get(name, ())) > 1))

    def __str__(self) -> str:
        sizes = (
            f"{name}={'*'.join(str(self.size(part)) for part in self.parts(name))}" for name in self.declared.names
        )
        return ", ".join((*sizes, *(f"{name}={'*'.join(parts)}" for name, parts in self.views)))

    def __contains__(self, axis: object) -> bool:
        return axis in self.names

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The axes' names, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def declared(self) -> Mesh:
        """The mesh with no axis factored, and no views: as the plan declares it."""
        axes: dict[str, int] = {}
        for name, size in self.axes:
            axes[self.owner(name)] = axes.get(self.owner(name), 1) * size
        return Mesh(tuple(axes.items()))

    def parts(self, axis: str) -> tuple[str, ...]:
        """Return the sub-axes of a declared axis, or the axes of which a view's axis consists, major first; any other
        axis is its own only part."""
        return self._parts.get(axis, (axis,))

    @cached_property
    def _parts(self) -> Mapping[str, tuple[str, ...]]:
        factored = ((axis, tuple(f"{axis}_{i}" for i in range(number))) for axis, number in self.factored)
        return dict((*self.views, *factored))

    @property
    def together(self) -> tuple[tuple[str, ...], ...]:
        """The groups of axes that may act as one: the parts of factored axes, and of axes of views."""
        groups = (self.parts(name) for name, _ in (*self.factored, *self.views))
        return tuple(dict.fromkeys(group for group in groups if len(group) > 1))

    def owner(self, axis: str) -> str:
        """The declared axis that an axis belongs to."""
        return next((name for name, _ in self.factored if axis in self.parts(name)), axis)

    def joined(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Join consecutive sub-axes for display: ``dp_0, dp_1`` becomes ``dp``. The longest axis that they make counts,
        of the view that is ``seen``, of the factored ones, or of any view of sub-axes."""
        sub_axes = {part for axis, _ in self.factored for part in self.parts(axis)}
        views = (name for name, parts in self.views if not sub_axes.isdisjoint(parts))
        known = [(name, self.parts(name)) for name in (*self.seen, *(axis for axis, _ in self.factored), *views)]
        result, rest = list[str](), tuple(axes)
        while rest:
            fitting = (one for one in known if rest[: len(one[1])] == one[1])
            name, parts = max(fitting, key=lambda one: len(one[1]), default=(rest[0], rest[:1]))
            result.append(name)
            rest = rest[len(parts) :]
        return tuple(result)

    def spread(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The inverse of ``joined``."""
        return tuple(part for axis in axes for part in self.parts(axis))

    @property
    def world(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """The number of ranks along an axis, which may be factored, or one of a view.

        Raises:
            KeyError: the mesh has no such axis.
        """
        size = self._sizes.get(axis)
        return math.prod(self._sizes[part] for part in self.parts(axis)) if size is None else size

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        return dict(self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of a rank on each axis.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"no rank {rank} in a world of {self.world}")
        result: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, result[name] = divmod(rank, size)
        return {name: result[name] for name in self.names}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates, one for each axis.

        Raises:
            KeyError: an axis is missing.
            ValueError: a coordinate is not on its axis.
        """
        rank = 0
        for name, size in self.axes:
            if not 0 <= coordinates[name] < size:
                raise ValueError(f"no coordinate {coordinates[name]} on {name}={size}")
            rank = rank * size + coordinates[name]
        return rank

    def place(self, coordinates: Mapping[str, int], axes: Iterable[str]) -> int:
        """Return the place of coordinates among those of some axes, the first axis major."""
        place = 0
        for axis in axes:
            place = place * self.size(axis) + coordinates[axis]
        return place

    def groups(self, axes: Iterable[str]) -> list[list[int]]:
        """The ranks split into groups that differ only along ``axes``; within a group the axes vary in mesh order.

        Raises:
            KeyError: the mesh has no such axis.
        """
        inner = {axis: self.size(axis) for axis in axes}
        outer = [at for at, name in enumerate(self.names) if name not in inner]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(product(*(range(size) for _, size in self.axes))):
            groups.setdefault(tuple(place[at] for at in outer), []).append(rank)
        return list(groups.values())


# ---- views: the same ranks along other axes, for a part of a model.


class NoCommonParts(ValueError):
    """The error of sizes by which an axis cannot be factored, because none is a multiple of the other."""


@dataclass(frozen=True, slots=True)
class View:
    """Another factorisation of the ranks along axes that follow each other in a mesh: ``over`` dp and tp, ``axes`` edp
    of 2 and ep of 4."""

    over: tuple[str, ...]
    axes: tuple[tuple[str, int], ...]

    def cuts(self, mesh: Mesh) -> dict[str, list[int]]:
        """Return, for each axis of the mesh, the numbers of major parts at which axes of the view begin or end inside
        it.

        >>> View(("dp", "tp"), (("edp", 4), ("ep", 2))).cuts(Mesh.parse("dp=2, tp=4"))
        {'dp': [], 'tp': [2]}

        Raises:
            NoCommonParts: an axis of the view ends where it cuts one of the mesh unevenly.
        """
        ends = [*accumulate((mesh.size(axis) for axis in self.over), mul)]
        wanted = [*accumulate((size for _, size in self.axes), mul)]
        chain = sorted({*ends, *wanted})
        if any(more % less for less, more in pairwise(chain)):
            raise NoCommonParts(f"{self._text(self.axes)} and {self._text(mesh.axes)} cut each other's axes")
        starts = [1, *ends[:-1]]
        return {
            axis: [cut // start for cut in wanted if start < cut < end]
            for axis, start, end in zip(self.over, starts, ends, strict=True)
        }

    def fits(self, mesh: Mesh) -> bool:
        """Return whether the view's axes have the ranks of axes of the mesh, and cut these into equal parts."""
        if not {*self.over} <= {*mesh.names}:
            return False
        try:
            self.cuts(mesh)
        except NoCommonParts:
            return False
        return math.prod(map(mesh.size, self.over)) == math.prod(size for _, size in self.axes)

    def fitting(self, mesh: Mesh, others: Sequence[View]) -> Iterator[tuple[int, ...]]:
        """Yield the sizes of the view's axes, in order, with which it would fit the mesh beside other views."""
        names, ranks = [name for name, _ in self.axes], math.prod(mesh.size(axis) for axis in self.over)
        for sizes in _products(ranks, len(names)):
            try:
                view_cuts(mesh, (*others, replace(self, axes=tuple(zip(names, sizes, strict=True)))))
            except NoCommonParts:
                continue
            yield sizes

    def _text(self, axes: Iterable[tuple[str, int]]) -> str:
        named = {*self.over, *dict(self.axes)}
        return ", ".join(f"{name}={size}" for name, size in axes if name in named)


def _products(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a number as a product of so many."""
    if count == 1:
        yield (total,)
        return
    for first in (number for number in range(1, total + 1) if total % number == 0):
        yield from ((first, *rest) for rest in _products(total // first, count - 1))


def finer(sizes: Sequence[int], cuts: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes of sub-axes that are also cut at these numbers of major parts.

    >>> finer((2, 4), [4]), finer((8,), [2, 8])
    ((2, 2, 2), (2, 4))

    Raises:
        NoCommonParts: a cut is neither a divisor nor a multiple of where the sub-axes end.
    """
    ends = sorted({1, *accumulate(sizes, mul), *cuts})
    if any(more % less for less, more in pairwise(ends)):
        raise NoCommonParts(f"{' and '.join(map(str, ends[1:-1]))} parts cut each other")
    return tuple(more // less for less, more in pairwise(ends)) or (1,)


def view_cuts(mesh: Mesh, views: Iterable[View]) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the sub-axes of every axis that views of the mesh factor.

    Raises:
        NoCommonParts: the views cut an axis at places that do not fit each other.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    for view in views:
        for axis, cuts in view.cuts(mesh).items():
            if cuts:
                try:
                    sizes[axis] = finer(sizes.get(axis, (mesh.size(axis),)), cuts)
                except NoCommonParts as error:
                    raise NoCommonParts(f"{error}: views of `{axis}`") from None
    return sizes


def viewed(mesh: Mesh, views: Iterable[View], sizes: Mapping[str, Sequence[int]]) -> Mesh:
    """Return a mesh with axes factored into sub-axes of ``sizes``, as ``view_cuts`` returns them, and with the views'
    axes of several ranks."""
    factored = mesh.factor(sizes)
    axes: list[tuple[str, tuple[str, ...]]] = []
    for view in views:
        parts = [part for part in factored.spread(view.over) if factored.size(part) > 1]
        for name, size in view.axes:
            ends = [*accumulate(map(factored.size, parts), mul)]
            if size > 1:
                count = ends.index(size) + 1
                axes.append((name, tuple(parts[:count])))
                parts = parts[count:]
    return replace(factored, views=tuple(axes))


# ---- nodes: machines of equally many ranks, and the part of each axis that lies inside one.


class UnevenNodes(ValueError):
    """The error of nodes that do not fit a mesh: they do not divide its ranks, or cut an axis unevenly."""


def node_levels(mesh: Mesh, ranks: int) -> dict[str, tuple[int, int]]:
    """Return, for each axis, across how many nodes of so many ranks it lies, and how many of its ranks share a node. A
    mesh of fewer ranks lies in one node.

    >>> node_levels(Mesh.parse("dp=8, tp=2"), 4)
    {'dp': (4, 2), 'tp': (1, 2)}

    Raises:
        UnevenNodes: the nodes do not fit the mesh.
    """
    if mesh.world <= ranks:
        return {axis: (1, size) for axis, size in mesh.axes}
    if mesh.world % ranks:
        raise UnevenNodes(f"nodes of {ranks} ranks do not divide the {mesh.world} ranks of the mesh")
    levels: dict[str, tuple[int, int]] = {}
    room = ranks
    for axis, size in reversed(mesh.axes):
        within = min(size, room)
        if size % within or room % within:
            raise UnevenNodes(f"nodes of {ranks} ranks cut `{axis}={size}` unevenly")
        levels[axis] = size // within, within
        room //= within
    return {axis: levels[axis] for axis in mesh.names}
