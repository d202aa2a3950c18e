"""Kernels of parc's own operators; what they compute may depend on the rank's coordinates in the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...compiler.initial.counter import keep_mask, random, stream
from ...compiler.layout.pieces import row_major
from ...compiler.layout.placement import TensorType
from ...compiler.ops.own_ops import aten
from .registry import Kernel, KernelContext, code_for, runs

ADD_PRODUCT = "parc.add_product.default"
"""``x + a @ b`` in the shape of ``x``: an operator into which fusion joins two lines."""


@runs("parc.stream_key.default")
def _stream_key(ctx: KernelContext, rng: Tensor, name: str, seed: int) -> Tensor:
    step, microbatch = rng.tolist()
    return torch.tensor(stream(seed, name, step, microbatch), dtype=torch.int64)


def _drawn(ctx: KernelContext, dtype: torch.dtype, draw: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what ``draw`` makes of the numbers of the result's entries, a tile at a time: numbers take more bytes."""
    (type_,) = ctx.results
    places = [ctx.index(type_, dim) for dim in range(len(type_.shape))]
    sizes = [place.shape[0] for place in places]
    if math.prod(sizes) <= ctx.tile:
        return draw(ctx.numbers(type_))
    inner = next(dim for dim in range(len(sizes)) if dim + 1 == len(sizes) or math.prod(sizes[dim:]) <= ctx.tile)
    rows = row_major(type_.shape[:inner], places[:inner], ctx.device).reshape(-1, 1) * math.prod(type_.shape[inner:])
    columns = row_major(type_.shape[inner:], places[inner:], ctx.device).reshape(-1)
    result = torch.empty(sizes, dtype=dtype, device=ctx.device)
    few = max(1, ctx.tile // columns.shape[0])
    for part, some in zip(result.view(rows.shape[0], -1).split(few), rows.split(few), strict=True):
        part.copy_(draw(some + columns))
    return result


@runs("parc.dropout_mask.default")
def _dropout_mask(ctx: KernelContext, key: Tensor, size: Any, p: float, dtype: torch.dtype) -> Tensor:
    return _drawn(ctx, dtype, lambda numbers: keep_mask(ctx.key(key), numbers, p).to(dtype).mul_(1 / (1 - p)))


@runs("parc.random.default")
def _random_numbers(ctx: KernelContext, key: Tensor, size: Any, law: str, dtype: torch.dtype) -> Tensor:
    return _drawn(ctx, dtype, lambda numbers: random(ctx.key(key), numbers, law, dtype))


@runs("parc.iota.default")
def _iota(ctx: KernelContext, size: int, start: int, step: int, dtype: torch.dtype) -> Tensor:
    return (ctx.index(ctx.results[0], 0) * step + start).to(dtype)


def _local_index(ctx: KernelContext, table: TensorType, dim: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the local positions of global indices along a dim (0 for indices of other ranks), and a mask of the
    indices that are this rank's."""
    entries = ctx.index(table, dim)
    count = entries.shape[0]
    if ctx.consecutive(table, dim):
        local = index - entries[0]
        mine = (local >= 0) & (local < count)
    else:  # parts of sub-dims, in increasing order
        local = torch.searchsorted(entries, index.contiguous()).clamp_(max=count - 1)
        mine = entries[local] == index
    return torch.where(mine, local, 0), mine


@runs("parc.lookup.default")
def _lookup(ctx: KernelContext, table: Tensor, index: Tensor, padding: int) -> Tensor:
    local, mine = _local_index(ctx, ctx.operands[0], 0, index)
    return torch.nn.functional.embedding(local, table).mul_(mine[..., None])


@runs("parc.lookup_backward.default")
def _lookup_backward(ctx: KernelContext, grad: Tensor, index: Tensor, rows: int, padding: int) -> Tensor:
    local, mine = _local_index(ctx, ctx.results[0], 0, index)
    if padding >= 0:
        mine = mine & (index != padding)
    gradient: Tensor = aten.embedding_dense_backward(grad * mine[..., None], local, rows, -1, False)
    return gradient


def _cache_chunks(ctx: KernelContext, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield chunks of rows, those of all tensors together, of a tile's entries."""
    first = tensors[0]
    rows = max(1, min(ctx.tile // max(1, first.shape[-1]), first.shape[0]))
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


@runs("parc.loss_parts.default")
def _loss_parts(ctx: KernelContext, logits: Tensor, peak: Tensor, targets: Tensor) -> Tensor:
    local, mine = _local_index(ctx, ctx.operands[0], 1, targets)
    total = torch.cat([(rows - top).exp_().sum(-1) for rows, top in _cache_chunks(ctx, logits, peak)])
    picked = torch.where(mine, (logits.gather(-1, local[:, None]) - peak).squeeze(-1), 0.0)  # padding is infinite
    return torch.stack([total, picked])


@runs("parc.loss_parts_backward.default")
def _loss_parts_backward(ctx: KernelContext, grad: Tensor, logits: Tensor, peak: Tensor, targets: Tensor) -> Tensor:
    local, mine = _local_index(ctx, ctx.operands[1], 1, targets)
    result = torch.empty_like(logits)
    for part, rows, top, factor in _cache_chunks(ctx, result, logits, peak, grad[0][:, None]):
        torch.sub(rows, top, out=part).exp_().mul_(factor)
    return result.scatter_add_(-1, local[:, None], (grad[1] * mine)[:, None])


def _within(ctx: KernelContext, type_: TensorType, dim: int, padded: int) -> Tensor:
    """Return the positions of a rank's entries along a padded dim, counted from the start of each part of ``padded``
    entries."""
    return ctx.index(type_, dim) % padded


@runs("parc.fill_pad.default")
def _fill_pad(ctx: KernelContext, x: Tensor, dim: int, outer: int, real: int, padded: int, value: float) -> Tensor:
    filled = _within(ctx, ctx.operands[0], dim, padded) >= real
    if not ctx.traced and not bool(filled.any()):  # equal regions of all ranks are one when compiled
        return x
    return x.masked_fill(filled.reshape(-1, *[1] * (x.dim() - dim - 1)), value)


@runs("parc.cut_pad.default")
def _cut_pad(ctx: KernelContext, x: Tensor, dim: int, outer: int, real: int, padded: int) -> Tensor:
    kept = _within(ctx, ctx.operands[0], dim, padded) < real
    return x.index_select(dim, kept.nonzero()[:, 0])


@runs("parc.grow_pad.default")
def _grow_pad(ctx: KernelContext, x: Tensor, dim: int, outer: int, real: int, padded: int) -> Tensor:
    kept = _within(ctx, ctx.results[0], dim, padded) < real
    grown = x.new_zeros(*x.shape[:dim], kept.shape[0], *x.shape[dim + 1 :])
    return grown.index_copy_(dim, kept.nonzero()[:, 0], x)


@runs("parc.store.default")
@runs("parc.load.default")
def _carry(ctx: KernelContext, x: Tensor, what: str) -> Tensor:
    return x  # without offload there is one memory space


@runs("parc.square_sum.default")
def _square_sum(ctx: KernelContext, x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.device.type != "cpu":  # reads narrow numbers once; on a CPU a dot product is faster
        norm: Tensor = torch.linalg.vector_norm(x, dtype=wide)
        return norm.square()
    flat = x.reshape(-1)
    if flat.dtype == wide:
        return torch.dot(flat, flat)
    total = x.new_zeros((), dtype=wide)
    for part in flat.split(ctx.tile):
        piece = part.to(wide)
        total += torch.dot(piece, piece)
    return total


@runs("parc.next_loss_scale.default")
def _next_loss_scale(ctx: KernelContext, norm: Any, scale: Any, good: Any, skipped: Any, *numbers: Any) -> Any:
    growth, backoff, interval = numbers
    finite, grown = norm.isfinite(), scale * growth
    due = finite & (good + 1 == interval)
    kept = torch.where(due & grown.isfinite(), grown, scale)
    return torch.where(finite, kept, scale * backoff), torch.where(finite & ~due, good + 1, 0), skipped + ~finite


@runs(ADD_PRODUCT)
def _add_product(ctx: KernelContext, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(x.reshape(a.shape[0], b.shape[1]), a, b).view(x.shape)


@runs(ADD_PRODUCT, "over")
def _add_product_over(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    x.view(a.shape[0], b.shape[1]).addmm_(a, b)
    return x


def _dense(function: Any) -> Kernel:
    """Return a kernel for an operator that needs contiguous operands. The module called ``contiguous``, but its trace,
    taken of contiguous tensors, does not show that."""

    def kernel(ctx: KernelContext, *args: Any) -> Any:
        return function(*(item.contiguous() if isinstance(item, Tensor) else item for item in args))

    return kernel


runs("aten.native_group_norm.default")(_dense(aten.native_group_norm.default))
runs("aten.native_group_norm_backward.default")(_dense(aten.native_group_norm_backward.default))
KERNELS = code_for("kernel")


@runs("parc.token_loss.default", "reference")
def _plain_token_loss(ctx: KernelContext, logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=ignore, reduction="none")


REFERENCE_KERNELS: Mapping[str, Kernel] = {**KERNELS, **code_for("reference")}
"""The kernels for the captured graph, which autograd differentiates: an independent second implementation, against
which the others are checked."""
