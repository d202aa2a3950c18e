"""Decomposition of reads by strides: a tensor's memory becomes dims of its own, and each is read by slices and windows.

    x.transpose(0, 1).as_strided((3, 4, 8), (16, 8, 1))     becomes     x.reshape(8, 8).unfold(0, 4, 2).transpose(1, 2)

Programs compute with values, whose strides differ from rank to rank and from those of the capture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ...compiler.capture.faults import fault_at
from ...compiler.capture.node_facts import noted
from ...compiler.ops.own_ops import aten
from ..calls import arguments_of
from .rewriter import takes_apart


@dataclass(frozen=True, slots=True)
class _Strided:
    """A dim of a tensor in memory: its number there, its size, and how many elements lie between two entries."""

    dim: int
    size: int
    stride: int

    @property
    def extent(self) -> int:
        """The elements between the first entry and the last."""
        return (self.size - 1) * self.stride


@takes_apart(aten.as_strided.default, aten.as_strided_copy.default)
def _as_strided(node: fx.Node) -> Any:
    """Return the parts of a read by strides.

    Raises:
        CaptureError: it reads memory that holds no entry of the tensor, or entries that lie one over the other.
    """
    arguments = arguments_of(node)
    value = noted(arguments["self"]).value
    sizes: Any = arguments["size"]
    strides: Any = arguments["stride"]
    start = arguments.get("storage_offset")
    first = 0 if start is None else int(start) - value.storage_offset()
    memory, reads = _moving(value.shape, value.stride()), _moving(sizes, strides)
    held = _held(memory)
    last = first + sum(read.extent for read in reads)
    if held is None or first < 0 or last >= len(held) or not _reads_held(held, reads, first):
        message = "`as_strided` reads memory that holds no entry of the tensor, or several of them at one place"
        raise fault_at(node, message, help="write the view with slices and `unfold`, or of the whole tensor")
    cuts = [*_cuts(reads, first, len(held))]

    def strided(x: Tensor, *_: Any, **__: Any) -> Tensor:
        x = _as_in_memory(x, memory).reshape([above // below for above, below in pairwise(cuts)])
        dims: list[int] = []  # of the result, as those of x are read one after the other
        for above, below in pairwise(cuts):
            inside = [read for read in reads if below <= read.stride < above]
            x = _read_dim(x, len(dims), first % above // below, [(read.size, read.stride // below) for read in inside])
            dims += [read.dim for read in inside]
        x = x.permute([dims.index(dim) for dim in sorted(dims)])
        for dim in range(len(sizes)):
            if dim not in dims:
                x = x.unsqueeze(dim)
        return x if list(x.shape) == list(sizes) else x.expand(sizes)

    return strided


def _moving(sizes: Sequence[int], strides: Sequence[int]) -> list[_Strided]:
    """Return the dims along which memory is passed, from the outermost on."""
    dims = [_Strided(dim, *lies) for dim, lies in enumerate(zip(sizes, strides, strict=True))]
    return sorted((dim for dim in dims if dim.size > 1 and dim.stride), key=lambda dim: -dim.stride)


def _held(memory: Sequence[_Strided]) -> Tensor | None:
    """Return whether each element of memory holds an entry of a tensor, up to the end of its outermost dim. Return None
    where dims do not lie one inside the other."""
    held = torch.ones((), dtype=torch.bool)
    for inner in reversed(memory):
        if inner.stride % held.numel():
            return None
        held = F.pad(held.flatten(), (0, inner.stride - held.numel())).expand(inner.size, -1)
    return held.flatten()


def _reads_held(held: Tensor, reads: Sequence[_Strided], first: int) -> bool:
    """Return whether entries alone are read."""
    sizes, strides = [read.size for read in reads], [read.stride for read in reads]
    return bool(held.contiguous().as_strided(sizes, strides, first).all())


def _as_in_memory(x: Tensor, memory: Sequence[_Strided]) -> Tensor:
    """Return a tensor's entries in the order of memory, with zeros in the gaps between them."""
    order = [dim.dim for dim in memory]
    x = x[tuple(slice(None) if dim in order else 0 for dim in range(x.dim()))]
    x = x.permute([sorted(order).index(dim) for dim in order])
    inner = 1
    for at in reversed(range(len(memory))):
        if gap := memory[at].stride - inner:
            x = F.pad(x.flatten(at + 1) if at + 1 < x.dim() else x.unsqueeze(-1), (0, gap))
        inner = memory[at].stride * memory[at].size
    return x


def _cuts(reads: Sequence[_Strided], first: int, length: int) -> Iterator[int]:
    """Yield the numbers of elements at which memory divides into dims that are read independently, from the whole
    ``length`` down to 1."""
    yield length
    last = length
    for above in sorted({read.stride for read in reads} - {1}, reverse=True):
        extent = first % above + sum(read.extent for read in reads if read.stride < above)
        outer = all(read.stride % above == 0 for read in reads if read.stride >= above)
        if extent < above < last and outer and last % above == 0:
            yield above
            last = above
    if last > 1:
        yield 1


def _read_dim(x: Tensor, dim: int, first: int, reads: Sequence[tuple[int, int]]) -> Tensor:
    """Read a dim from entry ``first`` on, as dims given by sizes and steps in its place."""
    if not reads:
        return x.select(dim, first)
    (size, step), *inner = reads
    if not inner:
        return _sliced(x, dim, first, size, step)
    (width, apart), *further = inner
    if not further and step % apart == 0:
        windows = _sliced(x, dim, first, (size - 1) * (step // apart) + width, apart)
        return windows.unfold(dim, width, step // apart).movedim(-1, dim + 1)
    positions = torch.full((), first, dtype=torch.int64, device=x.device)
    for size, step in reads:
        positions = positions.unsqueeze(-1) + torch.arange(size, device=x.device) * step
    return x.index_select(dim, positions.flatten()).reshape(*x.shape[:dim], *positions.shape, *x.shape[dim + 1 :])


def _sliced(x: Tensor, dim: int, first: int, size: int, step: int) -> Tensor:
    if (first, size, step) == (0, x.size(dim), 1):
        return x
    return x[(slice(None),) * dim + (slice(first, first + (size - 1) * step + 1, step),)]
