"""Tensors with and without the padding of their dims: whole, and a rank's piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

from ..layout.mesh import Mesh
from ..layout.pieces import dim_index
from ..layout.placement import TensorType
from .pads import Pad


def grow(tensor: torch.Tensor, pads: Iterable[Pad]) -> torch.Tensor:
    """Return a whole tensor of the model in its padded shape, with zeros in the padding."""
    for pad in pads:
        parts = tensor.unflatten(pad.dim, (pad.outer, pad.real))
        missing = list(parts.shape)
        missing[pad.dim + 1] = pad.padded - pad.real
        tensor = torch.cat([parts, parts.new_zeros(missing)], pad.dim + 1).flatten(pad.dim, pad.dim + 1)
    return tensor


def shrink(tensor: torch.Tensor, pads: Iterable[Pad]) -> torch.Tensor:
    """Return a whole padded tensor in the model's shape."""
    for pad in pads:
        parts = tensor.unflatten(pad.dim, (pad.outer, pad.padded))
        tensor = parts.narrow(pad.dim + 1, 0, pad.real).flatten(pad.dim, pad.dim + 1)
    return tensor


def real_entries(
    type_: TensorType, dim: int, pads: Iterable[Pad], mesh: Mesh, coordinates: Mapping[str, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask of a rank's entries along ``dim`` that are no padding, and their places in the model's dim."""
    index = dim_index(type_.shape[dim], dim, type_.placement, mesh, coordinates, None)
    for pad in pads:
        if pad.dim == dim:
            within = index % pad.padded
            kept = within < pad.real
            return kept, (index // pad.padded * pad.real + within)[kept]
    return torch.ones_like(index, dtype=torch.bool), index


def spread(entries: torch.Tensor, kept: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a rank's piece from its entries that are no padding, with zeros elsewhere. ``kept`` has the mask of these
    entries for each dim."""
    if all(bool(mask.all()) for mask in kept):
        return entries
    piece = entries.new_zeros([len(mask) for mask in kept])
    piece[torch.meshgrid(*(mask.nonzero()[:, 0] for mask in kept), indexing="ij")] = entries
    return piece


# ---- runs of entries of the model's tensor in a rank's piece


EntryRanges = tuple[tuple[int, int], ...]
"""Rising ranges of the entries of a dim, each with its first entry and the one after its last; none touches the
next."""


class EntryRun(NamedTuple):
    """``size`` consecutive entries of a dim, from entry ``first`` of the model's tensor and entry ``at`` of a piece."""

    at: int
    first: int
    size: int


def runs_of(
    type_: TensorType, pads: Sequence[Pad], mesh: Mesh, coordinates: Mapping[str, int]
) -> tuple[tuple[EntryRun, ...], ...]:
    """Return the runs of each dim of a rank's piece; padding is in none of them."""
    splits = [[axis for _, axis in type_.placement.splits(dim)] for dim in range(len(type_.shape))]
    places = [tuple((axis, coordinates[axis]) for axis in axes) for axes in splits]
    return tuple(_runs_of(type_, tuple(pads), mesh, place, dim) for dim, place in enumerate(places))


@lru_cache(maxsize=1 << 12)
def _runs_of(
    type_: TensorType, pads: tuple[Pad, ...], mesh: Mesh, coordinates: tuple[tuple[str, int], ...], dim: int
) -> tuple[EntryRun, ...]:
    kept, entries = real_entries(type_, dim, pads, mesh, dict(coordinates))
    if not len(entries):
        return ()
    places = kept.nonzero()[:, 0]
    breaks = ((places.diff() != 1) | (entries.diff() != 1)).nonzero()[:, 0] + 1
    bounds = pairwise([0, *breaks.tolist(), len(entries)])
    return tuple(EntryRun(int(places[start]), int(entries[start]), end - start) for start, end in bounds)


def ranges_of(runs: Iterable[EntryRun]) -> EntryRanges:
    """Return the entries of the model's tensor in rising runs.

    >>> ranges_of([EntryRun(0, 0, 2), EntryRun(3, 2, 2), EntryRun(5, 8, 2)])
    ((0, 4), (8, 10))
    """
    ranges: list[tuple[int, int]] = []
    for _, first, size in runs:
        start = ranges.pop()[0] if ranges and ranges[-1][1] == first else first
        ranges.append((start, first + size))
    return tuple(ranges)


@lru_cache(maxsize=1 << 14)
def packed(ranges: EntryRanges) -> tuple[EntryRun, ...]:
    """Return the runs of a piece that has these entries one after the other.

    >>> packed(((0, 4), (8, 10)))
    (EntryRun(at=0, first=0, size=4), EntryRun(at=4, first=8, size=2))
    """
    runs: list[EntryRun] = []
    for first, last in ranges:
        runs.append(EntryRun(runs[-1].at + runs[-1].size if runs else 0, first, last - first))
    return tuple(runs)


def crossings(here: Sequence[EntryRun], there: Sequence[EntryRun]) -> list[tuple[int, int, int]]:
    """Return the entries that two pieces share: their places in the first and in the second, and their number.

    >>> crossings(packed(((0, 4), (8, 10))), packed(((2, 9),)))
    [(2, 0, 2), (4, 6, 1)]
    """
    shared, i, j = [], 0, 0
    while i < len(here) and j < len(there):
        mine, other = here[i], there[j]
        start = max(mine.first, other.first)
        end = min(mine.first + mine.size, other.first + other.size)
        if start < end:
            shared.append((mine.at + start - mine.first, other.at + start - other.first, end - start))
        i, j = (i + 1, j) if mine.first + mine.size <= other.first + other.size else (i, j + 1)
    return shared
