"""Kernels of operators on packed rows of tokens: only the rows that ``chosen`` marks are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from ...compiler.ops.own_ops import aten
from .site import runs


def _tokens(chosen: torch.Tensor) -> torch.Tensor:
    """Return the token of each packed row."""
    return chosen.nonzero()[:, 1]


def _counts(chosen: torch.Tensor) -> list[int]:
    """Return the number of rows of each expert."""
    counts: list[int] = chosen.sum(1).tolist()
    return counts


@cache
def has_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch multiplies groups of rows of a dtype in one call on a device: it is tried. Which devices and
    dtypes it knows differs from version to version."""
    try:
        rows = torch.zeros(8, 8, dtype=dtype, device=device)
        F.grouped_mm(rows, rows[None], offs=torch.full((1,), 8, dtype=torch.int32, device=device))
    except RuntimeError:
        return False
    return True


def _in_one_call(*operands: torch.Tensor) -> bool:
    """Return whether groups of these are multiplied in one call, whose kernels want all rows aligned to 16 bytes."""
    aligned = all(size * x.element_size() % 16 == 0 for x in operands for size in x.shape[1:])
    there = all(x.numel() and x.is_contiguous() for x in operands)
    return aligned and there and has_grouped(operands[0].device, operands[0].dtype)


def _ends(chosen: torch.Tensor) -> torch.Tensor:
    """Return the place behind the last row of each expert. They stay on the device."""
    return chosen.sum(1).cumsum(0).to(torch.int32)


def _groups(chosen: torch.Tensor, *packed: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the rows of each expert, of all packed values together."""
    counts = _counts(chosen)
    return zip(*(value.split(counts) for value in packed), strict=True)


@runs("parc.pack.default")
def _pack(site: object, x: torch.Tensor, chosen: torch.Tensor, top: int) -> torch.Tensor:
    return x.index_select(0, _tokens(chosen))


@runs("parc.unpack.default")
def _unpack(site: object, rows: torch.Tensor, chosen: torch.Tensor, top: int) -> torch.Tensor:
    # a token's rows one after the other, so that every sum has one order
    tokens = _tokens(chosen)
    return rows.new_zeros(chosen.shape[1], rows.shape[1]).index_add_(0, tokens, rows)


@runs("parc.pick.default")
def _pick(site: object, x: torch.Tensor, chosen: torch.Tensor, top: int) -> torch.Tensor:
    return x[chosen][:, None]


@runs("parc.unpick.default")
def _unpick(site: object, rows: torch.Tensor, chosen: torch.Tensor, top: int) -> torch.Tensor:
    return rows.new_zeros(chosen.shape).masked_scatter_(chosen, rows)


@runs("parc.spread.default")
def _spread(site: object, x: torch.Tensor, chosen: torch.Tensor, top: int) -> torch.Tensor:
    return x.index_select(0, chosen.nonzero()[:, 0])


@runs("parc.expert_sum.default")
def _expert_sum(site: object, rows: torch.Tensor, chosen: torch.Tensor, top: int) -> torch.Tensor:
    return torch.stack([part.sum(0) for (part,) in _groups(chosen, rows)])


@runs("parc.route.default")
def _route(site: object, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return rows


@runs("parc.expert_linear.default")
def _expert_linear(
    site: object, rows: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor, transposed: bool, top: int
) -> torch.Tensor:
    if _in_one_call(rows, weight):
        return F.grouped_mm(rows, weight if transposed else weight.mT, offs=_ends(chosen))
    made = rows.new_empty(rows.shape[0], weight.shape[2 if transposed else 1])
    for part, out, own in zip(*zip(*_groups(chosen, rows, made), strict=True), weight.unbind(), strict=True):
        torch.mm(part, own if transposed else own.t(), out=out)
    return made


@runs("parc.expert_outer.default")
def _expert_outer(
    site: object, rows: torch.Tensor, grad: torch.Tensor, chosen: torch.Tensor, transposed: bool, top: int
) -> torch.Tensor:
    first, second = (rows, grad) if transposed else (grad, rows)
    if _in_one_call(first, second):
        return F.grouped_mm(first.t(), second, offs=_ends(chosen))
    made = rows.new_empty(chosen.shape[0], first.shape[1], second.shape[1])
    for (one, other), out in zip(_groups(chosen, first, second), made.unbind(), strict=True):
        torch.mm(one.t(), other, out=out)
    return made


@runs("parc.expert_linear.default", "reference")
def _plain_expert_linear(
    site: object, rows: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor, transposed: bool, top: int
) -> torch.Tensor:
    """Compute each expert's product by itself, which autograd can follow; the other kernel is checked against it."""
    parts = rows.split(chosen.sum(1).tolist())
    return torch.cat(
        [part @ (own if transposed else own.t()) for part, own in zip(parts, weight.unbind(), strict=True)]
    )


@runs("aten.slice_backward.default")
def _slice_backward(site: Any, grad: torch.Tensor, sizes: Sequence[int], *options: int) -> torch.Tensor:
    there = (len(grad), *sizes[1:]) if site.results[0].packed else sizes
    gradient: torch.Tensor = aten.slice_backward.default(grad, there, *options)
    return gradient


# ---- kernels of operators on the slots of experts with a capacity. Autograd can follow them.


def _sequences(slots: torch.Tensor) -> torch.Tensor:
    """Return the sequence of each slot, to index with."""
    return torch.arange(slots.shape[1], device=slots.device)[None, :, None]


def _behind(slots: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the slots with those that nobody takes behind the last token."""
    return torch.where(slots < 0, tokens, slots)


@runs("parc.slots.default")
def _slots(site: object, chosen: torch.Tensor, capacity: int, top: int) -> torch.Tensor:
    place = chosen.cumsum(-1) - 1
    kept = chosen & (place < capacity)
    tokens = torch.arange(chosen.shape[-1], device=chosen.device).expand(chosen.shape)
    table = tokens.new_full((*chosen.shape[:-1], capacity + 1), -1)
    return table.scatter_(-1, torch.where(kept, place, capacity), torch.where(kept, tokens, -1))[..., :-1]


@runs("parc.dispatch.default")
def _dispatch(site: object, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    rows = x[_sequences(slots), slots.clamp(min=0)]
    return rows.masked_fill((slots < 0)[..., None], 0)


@runs("parc.combine.default")
def _combine(site: object, rows: torch.Tensor, slots: torch.Tensor, tokens: int) -> torch.Tensor:
    # a token's rows one after the other, so that every sum has one order
    places = _sequences(slots) * (tokens + 1) + _behind(slots, tokens)
    made = rows.new_zeros(slots.shape[1] * (tokens + 1), rows.shape[3])
    made = made.index_add(0, places.flatten(), rows.flatten(0, 2))
    return made.view(slots.shape[1], tokens + 1, rows.shape[3])[:, :-1]


@runs("parc.pick_slots.default")
def _pick_slots(site: object, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return x.gather(-1, slots.clamp(min=0)).masked_fill(slots < 0, 0)


@runs("parc.unpick_slots.default")
def _unpick_slots(site: object, x: torch.Tensor, slots: torch.Tensor, tokens: int) -> torch.Tensor:
    made = x.new_zeros(*slots.shape[:2], tokens + 1)
    return made.scatter(-1, _behind(slots, tokens), x)[..., :-1]
