"""Fourier transforms of pairs of reals as products with a matrix: a cosine and a sine for every two entries.

A fast transform does less work on long dims; a product has rules, so a plan splits it as it does a linear layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .complex_numbers import ComplexPair, pair, product, scaled, whole

_to_dtype = torch.ops.aten._to_copy.default
_linear = product(torch.ops.aten.linear.default)
_ROOT = 1  # of torch's ways to scale; 0 is none, 2 the size itself


def to_complex(x: Any, dims: Sequence[int], scale: int, forward: bool) -> ComplexPair:
    """``_fft_c2c``: from complex numbers to as many complex numbers."""
    result = pair(x)
    for dim in dims:
        size = whole(x)[0].shape[dim]
        result = _along(result, dim, _turns(size, size, size, forward, whole(x)[0].dtype))
    return _scaled(result, [whole(x)[0].shape[dim] for dim in dims], scale)


def of_reals(x: Tensor, dims: Sequence[int], scale: int, half: bool) -> ComplexPair:
    """``_fft_r2c``: from reals. With ``half``, the last dim of the result has half of the entries: the others are their
    conjugates."""
    sizes = [x.shape[dim] for dim in dims]
    rows = sizes[-1] // 2 + 1 if half else sizes[-1]
    half_spectrum = _along(ComplexPair(x, None), dims[-1], _turns(rows, sizes[-1], sizes[-1], True, x.dtype))
    return _scaled(to_complex(half_spectrum, dims[:-1], 0, True), sizes, scale)


def to_reals(x: Any, dims: Sequence[int], scale: int, size: int) -> Tensor:
    """``_fft_c2r``: from one half to ``size`` reals; an entry whose conjugate is in the other half counts twice."""
    result = to_complex(x, dims[:-1], 0, False)
    real, _ = whole(result)
    columns = torch.arange(real.shape[dims[-1]])
    both = _to_dtype((columns > 0) & (columns * 2 < size), dtype=real.dtype)
    turns = _turns(size, len(columns), size, False, real.dtype)
    result = _along(result, dims[-1], ComplexPair(*(part * (both + 1.0) for part in turns)))
    sizes = [*(real.shape[dim] for dim in dims[:-1]), size]
    return whole(_scaled(result, sizes, scale))[0]


def _turns(rows: int, columns: int, size: int, forward: bool, dtype: torch.dtype) -> ComplexPair:
    """The matrix ``exp(2 pi i row column / size)``, or its conjugate. ``row column % size`` is a whole number and the
    angle is float64: a large angle in float32 does not say where in a turn it ends."""
    places = torch.arange(rows)[:, None] * torch.arange(columns)[None, :] % size
    angle = torch.arange(size, dtype=torch.float64) * (2 * math.pi) / size
    cos, sin = (_to_dtype(table, dtype=dtype)[places] for table in (angle.cos(), angle.sin()))
    return ComplexPair(cos, -sin if forward else sin)


def _along(x: ComplexPair, dim: int, matrix: ComplexPair) -> ComplexPair:
    """Multiply every line along ``dim`` by a matrix [out, in]."""
    last = whole(x)[0].dim() - 1
    if dim % (last + 1) == last:
        return _linear(x, matrix)
    turned = ComplexPair(*(None if part is None else part.transpose(dim, -1) for part in x))
    return ComplexPair(*(None if part is None else part.transpose(dim, -1) for part in _linear(turned, matrix)))


def _scaled(x: ComplexPair, sizes: Sequence[int], scale: int) -> ComplexPair:
    count = math.prod(sizes)
    if not scale:
        return x
    return scaled(x, torch.full((), count, dtype=whole(x)[0].dtype).sqrt() if scale == _ROOT else count)
