"""Layouts of tensors in the files of a checkpoint: the rectangles that each is cut into, and the file of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...compiler.layout.mesh import Mesh, Shape
from ...compiler.layout.placement import TensorType
from ...compiler.padding.pads import Pad, real_shape
from ...compiler.padding.tensors import EntryRanges, ranges_of, runs_of
from ..owners import piece_place


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the state: how the plan stores it, and the names of the roles that own it."""

    type: TensorType
    pads: tuple[Pad, ...]
    owners: tuple[str, ...]

    @property
    def shape(self) -> Shape:
        """Its shape in the model."""
        return real_shape(self.type.shape, self.pads)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The cut of a tensor into rectangles, each of which is in one file. ``parts`` are the parts of each dim, each of
    them ranges of the model's entries: a part of a fused dim has several. ``files`` are the numbers of the files of the
    rectangles, row by row: of a rank that writes, or of a place in a list of files.

    Of a tensor of [6, 4] whose rows ``(3 2/tp)`` are split, the parts are ``((((0, 1), (2, 3), (4, 5)), ((1, 2), (3,
    4), (5, 6))), (((0, 4),),))``, and the files ``(0, 1)``.
    """

    shape: Shape
    parts: tuple[tuple[EntryRanges, ...], ...]
    files: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int], file: int = 0) -> FileLayout:
        """The layout of a tensor that is in one file."""
        if 0 in shape:
            return cls(tuple(shape), ((),) * len(shape), ())
        return cls(tuple(shape), tuple((((0, size),),) for size in shape), (file,))

    def rectangles(self) -> Iterator[tuple[tuple[EntryRanges, ...], int]]:
        """Pairs of a rectangle, as the ranges of each dim, and its file."""
        return zip(itertools.product(*self.parts), self.files, strict=True)

    def faults(self) -> Iterator[str]:
        """Yield why the rectangles do not make up the tensor, each of its entries once."""
        if len(self.parts) != len(self.shape):
            yield f"has {len(self.shape)} dims, and the parts of {len(self.parts)}"
            return
        for dim, (size, parts) in enumerate(zip(self.shape, self.parts, strict=True)):
            if 0 in self.shape and not parts:
                continue
            done = 0
            for first, last in sorted(itertools.chain(*parts)):
                if first < done:
                    yield f"has entry {first} of dim {dim} in two parts"
                elif first > done:
                    yield f"lacks entries {done} to {first - 1} of dim {dim}"
                done = max(done, last)
            if done < size:
                yield f"lacks entries {done} to {size - 1} of dim {dim}"
            elif done > size:
                yield f"has entry {done - 1} in dim {dim}, which has {size}"
            if not all(_rises(part) for part in parts):
                yield f"has a part of dim {dim} whose ranges do not rise"
        if len(self.files) != math.prod(len(parts) for parts in self.parts):
            yield f"is cut into {math.prod(len(parts) for parts in self.parts)} parts, in {len(self.files)} files"
        if len(set(self.files)) < len(self.files):
            yield "has two parts in one file"


def _rises(ranges: EntryRanges) -> bool:
    ends = [end for range_ in ranges for end in range_]
    return bool(ends) and all(low < high for low, high in itertools.pairwise(ends))


def extent(rectangle: Sequence[EntryRanges]) -> Shape:
    """Return the shape of a rectangle."""
    return tuple(sum(last - first for first, last in ranges) for ranges in rectangle)


def rectangle_text(rectangle: Sequence[EntryRanges]) -> str:
    """Return a rectangle as text.

    >>> rectangle_text([((0, 4), (8, 10)), ((0, 3),)])
    '[0:4 + 8:10, 0:3]'
    """
    return f"[{', '.join(' + '.join(f'{first}:{last}' for first, last in ranges) for ranges in rectangle)}]"


def layouts_of(tensors: Mapping[str, StoredTensor], mesh: Mesh, roles: Sequence[str]) -> dict[str, FileLayout]:
    """Return the layout of each tensor. Its files are the ranks that write them; ``roles`` names the role of each rank.

    Of ranks that hold the same numbers, the one that has written least so far writes; of several such, the lowest.
    """
    layouts: dict[str, FileLayout] = {}
    found: dict[StoredTensor, tuple[tuple[tuple[EntryRanges, ...], ...], list[list[int]]]] = {}
    written: dict[tuple[object, ...], list[int]] = {}
    for name, stored in tensors.items():
        if stored not in found:
            found[stored] = _rectangles(stored, mesh, roles)
        parts, holders = found[stored]
        equal = min(map(len, holders), default=1)
        sums = written.setdefault((stored.type.placement, stored.owners), [0] * equal)
        least = min(range(equal), key=sums.__getitem__)
        sums[least] += math.prod(stored.type.shape)
        layouts[name] = FileLayout(stored.shape, parts, tuple(ranks[least] for ranks in holders))
    return layouts


def _rectangles(
    stored: StoredTensor, mesh: Mesh, roles: Sequence[str]
) -> tuple[tuple[tuple[EntryRanges, ...], ...], list[list[int]]]:
    """Return the parts of each dim, and the ranks that hold each rectangle; what is padding alone is none."""
    by_rank: dict[int, tuple[EntryRanges, ...]] = {}
    by_place: dict[tuple[int, ...], tuple[EntryRanges, ...]] = {}
    for rank, role in enumerate(roles):
        if role in stored.owners:
            place = piece_place(rank, stored.type.placement, mesh)
            if place not in by_place:
                runs = runs_of(stored.type, stored.pads, mesh, mesh.coordinates(rank))
                by_place[place] = tuple(map(ranges_of, runs))
            by_rank[rank] = by_place[place]
    kept = {rectangle for rectangle in by_place.values() if all(rectangle)}
    parts = tuple(tuple(sorted({rectangle[dim] for rectangle in kept})) for dim in range(len(stored.type.shape)))
    order = {rectangle: number for number, rectangle in enumerate(itertools.product(*parts))} if kept else {}
    holders: list[list[int]] = [[] for _ in order]
    for rank, rectangle in by_rank.items():
        if rectangle in order:
            holders[order[rectangle]].append(rank)
    return parts, holders
