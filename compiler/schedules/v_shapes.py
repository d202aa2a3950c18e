"""V shapes: each rank has two stages, rank r those of numbers r and 2p - 1 - r. So a microbatch goes down the ranks and
comes back up, and the first rank has the loss. Backwards are in two phases, I and W.
"""

from __future__ import annotations

from collections import Counter

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

    Raises:
        ValueError: fewer microbatches than twice the ranks.
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
