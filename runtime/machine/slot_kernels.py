"""Kernels of operators on the slots of experts with a capacity. Autograd can follow them."""

from __future__ import annotations

import torch

from .ways import runs


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
