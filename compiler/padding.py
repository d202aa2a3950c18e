"""Padding: a parameter's dim that axes do not divide is longer in programs than in the model, by zeros."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .mesh import Mesh
from .placement import TensorType, dim_index

Pads = Mapping[str, tuple["Pad", ...]]
"""Paddings of values by name; at most one a dim."""


@dataclass(frozen=True, slots=True, order=True)
class Pad:
    """A dim of ``outer * real`` entries made one of ``outer * padded``: see it as ``(outer, padded)``; the first
    ``real`` entries of the second part are the model's, the others padding."""

    dim: int
    outer: int
    real: int
    padded: int


def pads_by_value(found: Iterable[tuple[tuple[str, int], Pad]]) -> dict[str, tuple[Pad, ...]]:
    """Paddings by value and dim as those of each value."""
    result: dict[str, tuple[Pad, ...]] = {}
    for (name, _), pad in sorted(found):
        result[name] = (*result.get(name, ()), pad)
    return result


def padded_shape(shape: Sequence[int], pads: Iterable[Pad]) -> tuple[int, ...]:
    """The shape in programs of a tensor that has ``shape`` in the model."""
    sizes = {pad.dim: pad.outer * pad.padded for pad in pads}
    return tuple(sizes.get(dim, size) for dim, size in enumerate(shape))


def real_shape(shape: Sequence[int], pads: Iterable[Pad]) -> tuple[int, ...]:
    """The shape in the model of a tensor that has ``shape`` in programs."""
    sizes = {pad.dim: pad.outer * pad.real for pad in pads}
    return tuple(sizes.get(dim, size) for dim, size in enumerate(shape))


def pads_from(facts: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, tuple[Pad, ...]]:
    """Paddings as a manifest has them: lists of dim, outer, real and padded by name."""
    return {name: tuple(Pad(*(int(number) for number in row)) for row in rows) for name, rows in facts.items()}


def facts_of(pads: Pads) -> dict[str, list[list[int]]]:
    """The inverse of ``pads_from``."""
    return {name: [[pad.dim, pad.outer, pad.real, pad.padded] for pad in rows] for name, rows in sorted(pads.items())}


def grow(tensor: torch.Tensor, pads: Iterable[Pad]) -> torch.Tensor:
    """A whole tensor of the model as programs have it, zeros in its padding."""
    for pad in pads:
        parts = tensor.unflatten(pad.dim, (pad.outer, pad.real))
        missing = list(parts.shape)
        missing[pad.dim + 1] = pad.padded - pad.real
        tensor = torch.cat([parts, parts.new_zeros(missing)], pad.dim + 1).flatten(pad.dim, pad.dim + 1)
    return tensor


def shrink(tensor: torch.Tensor, pads: Iterable[Pad]) -> torch.Tensor:
    """A whole tensor of the programs as the model has it, its padding left out."""
    for pad in pads:
        parts = tensor.unflatten(pad.dim, (pad.outer, pad.padded))
        tensor = parts.narrow(pad.dim + 1, 0, pad.real).flatten(pad.dim, pad.dim + 1)
    return tensor


def real_entries(
    type_: TensorType, dim: int, pads: Iterable[Pad], mesh: Mesh, coordinates: Mapping[str, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of a rank's entries along ``dim`` are the model's, and the places of those in the model's dim."""
    index = dim_index(type_.shape[dim], dim, type_.placement, mesh, coordinates, None)
    for pad in pads:
        if pad.dim == dim:
            within = index % pad.padded
            kept = within < pad.real
            return kept, (index // pad.padded * pad.real + within)[kept]
    return torch.ones_like(index, dtype=torch.bool), index


def spread(entries: torch.Tensor, kept: Sequence[torch.Tensor]) -> torch.Tensor:
    """A rank's piece from those of its entries that are the model's; zeros elsewhere. ``kept`` as of each dim."""
    if all(bool(which.all()) for which in kept):
        return entries
    piece = entries.new_zeros([len(which) for which in kept])
    piece[torch.meshgrid(*(which.nonzero()[:, 0] for which in kept), indexing="ij")] = entries
    return piece
