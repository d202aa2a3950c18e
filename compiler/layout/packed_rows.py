"""The exchange of packed rows of tokens between ranks that hold them by tokens and ranks that hold them by experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .placement import AxisType, Packed, Placement, Split, TensorType
from .stretches import count

EXCHANGE = "parc.exchange"
"""The collective by which packed rows change from a split over tokens to one over experts, or back."""
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A rank's packed rows, and what is chosen, [experts, tokens], as they are split before and after an exchange."""


def chosen_placement(rows: Placement, packed: Packed) -> Placement:
    """Return the placement of [experts, tokens] that says which packed rows of a value are there."""
    assert packed is not None
    experts = packed[1]
    kinds: dict[str, AxisType] = dict.fromkeys((axis for axis, _ in rows.items()), "I")
    for outer, axis in rows.splits(0):
        within = count(outer) < experts
        kinds[axis] = Split(0, outer) if within else Split(1, count(outer) // experts)
    return rows.replace(kinds)


def chosen_type(rows: TensorType) -> TensorType:
    """Return the type of [experts, tokens] that says which packed rows of a value are there."""
    assert rows.packed is not None
    experts = rows.packed[1]
    shape = experts, rows.shape[0] // experts
    return TensorType(torch.bool, shape, chosen_placement(rows.placement, rows.packed))


def rows_by_rank(chosen: torch.Tensor, ranks: int, dim: int, outer: int) -> list[torch.Tensor]:
    """Return, for each rank of a group, the places of its rows among the packed rows of ``chosen``, where its part is
    part ``outer`` of a dim: experts (0) or tokens (1)."""
    numbers = torch.cumsum(chosen.flatten(), 0).view(chosen.shape) - 1
    marked = torch.where(chosen, numbers, -1)
    sizes = [*chosen.shape[:dim], outer, ranks, chosen.shape[dim] // outer // ranks, *chosen.shape[dim + 1 :]]
    cut = marked.view(sizes).movedim(dim + 1, 0)
    return [part[part >= 0] for part in cut]


def sides(args: Sequence[Any], experts: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the dim of what is chosen and its outer part that are split before an exchange, and those after it.
    ``experts`` is how many are in what is chosen on the side that is split over tokens."""
    _, _, outer, _, to_outer = args[:5]
    return tuple((0, at) if at < experts else (1, at // experts) for at in (outer, to_outer))  # type: ignore[return-value]


def chosen_types(before: TensorType, after: TensorType) -> tuple[TensorType, ...]:
    """Return the types of what an exchange reads beside rows of a type, which it makes rows of another."""
    return chosen_type(before), chosen_type(after)


def exchange_rows(pieces: Sequence[Any], args: Sequence[Any]) -> list[torch.Tensor]:
    """Return what each rank of a group holds after an exchange."""
    ranks = len(pieces)
    experts = max(before.shape[0] for _, before, _ in pieces), max(after.shape[0] for _, _, after in pieces)
    (dim, outer), (to_dim, to_outer) = sides(args, max(experts))
    results = []
    for rank, (_, _, after) in enumerate(pieces):
        # after the exchange a rank has, of each other one, the rows of its own part of what that one had
        taken = rows_by_rank(after, ranks, dim, outer)
        sent = [rows[rows_by_rank(before, ranks, to_dim, to_outer)[rank]] for rows, before, _ in pieces]
        made = sent[0].new_empty(sum(map(len, sent)), *sent[0].shape[1:])
        for at, rows in zip(taken, sent, strict=True):
            made[at] = rows
        results.append(made)
    return results
