"""Paths: the cheapest order of typed conversions from one placement of a value to another."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from ...compiler.layout.collectives import TypeFault
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import AxisType, Placement, Split, along, dual, local_shape
from ...compiler.layout.stretches import count

Changes = tuple[tuple[str, AxisType], ...]
"""One step of a path: axes with their new types, all from one old type to one new type."""

_MESSAGE = 1
"""The cost of a message beside its elements: of two paths that move as many elements, the one of fewer messages
wins."""


@lru_cache(maxsize=65536)
def cheapest_path(
    have: Placement, want: Placement, shape: tuple[int, ...], mesh: Mesh, flows: bool, lifts: bool = False
) -> tuple[Changes, ...]:
    """Return the cheapest steps from ``have`` to ``want``. Each axis goes straight to its type, or becomes whole in
    between where its split would not nest with another axis's. The cost is the number of elements that a rank sends;
    if a gradient ``flows``, with those of the dual path. If a parameter ``lifts`` its ``I → R`` out of the microbatch,
    its gradient is summed once a step: this step comes first, and is free.

    Raises:
        TypeFault: there is no path.
    """
    # of equal costs: cuts first, then exchanges, then sums, then gathers
    pending: list[tuple[float, int, int, Placement, tuple[Changes, ...]]] = [(0.0, 0, 0, have, ())]
    done: set[Placement] = set()
    counter = 0
    while pending:
        cost, rank, _, at, path = heapq.heappop(pending)
        if at == want:
            return path
        if at in done:
            continue
        done.add(at)
        for order, step in enumerate(_steps(at, want, mesh, lifts)):
            after = at.replace(dict(step))
            if after in done or not after.nests(shape, mesh):
                continue
            counter += 1
            free = lifts and (at[step[0][0]], step[0][1]) == ("I", "R")
            price = cost + (0 if free else _price(at, after, step, shape, mesh, flows))
            heapq.heappush(pending, (price, rank + order, counter, after, (*path, step)))
    raise TypeFault(f"there is no conversion from {have} to {want}")


def in_levels(path: Iterable[Changes], have: Placement, mesh: Mesh, levels: Mapping[str, int]) -> Iterator[Changes]:
    """Yield a path from ``have`` with every exchange over a whole axis of ``levels`` in two steps, inside nodes and
    across them. To experts, the major part of rows, the step inside comes first; on the way back, the one across: rows
    have the same placement between the steps of both."""
    for step in path:
        axes = tuple(axis for axis, _ in step)
        old, new = have[axes[0]], step[0][1]
        number = next((levels[axis] for axis in levels if mesh.parts(axis) == axes), 0)
        if number and isinstance(old, Split) and isinstance(new, Split):
            there = (new.dim, count(new.outer)) < (old.dim, count(old.outer))
            yield from (step[number:], step[:number]) if there else (step[:number], step[number:])
        else:
            yield step
        have = have.replace(dict(step))


def _steps(at: Placement, want: Placement, mesh: Mesh, lifts: bool) -> Iterator[Changes]:
    """Yield the steps that may come next, in the order in which they are tried."""
    open_ = [(axis, old, want[axis]) for axis, old in at.items() if old != want[axis]]
    marks = tuple((axis, new) for axis, old, new in open_ if (old, new) == ("I", "R"))
    if marks and lifts:
        yield marks

    def change(axes: Sequence[str], new: AxisType) -> Changes:
        return tuple(along(axes, new, mesh).items())

    units = [*_as_one(at, want, mesh), *(((axis,), old, new) for axis, old, new in open_)]
    inner_first = sorted(units, key=lambda entry: -count(entry[1].outer) if isinstance(entry[1], Split) else 0)
    outer_first = sorted(units, key=lambda entry: count(entry[2].outer) if isinstance(entry[2], Split) else 0)
    yield from (change(axes, new) for axes, old, new in outer_first if isinstance(new, Split) and old == "P")
    yield from (change(axes, new) for axes, old, new in outer_first if isinstance(new, Split) and old in ("I", "R"))
    yield from (
        change(axes, new) for axes, old, new in outer_first if isinstance(new, Split) and isinstance(old, Split)
    )
    sums = [axis for axis, old, new in open_ if old == "P"]
    whole = [axis for axis in sums if not isinstance(want[axis], Split)]
    for axes in dict.fromkeys((tuple(whole), tuple(sums))):
        if axes:  # a sum to R is a sum to I, then the mark that its gradient will be summed
            yield tuple((axis, "I") for axis in axes)
    for group, old, new in inner_first:
        if isinstance(old, Split):
            yield change(group, "I" if isinstance(new, Split) or new == "P" else new)
    if marks and not lifts:
        yield marks


def _as_one(at: Placement, want: Placement, mesh: Mesh) -> Iterator[tuple[tuple[str, ...], AxisType, AxisType]]:
    """Yield the sub-axes that act as one axis both before and after: they move in one message."""
    for axes in mesh.together:
        before, after = at.as_one(axes, mesh), want.as_one(axes, mesh)
        if before is not None and after is not None and before != after:
            yield axes, before, after


def _price(
    before: Placement, after: Placement, step: Changes, shape: tuple[int, ...], mesh: Mesh, flows: bool
) -> float:
    axes = tuple(axis for axis, _ in step)
    ranks = math.prod(mesh.size(axis) for axis in axes)
    small, large = sorted(math.prod(local_shape(shape, p, mesh)) for p in (before, after))
    source, result = before[axes[0]], after[axes[0]]
    price = _elements_sent(source, result, ranks, small, large)
    if flows:
        price += _elements_sent(dual(result), dual(source), ranks, small, large)
    return price


def _elements_sent(source: AxisType, result: AxisType, ranks: int, small: int, large: int) -> float:
    """Return the number of elements that a rank sends by the ring algorithms, where it holds ``small`` elements of the
    one placement and ``large`` of the other."""
    share = (ranks - 1) / ranks
    if source == "P":
        return _MESSAGE + share * large * (1 if isinstance(result, Split) else 2)
    if isinstance(source, Split):
        if isinstance(result, Split):
            return _MESSAGE + share * small
        return 0 if result == "P" else _MESSAGE + share * large
    return 0
