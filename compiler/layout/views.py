"""Views: the same ranks along other axes, for a part of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import mul

from .mesh import Mesh


class NoCommonParts(ValueError):
    """The error of sizes by which an axis is to be factored, of which none is a multiple of the other."""


@dataclass(frozen=True, slots=True)
class View:
    """Another factorisation of the ranks along axes that follow each other in a mesh: ``over`` dp and tp, ``axes`` edp
    of 2 and ep of 4."""

    over: tuple[str, ...]
    axes: tuple[tuple[str, int], ...]

    def cuts(self, mesh: Mesh) -> dict[str, list[int]]:
        """Return the numbers of parts, for each axis of the mesh, at which the view's axes begin and end inside it.

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
        """Return whether the view's axes are the ranks of axes of the mesh, and cut these into equal parts."""
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
    """Return sub-axes of sizes that are cut into parts too, so many from the major side.

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
        NoCommonParts: there are none.
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
    """Return a mesh with axes factored into sub-axes of ``sizes``, which views cut nowhere inside, and with their axes
    of several ranks."""
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
