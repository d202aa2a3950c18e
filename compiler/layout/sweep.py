"""Sweeps: a mesh of many sizes at once, so that facts of one program are computed for all of them; and arithmetic on a
number or on an array of numbers, one for each of the sizes.

A program says how its tensors lie by the names of axes. So a program that was made for two ranks along each axis is
also that of other numbers of ranks, as long as no pass chose otherwise because of the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .mesh import Mesh

Lanes = NDArray[np.float64]
"""Numbers, one for each of the sizes of a sweep."""
Amount: TypeAlias = Any
"""A number, or an array with one for each of the sizes of a sweep."""


def greatest(*numbers: Amount) -> Amount:
    """Return the largest number; of arrays that of each place.

    >>> greatest(1, 3, 2), greatest(2.0, np.array([1.0, 3.0])).tolist()
    (3, [2.0, 3.0])
    """
    if not any(isinstance(number, np.ndarray) for number in numbers):
        return max(numbers)
    result = numbers[0]
    for number in numbers[1:]:
        result = np.maximum(result, number)
    return result


def none(number: Amount) -> bool:
    """Return whether a number is 0, or all of an array are."""
    return not number.any() if isinstance(number, np.ndarray) else number == 0


def rounded_up(number: Amount) -> Amount:
    """Return the next whole number; of an array that of each place."""
    return np.ceil(number) if isinstance(number, np.ndarray) else math.ceil(number)


def each_shape(compute: Callable[[Sequence[tuple[int, ...]]], float], shapes: Sequence[Sequence[Any]]) -> Any:
    """Return what a function computes of some shapes whose dims may be arrays: an array, computed once for places that
    are alike."""
    dims = [dim for shape in shapes for dim in shape]
    if not any(isinstance(dim, np.ndarray) for dim in dims):
        return compute([tuple(shape) for shape in shapes])
    table, places = np.unique(np.stack(np.broadcast_arrays(*dims), axis=1), axis=0, return_inverse=True)
    ends = [0, *np.cumsum([len(shape) for shape in shapes]).tolist()]
    rows = ([tuple(map(int, row[begin:end])) for begin, end in pairwise(ends)] for row in table.tolist())
    return np.array([float(compute(row)) for row in rows])[places.reshape(-1)]


@dataclass(frozen=True, eq=False)
class SizeSweep(Mesh):
    """A mesh with many sizes: ``sizes`` has the ranks along each axis, one number for each of the places. Dims of a
    batch are the multiples of ``batch``, which is ``samples`` samples at each place. By axis, ``short`` notes the
    places in which a dim does not divide by the ranks, and ``uneven`` those in which a dim of the batch does not."""

    sizes: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1
    samples: Any = 1.0
    padded: bool = False
    """True where dims are padded to multiples of the ranks, so that a rank's part is rounded up."""
    storing: frozenset[str] = frozenset()
    """The axes over which parameters are stored in parts: these go along another dim where one does not divide."""
    short: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    uneven: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    _local: dict[Hashable, tuple[Any, ...]] = field(default_factory=dict)

    def __hash__(self) -> int:
        return id(self)

    def size(self, axis: str) -> Any:
        """Return the numbers of ranks along an axis."""
        if axis in self.sizes:
            return self.sizes[axis]
        size = self._sizes.get(axis)
        return math.prod(self.size(part) for part in self.parts(axis)) if size is None else size

    def local(self, type_: Hashable, shape: Sequence[int], axes: Callable[[int], Sequence[str]]) -> tuple[Any, ...]:
        """Return the sizes of a rank's part of a tensor, whose dims are split over some ``axes`` each; computed once
        for each type."""
        if type_ not in self._local:
            self._local[type_] = tuple(self._dim(size, axes(dim)) for dim, size in enumerate(shape))
        return self._local[type_]

    def one(self, at: int) -> SizeSweep:
        """Return one place of the sweep, as a sweep whose numbers are no arrays."""
        sizes = {axis: int(ranks[at]) for axis, ranks in self.sizes.items()}
        samples = int(np.asarray(self.samples).reshape(-1)[at if np.ndim(self.samples) else 0])
        return replace(self, sizes=sizes, samples=samples, short={}, uneven={}, _local={})

    def _dim(self, dim: int, axes: Sequence[str]) -> Any:
        size: Any = dim
        while self.batch > 1 and dim and dim % self.batch == 0:
            dim, size = dim // self.batch, size // self.batch * self.samples
        pieces = math.prod(self.size(axis) for axis in axes)
        if isinstance(size, int) and isinstance(pieces, int):
            return -(-size // pieces)
        of_batch = isinstance(size, np.ndarray)
        if not axes or not (of_batch or self.storing.isdisjoint(axes)):
            return size / pieces
        part = np.ceil(size / pieces - 1e-9)
        short = part > size / pieces + 1e-9
        for axis in axes:
            noted = self.uneven if of_batch else self.short
            if isinstance(short, np.ndarray) and short.any() and (of_batch or not self.padded):
                noted[axis] = noted.get(axis, np.zeros(short.shape, bool)) | short
        return part
