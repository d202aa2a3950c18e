"""Tensors with and without the padding of their dims: whole, and a rank's piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ..layout.mesh import Mesh
from ..layout.pieces import dim_index
from ..layout.placement import TensorType
from .pads import Pad


def grow(tensor: torch.Tensor, pads: Iterable[Pad]) -> torch.Tensor:
    """Return a whole tensor of the model in the shape that programs have, with zeros in its padding."""
    for pad in pads:
        parts = tensor.unflatten(pad.dim, (pad.outer, pad.real))
        missing = list(parts.shape)
        missing[pad.dim + 1] = pad.padded - pad.real
        tensor = torch.cat([parts, parts.new_zeros(missing)], pad.dim + 1).flatten(pad.dim, pad.dim + 1)
    return tensor


def shrink(tensor: torch.Tensor, pads: Iterable[Pad]) -> torch.Tensor:
    """Return a whole tensor of the programs in the model's shape, without its padding."""
    for pad in pads:
        parts = tensor.unflatten(pad.dim, (pad.outer, pad.padded))
        tensor = parts.narrow(pad.dim + 1, 0, pad.real).flatten(pad.dim, pad.dim + 1)
    return tensor


def real_entries(
    type_: TensorType, dim: int, pads: Iterable[Pad], mesh: Mesh, coordinates: Mapping[str, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries of a rank along ``dim`` that are the model's, and their places in the model's dim."""
    index = dim_index(type_.shape[dim], dim, type_.placement, mesh, coordinates, None)
    for pad in pads:
        if pad.dim == dim:
            within = index % pad.padded
            kept = within < pad.real
            return kept, (index // pad.padded * pad.real + within)[kept]
    return torch.ones_like(index, dtype=torch.bool), index


def spread(entries: torch.Tensor, kept: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a rank's piece from its entries that are the model's, with zeros elsewhere. ``kept`` says for each dim
    which entries these are."""
    if all(bool(which.all()) for which in kept):
        return entries
    piece = entries.new_zeros([len(which) for which in kept])
    piece[torch.meshgrid(*(which.nonzero()[:, 0] for which in kept), indexing="ij")] = entries
    return piece
