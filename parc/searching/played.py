"""Played schedules: one order of all actions of all ranks, and the moments at which ranks hold most, so that arrays of
times and bytes, one number for each of many plans, are followed through a step at once."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import ge
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parc.compiler.program.actions import BACKWARD, FORWARD, Action, phases_of, send_kind, stage_ranks
from parc.compiler.schedules import timelines


class HeldByStage(NamedTuple):
    """The things that a rank holds of a stage: the microbatches whose activations are saved, those that wait for the
    second phase of backward, and 1 where gradients have been added up."""

    saved: int = 0
    deferred: int = 0
    sums: int = 0


def moments_of(actions: Sequence[Action]) -> Iterator[tuple[Action, Mapping[int, HeldByStage]]]:
    """Yield the actions of a rank that are no messages, with what it holds meanwhile of each stage: of other
    microbatches, and the sums into which the action itself adds.

    >>> actions = [Action.parse(word) for word in "0F0 0F1 0I0 0W0".split()]
    >>> [(str(action), *map(tuple, held.values())) for action, held in moments_of(actions)]
    [('0F0', (0, 0, 0)), ('0F1', (1, 0, 0)), ('0I0', (1, 0, 0)), ('0W0', (1, 0, 1))]
    """
    first, second = phases_of(BACKWARD)
    held = {action.stage: HeldByStage() for action in actions if action.works}
    begun = [action for action in actions if action.ahead]  # beside the step before
    for action in (*begun, *actions):
        if action.message is not None:
            continue
        if action.works:
            saved, deferred, sums = held[action.stage]
            saved, deferred = saved - (action.kind in (BACKWARD, first)), deferred - (action.kind == second)
            held[action.stage] = HeldByStage(saved, deferred, sums or int(action.accumulates))
        yield action, dict(held)
        if action.works:
            saved, deferred, sums = held[action.stage]
            held[action.stage] = HeldByStage(saved + (action.kind == FORWARD), deferred + (action.kind == first), sums)


def sums_twice(actions: Sequence[Action]) -> bool:
    """Return whether a role adds up gradients of the next step before it has updated by those of one."""
    return any(action.ahead and action.accumulates for action in actions)


WorkOfStage = tuple[int, str]
"""Work by its stage and kind."""
_WORK, _SEND, _RECEIVE = range(3)
Turn = tuple[int, int, Any]
"""One thing that a rank does: the rank, and ``_WORK`` with the work, or the side of a message with its number."""


@dataclass(frozen=True)
class RankMoments:
    """The moments of a rank at which it may hold most: no other one has the same work and holds at least as much of
    each stage. ``held`` has a row for each moment, with the three numbers of each of the rank's stages."""

    stages: tuple[int, ...]
    works: tuple[WorkOfStage, ...]
    held: NDArray[np.float64]
    ahead: bool
    """True where the rank begins work of the next step."""
    sums_twice: bool

    @classmethod
    def of(cls, actions: Sequence[Action]) -> RankMoments:
        """Return the moments of a rank's actions."""
        works = [action for action in actions if action.works]
        stages = tuple(sorted({action.stage for action in works}))
        of_work: dict[WorkOfStage, dict[tuple[int, ...], None]] = {}
        for action, held in moments_of(works):
            counts = tuple(number for stage in stages for number in held[stage])
            of_work.setdefault((action.stage, action.kind), {})[counts] = None
        rows = [(work, held) for work, several in of_work.items() for held in _largest(several)]
        return cls(
            stages, tuple(work for work, _ in rows), np.array([held for _, held in rows]),
            any(action.ahead for action in works), sums_twice(works),
        )  # fmt: skip

    def most(self, peaks: Mapping[WorkOfStage, Any], sizes: Mapping[int, tuple[Any, Any, Any]]) -> Any:
        """Return the most bytes beside state: ``peaks`` are those of each work, and ``sizes`` what a microbatch of a
        stage saves and defers, and the stage's sums of gradients."""
        of_stages = np.array(np.broadcast_arrays(*(size for stage in self.stages for size in sizes[stage])))
        of_works = np.array(np.broadcast_arrays(*(peaks[work] for work in self.works)))
        return (of_works + (self.held @ of_stages.reshape(len(of_stages), -1)).reshape(of_works.shape)).max(axis=0)


def _largest(rows: Collection[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield the rows of which no other one has at least as much everywhere."""
    for row in rows:
        if not any(other != row and all(map(ge, other, row)) for other in rows):
            yield row


@dataclass(frozen=True)
class PlayedSchedule:
    """A schedule: the rank of each stage, the turns of all ranks in one order in which each follows all that it waits
    for, how often a rank does each work, and its moments."""

    ranks: Sequence[int]
    turns: Sequence[Turn]
    works: Sequence[Mapping[WorkOfStage, int]]
    moments: Sequence[RankMoments]

    def ends(self, seconds: Mapping[WorkOfStage, Any], latency: Any, begun: Sequence[Any]) -> list[Any]:
        """Return when each rank has done its work: as ``simulate``, with arrays of times. A rank begins when it has
        ``begun``, and a message takes its ``latency``."""
        sent, now = list[Any](), [*begun]
        for rank, side, what in self.turns:
            if side == _WORK:
                now[rank] = now[rank] + seconds[what]
            elif side == _SEND:
                sent.append(now[rank] + latency)
            else:
                now[rank] = np.maximum(now[rank], sent[what])
        return now


@lru_cache(maxsize=1024)
def played(name: str, stages: int, microbatches: int, chunks: int) -> PlayedSchedule | str:
    """Return a schedule as it runs; or the reason why it does not accept these sizes, with the way out."""
    try:
        actions = [*timelines(name, stages, microbatches, chunks, as_run=True).values()]
    except ValueError as error:
        return str(error)
    works = [[action for action in of_rank if action.works] for of_rank in actions]
    return PlayedSchedule(
        stage_ranks(works), tuple(_turns(actions)),
        [Counter((action.stage, action.kind) for action in of_rank) for of_rank in works],
        [RankMoments.of(of_rank) for of_rank in actions],
    )  # fmt: skip


def _turns(actions: Sequence[Sequence[Action]]) -> Iterator[Turn]:
    at, sent = [0] * len(actions), dict[Action, int]()
    moved = True
    while moved:
        moved = False
        for rank, of_rank in enumerate(actions):
            while at[rank] < len(of_rank):
                action = of_rank[at[rank]]
                row = action.message
                if row is not None and row.sends:
                    yield rank, _SEND, sent.setdefault(action, len(sent))
                elif row is not None:
                    message = replace(action, stage=action.stage + row.to, kind=send_kind(row.work))
                    if message not in sent:
                        break
                    yield rank, _RECEIVE, sent[message]
                elif action.works:
                    yield rank, _WORK, (action.stage, action.kind)
                at[rank] += 1
                moved = True


@lru_cache(maxsize=4096)
def even_cuts(layers: int, extra: Sequence[float], ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the blocks of each stage, so that the busiest rank has least work: ``extra`` is what a stage has beside
    blocks, in blocks.

    >>> even_cuts(10, (1.0, 0, 0, 2.0), (0, 1, 2, 3))
    (3, 3, 3, 1)
    """
    cuts = [1] * len(ranks)
    stages: dict[int, list[tuple[int, int]]] = {}
    for stage, rank in enumerate(ranks):
        stages.setdefault(rank, []).append((1, stage))  # sorted: a heap
    work = [(round(sum(extra[stage] + blocks for blocks, stage in of_rank), 6), rank)
            for rank, of_rank in stages.items()]  # fmt: skip
    heapq.heapify(work)
    for _ in range(layers - len(ranks)):
        busy, rank = work[0]
        heapq.heapreplace(work, (round(busy + 1, 6), rank))
        blocks, stage = stages[rank][0]
        heapq.heapreplace(stages[rank], (blocks + 1, stage))
        cuts[stage] += 1
    return tuple(cuts)
