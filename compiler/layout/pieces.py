"""Pieces of tensors: the part of one rank along a dim or in a placement, the positions of its entries, and all parts
together again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from .buffers import parts_in_order
from .int8 import round_int8
from .mesh import Mesh
from .placement import AxisType, Placement, Split, parts
from .stretches import Atom, Outer, atoms, count, is_zigzag, sizes_of, terms


def _chosen(parts: torch.Tensor, dim: int, numbers: Sequence[int]) -> torch.Tensor:
    """Return some parts of a dim, one after the other."""
    chosen: torch.Tensor = parts.index_select(dim, torch.tensor(numbers, device=parts.device))
    return chosen.flatten(dim, dim + 1)


def slice_dim(x: torch.Tensor, ranks: int, index: int, dim: int, outer: Outer) -> torch.Tensor:
    """Return part ``index`` of ``ranks`` along ``dim``, seen as ``(outer, ranks, rest)``. Where parts are unequal, each
    is cut so."""
    size = x.shape[dim]
    if is_zigzag(outer):
        parts, deal = count(outer), Atom(ranks, "", mirrored=True)
        numbers = [part * ranks + deal.entry(part, index) for part in range(parts)]
        return _chosen(x.unflatten(dim, (parts * ranks, -1)), dim, numbers)
    if not isinstance(outer, int):
        parts = x.split(sizes_of(outer, size), dim)
        return torch.cat([slice_dim(part, ranks, index, dim, 1) for part in parts], dim)
    view: torch.Tensor = x.unflatten(dim, (outer, ranks, size // outer // ranks)).select(dim + 1, index)
    return view.flatten(dim, dim + 1).contiguous()


def join_dim(pieces: Sequence[torch.Tensor], dim: int, outer: Outer) -> torch.Tensor:
    """The inverse of ``slice_dim`` over all parts."""
    if not isinstance(outer, int):
        parts = zip(*(piece.split(sizes_of(outer, piece.shape[dim]), dim) for piece in pieces), strict=True)
        return torch.cat([part for ranks in parts for part in ranks], dim)
    if outer == 1:
        return torch.cat(list(pieces), dim)
    if is_zigzag(outer):
        ranks, many = len(pieces), count(outer)
        whole, deal = join_dim(pieces, dim, many).unflatten(dim, (many * ranks, -1)), Atom(ranks, "", mirrored=True)
        numbers = [part * ranks + deal.entry(part, index) for part in range(many) for index in range(ranks)]
        return _chosen(whole, dim, numbers)
    views = [piece.unflatten(dim, (outer, 1, piece.shape[dim] // outer)) for piece in pieces]
    return torch.cat(views, dim + 1).flatten(dim, dim + 2)


def round_parts(x: torch.Tensor, ranks: int, dim: int, outer: Outer) -> torch.Tensor:
    """Return a value whose parts along a dim are each rounded to int8."""
    if parts_in_order(dim, outer):
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        for part, place in zip(x.chunk(ranks), result.chunk(ranks), strict=True):
            round_int8(part, place)
        return result
    return join_dim([round_int8(slice_dim(x, ranks, index, dim, outer)) for index in range(ranks)], dim, outer)


def take(tensor: torch.Tensor, placement: Placement, mesh: Mesh, coordinates: Mapping[str, int]) -> torch.Tensor:
    """The piece of a whole tensor that the rank at ``coordinates`` holds (a copy)."""
    for dim in range(tensor.dim()):
        if splits := placement.splits(dim):
            stretches = terms(tensor.shape[dim], splits)
            pieces = tensor.split([size for size, _ in stretches], dim)
            taken = [
                _take(piece, dim, equal, mesh, coordinates) for piece, (_, equal) in zip(pieces, stretches, strict=True)
            ]
            tensor = taken[0] if len(taken) == 1 else torch.cat(taken, dim)
    return tensor.clone(memory_format=torch.contiguous_format)


def _take(
    tensor: torch.Tensor, dim: int, splits: Sequence[tuple[int, str]], mesh: Mesh, coordinates: Mapping[str, int]
) -> torch.Tensor:
    """A rank's part of a dim that is split into equal parts."""
    stretches = atoms(tensor.shape[dim], splits, mesh.size)
    if any(atom.mirrored for atom in stretches):
        types: dict[str, AxisType] = {axis: Split(dim, outer) for outer, axis in splits}
        index = dim_index(tensor.shape[dim], dim, Placement.of(mesh, types), mesh, coordinates, tensor.device)
        return tensor.index_select(dim, index)
    tensor = tensor.unflatten(dim, [atom.size for atom in stretches])
    for offset, atom in reversed(list(enumerate(stretches))):
        if atom.axis is not None:
            tensor = tensor.select(dim + offset, coordinates[atom.axis])
    kept = sum(atom.axis is None for atom in stretches)
    return tensor.flatten(dim, dim + kept - 1) if kept else tensor.unsqueeze(dim)


def put_together(pieces: Sequence[torch.Tensor], placement: Placement, mesh: Mesh) -> torch.Tensor:
    """The whole tensor from every rank's piece (in rank order); partials are summed, replicas taken from rank 0 of
    their axis."""
    skipped = [a for a, kind in placement.items() if not isinstance(kind, Split) and kind != "P"]
    places = ((mesh.coordinates(rank), piece) for rank, piece in enumerate(pieces))
    kept = [(coordinates, piece) for coordinates, piece in places if not any(coordinates[axis] for axis in skipped)]
    if len(kept) == 1:
        return pieces[0].clone(memory_format=torch.contiguous_format)
    whole = pieces[0].new_zeros([size * parts(placement, mesh, dim) for dim, size in enumerate(pieces[0].shape)])
    index = torch.arange(whole.numel()).reshape(whole.shape)
    flat = whole.view(-1)
    for coordinates, piece in kept:
        flat[take(index, placement, mesh, coordinates).reshape(-1)] += piece.reshape(-1)
    return whole


def dim_index(
    size: int, dim: int, placement: Placement, mesh: Mesh, coordinates: Mapping[str, int], device: torch.device | None
) -> torch.Tensor:
    """Return the global coordinates (int64, one per local entry) of a rank's entries along ``dim``, which has ``size``
    entries globally."""
    indices, start = [], 0
    for stretch, splits in terms(size, placement.splits(dim)):
        index = torch.zeros(1, dtype=torch.int64, device=device)
        for atom in atoms(stretch, splits, mesh.size):
            if atom.axis is None:
                steps = torch.arange(atom.size, dtype=torch.int64, device=device)
                index = (index[:, None] * atom.size + steps).reshape(-1)
            else:
                index = index * atom.size + atom.entry(index, coordinates[atom.axis])
        indices.append(index + start)
        start += stretch
    return indices[0] if len(indices) == 1 else torch.cat(indices)


Interval = tuple[int, int]
"""Consecutive entries: the first, and how many."""


def dim_runs(size: int, dim: int, placement: Placement, mesh: Mesh, coordinates: Mapping[str, int]) -> list[Interval]:
    """Return what ``dim_index`` does, as runs of consecutive entries in order."""
    result: list[Interval] = []
    start = 0
    for stretch, splits in terms(size, placement.splits(dim)):
        runs = [(0, 1)]
        for atom in atoms(stretch, splits, mesh.size):
            if atom.axis is None:
                runs = [(first * atom.size, many * atom.size) for first, many in runs]
            else:
                at = coordinates[atom.axis]
                entries = (entry for first, many in runs for entry in range(first, first + many))
                runs = [(entry * atom.size + atom.entry(entry, at), 1) for entry in entries]
        for first, many in runs:
            if result and sum(result[-1]) == first + start:
                first, many = result[-1][0] - start, result.pop()[1] + many
            result.append((first + start, many))
        start += stretch
    return result


def row_major(shape: Sequence[int], places: Iterable[torch.Tensor], device: torch.device | None) -> torch.Tensor:
    """Return the numbers, in a tensor of ``shape``, of the entries with these coordinates along each dim."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, place in zip(shape, places, strict=True):
        index = index[..., None] * size + place
    return index
