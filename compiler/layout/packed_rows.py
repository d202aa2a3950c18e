"""The exchange of packed rows of tokens between ranks that hold them by tokens and ranks that hold them by experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .placement import AxisType, Packed, Placement, Split, TensorType
from .stretches import Atom, count, is_zigzag, zigzag

EXCHANGE = "parc.exchange"
"""The collective by which packed rows change from a split over tokens to one over experts, or back."""
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A rank's packed rows, and ``chosen``, [experts, tokens], as it is split before and after an exchange."""


def chosen_placement(rows: Placement, packed: Packed) -> Placement:
    """Return the placement of ``chosen``, [experts, tokens], which marks the packed rows that are present."""
    assert packed is not None
    experts = packed[1]
    kinds: dict[str, AxisType] = dict.fromkeys((axis for axis, _ in rows.items()), "I")
    for outer, axis in rows.splits(0):
        kinds[axis] = Split(*_chosen_split(outer, experts))
    return rows.replace(kinds)


def _chosen_split(outer: Any, experts: int) -> tuple[int, Any]:
    """Return the split of ``chosen`` that a split of packed rows is: its dim, experts (0) or tokens (1), and its outer
    part; a zigzag stays one."""
    if count(outer) < experts:
        return 0, outer
    within = count(outer) // experts
    return 1, zigzag(within) if is_zigzag(outer) else within


def chosen_type(rows: TensorType) -> TensorType:
    """Return the type of ``chosen``, [experts, tokens], which marks the packed rows that are present."""
    assert rows.packed is not None
    experts = rows.packed[1]
    shape = experts, rows.shape[0] // experts
    return TensorType(torch.bool, shape, chosen_placement(rows.placement, rows.packed))


@dataclass(frozen=True, slots=True)
class RankOrder:
    """The order of packed rows by the rank of a group that has their tokens or experts."""

    sizes: list[int]
    """The number of rows of each rank."""
    places: torch.Tensor | None
    """The index among the packed rows of each row in this order; None where they lie in it."""

    def ordered(self, rows: torch.Tensor) -> torch.Tensor:
        """Return packed rows in the order of ranks."""
        return rows if self.places is None else rows.index_select(0, self.places)

    def packed(self, ordered: torch.Tensor) -> torch.Tensor:
        """Return rows in the order of ranks as they are packed."""
        if self.places is None:
            return ordered
        inverse = torch.empty_like(self.places)
        inverse[self.places] = torch.arange(len(inverse), device=inverse.device)
        return ordered.index_select(0, inverse)


def rows_by_rank(chosen: torch.Tensor, ranks: int, dim: int, outer: int) -> RankOrder:
    """Return the order by ranks of the packed rows of ``chosen``, of which a rank's part is part ``outer`` of a dim:
    experts (0) or tokens (1)."""
    if (dim, outer) == (0, 1):  # packed by expert
        return RankOrder(chosen.reshape(ranks, -1).sum(1).tolist(), None)
    part = chosen.shape[dim] // count(outer) // ranks
    parts = chosen.nonzero()[:, dim].div(part, rounding_mode="floor")
    deal = Atom(ranks, "", is_zigzag(outer))
    owners = deal.entry(parts.div(ranks, rounding_mode="floor"), parts % ranks)
    return RankOrder(owners.bincount(minlength=ranks).tolist(), owners.sort(stable=True)[1])


def sides(args: Sequence[Any], experts: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the splits of ``chosen`` before an exchange and after it. ``experts`` is the number of experts in
    ``chosen`` on the side that is split over tokens."""
    _, _, outer, _, to_outer = args[:5]
    return _chosen_split(outer, experts), _chosen_split(to_outer, experts)


def chosen_types(before: TensorType, after: TensorType) -> tuple[TensorType, ...]:
    """Return the types of ``chosen`` that an exchange reads beside its rows, as it is split before and after."""
    return chosen_type(before), chosen_type(after)


def orders(before: torch.Tensor, after: torch.Tensor, ranks: int, args: Sequence[Any]) -> tuple[RankOrder, RankOrder]:
    """Return the orders in which a rank sends its rows in an exchange, and in which it has those that it receives."""
    split_before, split_after = sides(args, max(before.shape[0], after.shape[0]))
    return rows_by_rank(before, ranks, *split_after), rows_by_rank(after, ranks, *split_before)


def exchange_rows(pieces: Sequence[Any], args: Sequence[Any]) -> list[torch.Tensor]:
    """Return what each rank of a group holds after an exchange.

    Raises:
        ValueError: a rank sends another one more or fewer rows than that one awaits.
    """
    of_ranks = [orders(before, after, len(pieces), args) for _, before, after in pieces]
    sent = [
        sending.ordered(rows).split(sending.sizes) for (rows, _, _), (sending, _) in zip(pieces, of_ranks, strict=True)
    ]
    results = []
    for rank, (_, coming) in enumerate(of_ranks):
        parts = [rows[rank] for rows in sent]
        if coming.sizes != [len(part) for part in parts]:
            raise ValueError(
                f"place {rank} of a group awaits {coming.sizes} rows of the others, which send other numbers"
            )
        results.append(coming.packed(torch.cat(parts)))
    return results
