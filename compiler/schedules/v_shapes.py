"""V shapes: each rank has two stages, rank r those of numbers r and 2p - 1 - r. So a microbatch goes down the ranks and
comes back up, and the first rank has the loss. Backwards are in two phases, I and W.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ..program.actions import Action


class _Rank:
    """The order of one rank's work under construction: pieces of its two chunks, each the next microbatch's."""

    def __init__(self, rank: int, ranks: int, microbatches: int) -> None:
        self.stages, self.microbatches = (rank, 2 * ranks - 1 - rank), microbatches
        self.order: list[Action] = []
        self.count: Counter[tuple[str, int]] = Counter()
        self.waiting: list[tuple[int, int]] = []
        """The pairs of chunk and microbatch of which W is still to come, in the order of their I."""

    def do(self, work: str, times: int = 1) -> None:
        """Add pieces such as ``F0 I1 W``, some times over: the kind of work and the chunk. W without a chunk is of the
        I that waits longest. What the rank has done for all microbatches is left out."""
        for word in work.split() * max(times, 0):
            kind, chunk = word[0], int(word[1]) if word[1:] else 0
            if kind == "W":
                first = next((pair for pair in self.waiting if not word[1:] or pair[0] == chunk), None)
                if first is not None:
                    self.waiting.remove(first)
                    self.order.append(Action(self.stages[first[0]], kind, first[1]))
            elif (m := self.count[kind, chunk]) < self.microbatches:
                self.count[kind, chunk] += 1
                self.order.append(Action(self.stages[chunk], kind, m))
                if kind == "I":
                    self.waiting.append((chunk, m))

    def rest(self) -> tuple[Action, ...]:
        """Add every W that still waits, and return the order."""
        self.do("W", len(self.waiting))
        return tuple(self.order)


def zbv(stages: int, microbatches: int, chunks: int = 2) -> tuple[tuple[Action, ...], ...]:
    """Return the work of each rank of ZB-V (Qi et al. 2023, arXiv:2401.10241). Each of p ranks is idle for p - 1 slots
    where F, I and W of a chunk take one, and holds at most 2p microbatches of a chunk: as many bytes as 1F1B.

    >>> from parc.compiler.schedules import timelines
    >>> from parc.compiler.schedules.timeline import draw, simulate
    >>> print(draw(simulate(timelines("zbv", 4, 4, chunks=2))))
    pp0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3      idle 4 %
    pp1     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3  idle 4 %
    """
    ranks, work = stages // 2, []
    for rank in range(ranks):
        order = _Rank(rank, ranks, microbatches)
        order.do("F0", 2 * (ranks - rank) - 1)
        order.do("F1 F0", rank)
        order.do("F1 I1 W1", ranks - rank)
        order.do("F0 I0 W0 F1 I1 W1", microbatches - ranks)
        order.do("I0 I1", rank)
        order.do("I0 W0", ranks - rank)
        work.append(order.rest())
    return tuple(work)


def dualpipev(stages: int, microbatches: int, chunks: int = 2) -> tuple[tuple[Action, ...], ...]:
    """Return the work of each rank of DualPipeV, the half of DualPipe that holds each stage once (DeepSeek-V3, 2024,
    arXiv:2412.19437). A forward of one chunk stands beside a backward of the other, whose messages it
    may hide. Each of p ranks holds at most 2p + 1 microbatches of a chunk.

    >>> from parc.compiler.schedules import timelines
    >>> from parc.compiler.schedules.timeline import draw, simulate
    >>> print(draw(simulate(timelines("dualpipev", 4, 4, chunks=2))))
    pp0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3I1 3W1 3F2 0I0 0W0 3I2 3W2 3F3 0I1 0W1 3I3 3W3 0I2 0W2     0I3 0W3  idle 4 %
    pp1     1F0 2F0 1F1 2F1 1F2 2I0 2W0 2F2 1I0 1W0 1F3 2I1 2W1 2F3 1I1 1W1 2I2 2W2 1I2 1W2 2I3 1I3 2W3 1W3  idle 4 %

    Raises:
        ValueError: fewer microbatches than stages.
    """
    ranks, work = stages // 2, []
    if microbatches < stages:
        raise ValueError(
            f"`dualpipev` of {stages} stages wants at least {stages} microbatches, not {microbatches}: write"
            f" `microbatches {stages}` or more, or choose `zbv`"
        )
    for rank in range(ranks):
        order, last = _Rank(rank, ranks, microbatches), ranks - 1 - rank
        order.do("F0", 2 * last)
        order.do("F0 F1", rank + 1)
        order.do("I1 W F1", last)
        order.do("F0 I1 W F1 I0 W", microbatches - stages + rank + 1)
        order.do("I1 W F1 I0 W", last)
        order.do("I1 W I0 W", (rank + 1) // 2)
        order.do("I1 W I0", (rank + 1) % 2)
        order.do("I1 I0", (rank + 1) // 2)
        order.do("W I0", last)
        work.append(order.rest())
    return tuple(work)


# ---- V shapes in less memory (Qi et al. 2024, arXiv:2405.15362): the work of a microbatch at fixed slots, repeated
# every six slots. The fewer slots lie between a rank and the next one, the less time a microbatch is held, and the more
# often ranks wait where F, I and W take different times.

_ALIKE = {"F": 1, "I": 1, "W": 1}
_PERIOD = 6
"""The slots of one microbatch on a rank: F, I and W of two chunks."""
_AHEAD = 8
"""The pieces, for each stage, among which a rank that would wait looks for one that it can do."""


def v_half(stages: int, microbatches: int, chunks: int = 2) -> tuple[tuple[Action, ...], ...]:
    """Return the work of each rank. Each of p ranks holds at most p + 2 microbatches of a chunk, of 2p in 1F1B. Where
    F, I and W take one slot, a rank is idle for about half as long as in 1F1B.

    >>> from parc.compiler.schedules import timelines
    >>> from parc.compiler.schedules.timeline import draw, simulate
    >>> print(draw(simulate(timelines("v-half", 4, 3, chunks=2))))
    pp0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2      idle 5 %
    pp1     1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2  idle 5 %
    """
    ranks = stages // 2
    order = _in_slots(_first_slots(ranks, strides=(1, 2, 1, 2), turns=(1, 3, 3)), microbatches)
    for costs in ({"F": 2, "I": 2, "W": 1}, {"F": 3, "I": 3, "W": 2}):
        order = _Filling(order, ranks + 2, costs).run()
    order = [[action for action in actions if action.kind != "W"] for actions in order]  # in what is waited for now
    return _Filling(order, ranks + 2, _ALIKE).run()


def v_min(stages: int, microbatches: int, chunks: int = 2) -> tuple[tuple[Action, ...], ...]:
    """Return the work of each rank. Each of p ranks holds at most two thirds of p and two microbatches of a chunk, of
    2p in 1F1B. Where F, I and W take different times, ranks wait for each other in every microbatch: the idle time
    grows with their number.

    >>> from parc.compiler.schedules import timelines
    >>> from parc.compiler.schedules.timeline import draw, simulate
    >>> print(draw(simulate(timelines("v-min", 4, 3, chunks=2))))
    pp0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 0W0 3I1 3W1     0I1 0W1 3F2 3I2 3W2     0I2 0W2  idle 10 %
    pp1     1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2I1 1I1 2F2 2W1 1W1     2I2 1I2 2W2 1W2  idle 10 %
    """
    ranks = stages // 2
    # with a multiple of three ranks, work on the way down and on the way up would meet in one slot
    slots = _first_slots(ranks, strides=(1, 1, 1, 1), turns=(1, 1, 1) if ranks % 3 else (3, 1, 3))
    room = -(-2 * ranks // 3) + (1 if ranks % 3 == 1 else 2)
    order = _Filling(_in_slots(slots, microbatches), room, _ALIKE).run()
    return _Filling(order, room, _ALIKE).run()


def _first_slots(ranks: int, strides: tuple[int, ...], turns: tuple[int, ...]) -> list[dict[tuple[str, int], int]]:
    """Return the slot of each rank's F and I of the first microbatch, by kind and chunk. It goes down the ranks, up,
    down and up again, with a ``stride`` of slots from rank to rank each time, and ``turns`` between."""
    last = ranks - 1
    up = strides[0] * last + turns[0]
    down = up + strides[1] * last + turns[1]
    back = down + strides[2] * last + turns[2]
    return [
        {("F", 0): strides[0] * rank, ("F", 1): up + strides[1] * (last - rank), ("I", 1): down + strides[2] * rank,
         ("I", 0): back + strides[3] * (last - rank)} for rank in range(ranks)
    ]  # fmt: skip


def _in_slots(slots: Sequence[Mapping[tuple[str, int], int]], microbatches: int) -> Sequence[Sequence[Action]]:
    """Return the work of each rank but W in the order of its slots."""
    order, stages = [], 2 * len(slots)
    for rank, first in enumerate(slots):
        places = rank, stages - 1 - rank
        pieces = sorted((slot + _PERIOD * m, kind, chunk, m) for (kind, chunk), slot in first.items()
                        for m in range(microbatches))  # fmt: skip
        order.append([Action(places[chunk], kind, m) for _, kind, chunk, m in pieces])
    return order


class _Filling:
    """The work of ranks played on a clock: each does the first piece of its order that it can do, and puts off no piece
    for which it has no room. W that no order has yet comes where a rank would wait, or where it holds as many
    microbatches as it has ``room`` for. ``costs`` are the times of F, I and W."""

    def __init__(self, order: Sequence[Sequence[Action]], room: int, costs: Mapping[str, int]) -> None:
        self.todo, self.room, self.costs = [list(actions) for actions in order], room, costs
        self.stages = 1 + max(action.stage for actions in order for action in actions)
        self.complete = any(action.kind == "W" for actions in order for action in actions)
        self.free = [0] * len(order)
        self.live = [0] * len(order)
        self.waiting: list[list[Action]] = [[] for _ in order]
        self.ends: dict[Action, int] = {}
        self.done: list[list[Action]] = [[] for _ in order]

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Return the work of each rank in the order in which it is done."""
        now = 0
        while any(self.todo) or any(self.waiting):
            for rank, free in enumerate(self.free):
                if free <= now and (action := self._next(rank, now)) is not None:
                    self.done[rank].append(action)
                    self.free[rank] = self.ends[action] = now + self.costs[action.kind]
                    self.live[rank] += (action.kind == "F") - (action.kind == "W")
                    if action.kind == "I" and not self.complete:
                        self.waiting[rank].append(Action(action.stage, "W", action.microbatch))
            now = min(end for end in self.free if end > now)
        return tuple(map(tuple, self.done))

    def _next(self, rank: int, now: int) -> Action | None:
        """Take the piece that a rank does now out of its order; None if it waits."""
        todo = self.todo[rank]
        most = held = self.live[rank]
        for at, action in enumerate(todo[: _AHEAD * self.stages] if self.complete else todo[:1]):
            fits = action.kind != "F" or (most if at else held) < self.room
            if fits and all(self.ends.get(source, now + 1) <= now for source in self._sources(action)):
                return todo.pop(at)
            held += (action.kind == "F") - (action.kind == "W")
            most = max(most, held)
        return self.waiting[rank].pop(0) if self.waiting[rank] else None

    def _sources(self, action: Action) -> Iterator[Action]:
        """Yield the work whose results a piece reads."""
        stage, m = action.stage, action.microbatch
        if action.kind == "F" and stage:
            yield Action(stage - 1, "F", m)
        elif action.kind == "I":
            yield Action(stage, "F", m)
            if stage + 1 < self.stages:
                yield Action(stage + 1, "I", m)
        elif action.kind == "W":
            yield Action(stage, "I", m)
