"""Numbers of 8 bits: each block of entries as whole numbers of 7 bits and a sign, times a power of two that it shares.

Powers of two make rounding exact to repeat: what was rounded is rounded to itself, so that a message holds the very
values of which the sender keeps the error.
"""

from __future__ import annotations

import math

import torch

BLOCK_ENTRIES = 256
"""The entries of a part, in row-major order, that share a power of two."""
_MOST = 127
_LEAST_POWER = -126
"""Smaller scales are no normal numbers of float32."""


def packed_bytes(entries: int, parts: int = 1) -> int:
    """Return the bytes of a tensor's packed parts, of equally many entries each."""
    each = entries // max(parts, 1)
    return parts * (each + math.ceil(each / BLOCK_ENTRIES))


def pack(x: torch.Tensor) -> torch.Tensor:
    """Return the entries of a tensor as int8, row-major, and behind them the exponent of each block; of a block with an
    entry that is not finite it is 127."""
    flat = x.reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK_ENTRIES)).view(-1, BLOCK_ENTRIES)
    largest = blocks.abs().amax(1) if blocks.numel() else flat.new_zeros(0)
    fraction, power = torch.frexp(largest / _MOST)
    power = (power - (fraction == 0.5).int()).clamp(min=_LEAST_POWER)
    finite = largest.isfinite()
    power = torch.where(finite, power, torch.zeros_like(power))
    numbers = torch.ldexp(blocks, -power[:, None]).round().clamp(-_MOST, _MOST).nan_to_num().to(torch.int8)
    exponents = torch.where(finite, power, torch.full_like(power, _MOST)).to(torch.int8)
    return torch.cat([numbers.view(-1)[: flat.numel()], exponents])


def unpack(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack``, in the shape and the type of another tensor."""
    count = like.numel()
    numbers, exponents = packed[:count].to(torch.float32), packed[count:].to(torch.int32)
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    scales = torch.where(exponents == _MOST, torch.full_like(scales, math.nan), scales)
    return (numbers * scales.repeat_interleave(BLOCK_ENTRIES)[:count]).view(like.shape).to(like.dtype)


def sum_packed(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the sum in float32 of packed tensors of equal shape, in the shape and the type of another tensor."""
    wide = like.float()
    return torch.stack([unpack(row, wide) for row in rows]).sum(0).to(like.dtype)


def round_int8(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as its receiver has it. In float64, in which nothing is rounded, it is the tensor itself."""
    return x if x.dtype == torch.float64 else unpack(pack(x), x)
