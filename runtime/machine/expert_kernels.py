"""Kernels of experts: on packed rows, one for each token and expert that ``chosen`` [experts, tokens] marks, and on
slots, a fixed number for each expert and sequence where experts have a capacity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compiler.ops.own_ops import aten
from .registry import runs


def _tokens(chosen: Tensor) -> Tensor:
    """Return the token of each packed row."""
    return chosen.nonzero()[:, 1]


def _counts(chosen: Tensor) -> list[int]:
    """Return the number of rows of each expert."""
    counts: list[int] = chosen.sum(1).tolist()
    return counts


@cache
def has_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch has a grouped GEMM for a dtype on a device. It is tried, because devices and dtypes differ
    from version to version."""
    try:
        rows = torch.zeros(8, 8, dtype=dtype, device=device)
        F.grouped_mm(rows, rows[None], offs=torch.full((1,), 8, dtype=torch.int32, device=device))
    except RuntimeError:
        return False
    return True


def _takes_grouped(*operands: Tensor) -> bool:
    """Return whether torch's grouped GEMM takes these operands; its kernels want all rows aligned to 16 bytes."""
    aligned = all(size * x.element_size() % 16 == 0 for x in operands for size in x.shape[1:])
    dense = all(x.numel() and x.is_contiguous() for x in operands)
    return aligned and dense and has_grouped(operands[0].device, operands[0].dtype)


def _group_ends(chosen: Tensor) -> Tensor:
    """Return the end of each expert's rows, on the device."""
    return chosen.sum(1).cumsum(0).to(torch.int32)


def _groups(chosen: Tensor, *packed: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield each expert's rows of all packed values."""
    counts = _counts(chosen)
    return zip(*(value.split(counts) for value in packed), strict=True)


@runs("parc.pack.default")
def _pack(ctx: object, x: Tensor, chosen: Tensor, top: int) -> Tensor:
    return x.index_select(0, _tokens(chosen))


@runs("parc.unpack.default")
def _unpack(ctx: object, rows: Tensor, chosen: Tensor, top: int) -> Tensor:
    # index_add_ adds a token's rows one after the other: every sum has one order
    tokens = _tokens(chosen)
    return rows.new_zeros(chosen.shape[1], rows.shape[1]).index_add_(0, tokens, rows)


@runs("parc.pick.default")
def _pick(ctx: object, x: Tensor, chosen: Tensor, top: int) -> Tensor:
    return x[chosen][:, None]


@runs("parc.unpick.default")
def _unpick(ctx: object, rows: Tensor, chosen: Tensor, top: int) -> Tensor:
    return rows.new_zeros(chosen.shape).masked_scatter_(chosen, rows)


@runs("parc.spread.default")
def _spread_rows(ctx: object, x: Tensor, chosen: Tensor, top: int) -> Tensor:
    return x.index_select(0, chosen.nonzero()[:, 0])


@runs("parc.expert_sum.default")
def _expert_sum(ctx: object, rows: Tensor, chosen: Tensor, top: int) -> Tensor:
    return torch.stack([part.sum(0) for (part,) in _groups(chosen, rows)])


@runs("parc.route.default")
def _route(ctx: object, rows: Tensor, chosen: Tensor) -> Tensor:
    return rows


@runs("parc.expert_linear.default")
def _expert_linear(ctx: object, rows: Tensor, chosen: Tensor, weight: Tensor, transposed: bool, top: int) -> Tensor:
    if _takes_grouped(rows, weight):
        return F.grouped_mm(rows, weight if transposed else weight.mT, offs=_group_ends(chosen))
    outputs = rows.new_empty(rows.shape[0], weight.shape[2 if transposed else 1])
    for (part, out), matrix in zip(_groups(chosen, rows, outputs), weight.unbind(), strict=True):
        torch.mm(part, matrix if transposed else matrix.t(), out=out)
    return outputs


@runs("parc.expert_outer.default")
def _expert_outer(ctx: object, rows: Tensor, grad: Tensor, chosen: Tensor, transposed: bool, top: int) -> Tensor:
    first, second = (rows, grad) if transposed else (grad, rows)
    if _takes_grouped(first, second):
        return F.grouped_mm(first.t(), second, offs=_group_ends(chosen))
    gradients = rows.new_empty(chosen.shape[0], first.shape[1], second.shape[1])
    for (one, other), out in zip(_groups(chosen, first, second), gradients.unbind(), strict=True):
        torch.mm(one.t(), other, out=out)
    return gradients


@runs("parc.expert_linear.default", "reference")
def _plain_expert_linear(
    ctx: object, rows: Tensor, chosen: Tensor, weight: Tensor, transposed: bool, top: int
) -> Tensor:
    """Compute each expert's product by itself, so that autograd can differentiate it; the kernel is checked against
    this."""
    groups = zip(_groups(chosen, rows), weight.unbind(), strict=True)
    return torch.cat([part @ (matrix if transposed else matrix.t()) for (part,), matrix in groups])


@runs("aten.slice_backward.default")
def _slice_backward(ctx: Any, grad: Tensor, sizes: Sequence[int], *options: int) -> Tensor:
    shape = (len(grad), *sizes[1:]) if ctx.results[0].packed else sizes
    gradient: Tensor = aten.slice_backward.default(grad, shape, *options)
    return gradient


# ---- slots of experts with a capacity: kernels that autograd can differentiate, so the reference runs them, too


def _sequences(slots: Tensor) -> Tensor:
    """Return the sequence of each slot, as an index that broadcasts with ``slots``."""
    return torch.arange(slots.shape[1], device=slots.device)[None, :, None]


def _token_or_end(slots: Tensor, tokens: int) -> Tensor:
    """Return the token of each slot; an empty slot gets the position after the last token."""
    return torch.where(slots < 0, tokens, slots)


@runs("parc.slots.default")
def _assign_slots(ctx: object, chosen: Tensor, capacity: int, top: int) -> Tensor:
    place = chosen.cumsum(-1) - 1
    kept = chosen & (place < capacity)
    tokens = torch.arange(chosen.shape[-1], device=chosen.device).expand(chosen.shape)
    table = tokens.new_full((*chosen.shape[:-1], capacity + 1), -1)
    return table.scatter_(-1, torch.where(kept, place, capacity), torch.where(kept, tokens, -1))[..., :-1]


@runs("parc.dispatch.default")
def _dispatch(ctx: object, x: Tensor, slots: Tensor) -> Tensor:
    rows = x[_sequences(slots), slots.clamp(min=0)]
    return rows.masked_fill((slots < 0)[..., None], 0)


@runs("parc.combine.default")
def _combine(ctx: object, rows: Tensor, slots: Tensor, tokens: int) -> Tensor:
    # index_add adds a token's rows one after the other: every sum has one order
    places = _sequences(slots) * (tokens + 1) + _token_or_end(slots, tokens)
    zeros = rows.new_zeros(slots.shape[1] * (tokens + 1), rows.shape[3])
    sums = zeros.index_add(0, places.flatten(), rows.flatten(0, 2))
    return sums.view(slots.shape[1], tokens + 1, rows.shape[3])[:, :-1]


@runs("parc.pick_slots.default")
def _pick_slots(ctx: object, x: Tensor, slots: Tensor) -> Tensor:
    return x.gather(-1, slots.clamp(min=0)).masked_fill(slots < 0, 0)


@runs("parc.unpick_slots.default")
def _unpick_slots(ctx: object, x: Tensor, slots: Tensor, tokens: int) -> Tensor:
    zeros = x.new_zeros(*slots.shape[:2], tokens + 1)
    return zeros.scatter(-1, _token_or_end(slots, tokens), x)[..., :-1]
