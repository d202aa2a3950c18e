"""The mesh: ranks arranged along named axes, outermost (slowest links) first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

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
    """The axes of views that have several ranks, with the axes of which they consist, in order."""
    seen: tuple[str, ...] = ()
    """The axes of a view by which texts name what lies in it."""

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
        mesh = cls(tuple((name, math.prod(found)) for name, found in sizes.items())).factor(sizes)
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
        """The axes that may act as one: the parts of factored axes, and of axes of views."""
        groups = (self.parts(name) for name, _ in (*self.factored, *self.views))
        return tuple(dict.fromkeys(group for group in groups if len(group) > 1))

    def owner(self, axis: str) -> str:
        """The declared axis that an axis belongs to."""
        return next((name for name, _ in self.factored if axis in self.parts(name)), axis)

    def joined(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return axes as texts name them: parts that are there in order by the name of the longest axis that they make,
        which is one of the view that is ``seen``, a factored one, or, for parts of this, one of any view."""
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
