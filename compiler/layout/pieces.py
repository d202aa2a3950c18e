"""Pieces of tensors: one rank's part along a dim or in a placement, its rounding to int8, the global positions of its
entries, and the whole tensor from all pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from .mesh import Mesh
from .placement import AxisType, Placement, Split, parts
from .stretches import Atom, Outer, atoms, count, is_zigzag, sizes_of, terms

# ---- rounding to int8 with a scale for each block
# Scales are powers of two, so rounding is idempotent: a message holds the very values whose error the sender keeps as
# its residual.


BLOCK_ENTRIES = 256
"""The entries of a part, in row-major order, that share a scale."""
_SLAB_ENTRIES, _SLAB_ENTRIES_OF_CPU = 1 << 22, 1 << 14
"""The entries of a slab: a large tensor is rounded slab by slab, which needs small temporaries only."""
_LARGEST = 127
_LEAST_POWER = -126
"""Smaller scales are no normal numbers of float32."""


def packed_bytes(entries: int, parts: int = 1) -> int:
    """Return the bytes of a tensor's packed parts, of equally many entries each."""
    each = entries // max(parts, 1)
    return parts * (each + math.ceil(each / BLOCK_ENTRIES))


def pack(x: torch.Tensor, place: torch.Tensor | None = None) -> torch.Tensor:
    """Return the entries of a tensor as int8, row-major, and behind them the exponent of each block's scale, which is
    127 for a block with an entry that is not finite. They are written to a ``place`` of int8, if there is one."""
    flat = x.reshape(-1)
    packed = flat.new_empty(packed_bytes(len(flat)), dtype=torch.int8) if place is None else place
    numbers, exponents = packed[: len(flat)], packed[len(flat) :]
    for begin, slab in _slabs(flat):
        rest = len(slab) % BLOCK_ENTRIES
        blocks = torch.nn.functional.pad(slab, (0, BLOCK_ENTRIES - rest)) if rest else slab
        blocks = blocks.float().view(-1, BLOCK_ENTRIES)
        largest = blocks.abs().amax(1)
        fraction, power = torch.frexp(largest / _LARGEST)
        power = (power - (fraction == 0.5).int()).clamp(min=_LEAST_POWER)
        finite = largest.isfinite()
        power = torch.where(finite, power, torch.zeros_like(power))
        rounded = torch.ldexp(blocks, -power[:, None]).round_().clamp_(-_LARGEST, _LARGEST).nan_to_num_()
        numbers[begin : begin + len(slab)].copy_(rounded.view(-1)[: len(slab)])
        first = begin // BLOCK_ENTRIES
        exponents[first : first + len(power)].copy_(torch.where(finite, power, torch.full_like(power, _LARGEST)))
    return packed


def unpack(packed: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack``: set a contiguous tensor to what was packed, and return it."""
    flat = result.view(-1)
    count, blocks = len(flat), len(flat) // BLOCK_ENTRIES
    exponents = packed[count:].to(torch.int32)
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    scales = torch.where(exponents == _LARGEST, torch.full_like(scales, math.nan), scales)
    wide = flat.copy_(packed[:count]) if flat.dtype == torch.float32 else packed[:count].float()
    wide[: blocks * BLOCK_ENTRIES].view(-1, BLOCK_ENTRIES).mul_(scales[:blocks, None])
    wide[blocks * BLOCK_ENTRIES :].mul_(scales[blocks:])
    return result if wide is flat else result.copy_(wide.view(result.shape))


def sum_packed(rows: Sequence[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    """Set a contiguous tensor to the sum of packed tensors, in float32 and in their order, and return it."""
    total = result if result.dtype == torch.float32 else torch.empty_like(result, dtype=torch.float32)
    summand = torch.empty_like(total)
    unpack(rows[0], total)
    for row in rows[1:]:
        total.add_(unpack(row, summand))
    return result.copy_(total)


def round_int8(x: torch.Tensor, place: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor as its receiver unpacks it, in a contiguous ``place``, if there is one. Float64 is not
    rounded."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format) if place is None else place
    if x.dtype == torch.float64:
        return result.copy_(x)
    flat = result.view(-1)
    for begin, slab in _slabs(x.reshape(-1)):
        unpack(pack(slab), flat[begin : begin + len(slab)])
    return result


def _slabs(flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the slabs of a flat tensor, each with the number of its first entry."""
    entries = _SLAB_ENTRIES_OF_CPU if flat.device.type == "cpu" else _SLAB_ENTRIES
    for begin in range(0, len(flat), entries):
        yield begin, flat[begin : begin + entries]


# ---- pieces of tensors


def _chosen(parts: torch.Tensor, dim: int, numbers: Sequence[int]) -> torch.Tensor:
    """Return some parts of a dim, one after the other."""
    chosen: torch.Tensor = parts.index_select(dim, torch.tensor(numbers, device=parts.device))
    return chosen.flatten(dim, dim + 1)


def parts_in_order(dim: int, outer: Outer) -> bool:
    """Return whether the parts of a dim are contiguous in memory."""
    return dim == 0 and outer == 1


def slice_dim(x: torch.Tensor, ranks: int, index: int, dim: int, outer: Outer) -> torch.Tensor:
    """Return part ``index`` of ``ranks`` along ``dim``, seen as ``(outer, ranks, rest)``; unequal outer parts are cut
    one by one."""
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
    """Return the piece of a whole tensor that the rank at ``coordinates`` holds, as a copy."""
    for dim in range(tensor.dim()):
        if splits := placement.splits(dim):
            stretches = terms(tensor.shape[dim], splits)
            pieces = tensor.split([size for size, _ in stretches], dim)
            taken = [
                _take_along(piece, dim, equal, mesh, coordinates)
                for piece, (_, equal) in zip(pieces, stretches, strict=True)
            ]
            tensor = taken[0] if len(taken) == 1 else torch.cat(taken, dim)
    return tensor.clone(memory_format=torch.contiguous_format)


def _take_along(
    tensor: torch.Tensor, dim: int, splits: Sequence[tuple[int, str]], mesh: Mesh, coordinates: Mapping[str, int]
) -> torch.Tensor:
    """Return a rank's part of a dim that is split into equal parts."""
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
    """Return the whole tensor from the pieces of all ranks, in rank order; partials are summed, and a replica is taken
    from rank 0 of its axis."""
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
    """Return the global positions (int64, one per local entry) of a rank's entries along ``dim``, which has ``size``
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
"""Consecutive entries: the first one's number, and their count."""


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
