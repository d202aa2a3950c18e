"""Interleaved 1F1B: each rank has several stages, which follow each other in laps (Narayanan et al. 2021,
arXiv:2104.04473)."""

from __future__ import annotations

from ..program.actions import Action
from .one_f_one_b import alternate


def interleaved(stages: int, microbatches: int, chunks: int) -> tuple[tuple[Action, ...], ...]:
    """Return the work of each rank. Each of p ranks with v chunks is idle for (p - 1)(F + B) / v, where F and B are
    those of a whole rank. Rank 0 holds p(1 + (p - 1) / (pv)) microbatches of all its chunks.

    Ranks do rounds of p microbatches, a chunk after the other.

    >>> from parc.compiler.schedules import timelines
    >>> from parc.compiler.schedules.timeline import draw, simulate
    >>> print(draw(simulate(timelines("interleaved", 4, 4, chunks=2), backward=1)))
    pp0 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3  idle 11 %
    pp1     1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3      idle 11 %

    Raises:
        ValueError: microbatches do not make whole rounds.
    """
    ranks = stages // chunks
    if microbatches % ranks:
        below = microbatches - microbatches % ranks
        near = " or ".join(f"`microbatches {m}`" for m in (below, below + ranks) if m)
        raise ValueError(
            f"`interleaved` does rounds of {ranks} microbatches on {ranks} ranks, and {microbatches} are no whole"
            f" number of rounds: write {near}, or choose `looped`, which takes any number"
        )
    rounds = range(0, microbatches, ranks)
    laps = [(chunk, m) for first in rounds for chunk in range(chunks) for m in range(first, first + ranks)]
    timelines = []
    for rank in range(ranks):
        forwards = [Action(chunk * ranks + rank, "F", m) for chunk, m in laps]
        backwards = [Action((chunks - 1 - chunk) * ranks + rank, "B", m) for chunk, m in laps]
        timelines.append(alternate(forwards, backwards, (chunks - 1) * ranks + 2 * (ranks - 1 - rank)))
    return tuple(timelines)
