"""PipeDream-2BW: a rank begins the next step before it ends this one, so a step computes with the weights before the
last update (Narayanan et al. 2021, arXiv:2006.09503)."""

from __future__ import annotations

from itertools import chain

from ..program.actions import Action


def asynchronous(stages: int, microbatches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Return the work of each rank between two updates, in which ``F0+`` is of the next step: as many forwards and
    backwards as there are microbatches, in turn.

    With 2p - 2 microbatches or more on p ranks, no rank waits, though all meet once a step for its loss and its norm: a
    result is made a backward or a forward before it is read. Rank r holds 2(p - r) - 1 microbatches. With fewer, it
    holds those of 1F1B, p - r, and waits for at most two forwards a step, if a backward takes as long.

    >>> from parc.compiler.schedules import timelines
    >>> from parc.compiler.schedules.timeline import draw, simulate
    >>> print(draw(simulate(timelines("async", 3, 4), steps=2)))
    pp0 F0+ B0───── F1+ B1───── F2+ B2───── F3+ B3───── F0+ B0───── F1+ B1───── F2+ B2───── F3+ B3─────  idle 0 %
    pp1 F3─ B1───── F0+ B2───── F1+ B3───── F2+ B0+──── F3─ B1───── F0+ B2───── F1+ B3───── F2+ B0+────  idle 0 %
    pp2 F2─ B2───── F3─ B3───── F0+ B0+──── F1+ B1+──── F2─ B2───── F3─ B3───── F0+ B0+──── F1+ B1+────  idle 0 %

    Raises:
        ValueError: fewer microbatches than ranks: a rank would begin a step before the last but one has ended.
    """
    if microbatches < stages:
        raise ValueError(
            f"`async` on {stages} ranks wants at least {stages} microbatches, not {microbatches}: write"
            f" `microbatches {stages}` or more"
        )
    timelines = []
    for rank in range(stages):
        waits = microbatches < 2 * stages - 2
        backwards = -(-2 * rank // 3) if waits else rank  # a backward takes as long as two forwards
        forwards = backwards + (stages - 1 - rank) * (1 if waits else 2)
        pairs = (
            (_of_two_steps(rank, kind, done + at, microbatches) for kind, done in (("F", forwards), ("B", backwards)))
            for at in range(microbatches)
        )
        timelines.append(tuple(chain.from_iterable(pairs)))
    return tuple(timelines)


def _of_two_steps(rank: int, kind: str, number: int, microbatches: int) -> Action:
    """Return a piece of work by its number, counted from the first of a step on into the next one."""
    return Action(rank, kind, number % microbatches, number >= microbatches)
