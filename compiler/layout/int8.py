"""Numbers of 8 bits: each block of entries as whole numbers of 7 bits and a sign, times a power of two that it shares.

Powers of two make rounding exact to repeat: what was rounded is rounded to itself, so that a message holds the very
values of which the sender keeps the error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

BLOCK_ENTRIES = 256
"""The entries of a part, in row-major order, that share a power of two."""
_SLAB_ENTRIES, _SLAB_ENTRIES_OF_CPU = 1 << 22, 1 << 14
"""The entries of a slab: a large tensor is rounded slab by slab, which takes little memory beside it."""
_MOST = 127
_LEAST_POWER = -126
"""Smaller scales are no normal numbers of float32."""


def packed_bytes(entries: int, parts: int = 1) -> int:
    """Return the bytes of a tensor's packed parts, of equally many entries each."""
    each = entries // max(parts, 1)
    return parts * (each + math.ceil(each / BLOCK_ENTRIES))


def pack(x: torch.Tensor, place: torch.Tensor | None = None) -> torch.Tensor:
    """Return the entries of a tensor as int8, row-major, and behind them the exponent of each block; of a block with an
    entry that is not finite it is 127. They are written to a ``place`` of int8, if there is one."""
    flat = x.reshape(-1)
    packed = flat.new_empty(packed_bytes(len(flat)), dtype=torch.int8) if place is None else place
    numbers, exponents = packed[: len(flat)], packed[len(flat) :]
    for begin, slab in _slabs(flat):
        rest = len(slab) % BLOCK_ENTRIES
        blocks = torch.nn.functional.pad(slab, (0, BLOCK_ENTRIES - rest)) if rest else slab
        blocks = blocks.float().view(-1, BLOCK_ENTRIES)
        largest = blocks.abs().amax(1)
        fraction, power = torch.frexp(largest / _MOST)
        power = (power - (fraction == 0.5).int()).clamp(min=_LEAST_POWER)
        finite = largest.isfinite()
        power = torch.where(finite, power, torch.zeros_like(power))
        rounded = torch.ldexp(blocks, -power[:, None]).round_().clamp_(-_MOST, _MOST).nan_to_num_()
        numbers[begin : begin + len(slab)].copy_(rounded.view(-1)[: len(slab)])
        first = begin // BLOCK_ENTRIES
        exponents[first : first + len(power)].copy_(torch.where(finite, power, torch.full_like(power, _MOST)))
    return packed


def unpack(packed: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack``: set a contiguous tensor to what was packed, and return it."""
    flat = result.view(-1)
    count, blocks = len(flat), len(flat) // BLOCK_ENTRIES
    exponents = packed[count:].to(torch.int32)
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    scales = torch.where(exponents == _MOST, torch.full_like(scales, math.nan), scales)
    wide = flat.copy_(packed[:count]) if flat.dtype == torch.float32 else packed[:count].float()
    wide[: blocks * BLOCK_ENTRIES].view(-1, BLOCK_ENTRIES).mul_(scales[:blocks, None])
    wide[blocks * BLOCK_ENTRIES :].mul_(scales[blocks:])
    return result if wide is flat else result.copy_(wide.view(result.shape))


def sum_packed(rows: Sequence[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    """Set a contiguous tensor to the sum of packed tensors, which is made in float32 and in their order, and return
    it."""
    total = result if result.dtype == torch.float32 else torch.empty_like(result, dtype=torch.float32)
    summand = torch.empty_like(total)
    unpack(rows[0], total)
    for row in rows[1:]:
        total.add_(unpack(row, summand))
    return result.copy_(total)


def round_int8(x: torch.Tensor, place: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor as its receiver has it, in a contiguous ``place``, if there is one. In float64 nothing is
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
