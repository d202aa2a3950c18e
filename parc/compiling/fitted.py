"""The choice that a ``recompute … fit`` line has made, and its like for a model with fewer blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from parc.compiler.ops.recompute import RecomputeLine
from parc.compiler.program.blocks import starred

POLICIES: tuple[frozenset[str] | None, ...] = (None, frozenset({"products"}), frozenset())
"""The words of the ``keep`` of each policy for a block; None where no line counts for it."""


@dataclass(frozen=True, slots=True)
class RoleFit:
    """The choice for the blocks of one role: their number by policy, the peak, the share of the step's multiply-adds
    that is computed twice, and the peak of the next choice, which computes less twice and does not fit."""

    role: str
    counts: tuple[int, ...]
    peak_bytes: int
    again: float
    next_peak_bytes: int | None

    @property
    def facts(self) -> dict[str, Any]:
        """The choice as a row of the report."""
        kept, selective, full = self.counts
        return {"role": self.role, "kept": kept, "selective": selective, "full": full, "peak_bytes": self.peak_bytes,
                "again": self.again, "next_peak_bytes": self.next_peak_bytes}  # fmt: skip


_BlockPlace = tuple[int, bool]
"""A block's policy, and whether it is behind the first stage: blocks of later ones read what was sent to them."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """The policies that a line has chosen, by blocks in the order in which they run, and the stages of the blocks."""

    line: RecomputeLine
    policies: Mapping[str, int]
    stages: Mapping[str, int]
    roles: tuple[RoleFit, ...] = ()

    def smaller(self, stages: Mapping[str, int]) -> Fitted:
        """Return the choice for a model with other numbers of these blocks, of which the stages are given. Every two
        that follow one another are as two neighbours here, and every such pair is there, if there are blocks enough."""
        policies: dict[str, int] = {}
        for kind in dict.fromkeys(map(starred, stages)):
            there = [block for block in stages if starred(block) == kind]
            chosen = condensed(self._places(kind), [stages[block] > 0 for block in there])[0]
            policies |= zip(there, chosen, strict=True)
        return replace(self, policies=policies, stages=stages)

    def least_blocks(self, stages: int) -> dict[str, int]:
        """Return the least number of blocks of each kind with which a smaller model of so many stages has every pair of
        neighbours."""
        kinds = dict.fromkeys(map(starred, self.policies))
        return {kind: self._least(self._places(kind), stages) for kind in kinds}

    def _least(self, places: Sequence[_BlockPlace], parts: int) -> int:
        sizes = range(parts, len(places) + parts, parts)
        return next((n for n in sizes if condensed(places, [at * parts >= n for at in range(n)])[1]), len(places))

    def _places(self, kind: str) -> list[_BlockPlace]:
        return [(policy, self.stages[block] > 0) for block, policy in self.policies.items() if starred(block) == kind]


def condensed(places: Sequence[_BlockPlace], behind: Sequence[bool]) -> tuple[Sequence[int], bool]:
    """Return policies for fewer blocks, each in the first stage or ``behind`` it, with the same pairs of neighbours and
    the same first and last block; and whether there are blocks enough for that.

    >>> condensed([(2, False)] * 3 + [(0, False)] * 4, [False] * 4)
    ((2, 2, 0, 0), True)
    """
    if [later for _, later in places] == list(behind):
        return [policy for policy, _ in places], True
    wanted = frozenset(pairwise(places))
    ways: dict[tuple[_BlockPlace, frozenset[tuple[_BlockPlace, _BlockPlace]]], tuple[int, ...]] = {}
    for at, later in enumerate(behind):
        if at == 0:
            ways = {(place, frozenset()): (place[0],) for place in places[:1] if place[1] == later}
            continue
        ways = {
            (after, seen | {(before, after)}): (*way, after[0])
            for (last, seen), way in ways.items()
            for before, after in sorted(wanted) if before == last and after[1] == later
        }  # fmt: skip
    if not ways:
        return [0] * len(behind), False
    seen, ends, way = max((len(seen), last == places[-1], way) for (last, seen), way in ways.items())
    return way, ends and seen == len(wanted)


def report_rows(fitted: Fitted | None) -> dict[str, Any]:
    """Return the choice in the report's form; nothing where no line chooses."""
    if fitted is None:
        return {}
    roles = [role.facts for role in fitted.roles]
    return {"recompute": {"line": fitted.line.line, "fit": fitted.line.fit, "roles": roles}}
