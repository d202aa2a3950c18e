"""1F1B: each backward as soon as it is possible (PipeDream-flush, Narayanan et al. 2021, arXiv:2006.09503)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ..program.actions import Action


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Return the work of each rank. Each of p ranks is idle for (p - 1)(F + B), as in GPipe; rank r holds min(m, p - r)
    of m microbatches.

    >>> from parc.compiler.schedules import timelines
    >>> from parc.compiler.schedules.timeline import draw, simulate
    >>> print(draw(simulate(timelines("1f1b", 4, 4))))
    pp0 F0 F1 F2 F3                   B0───    B1───    B2───    B3───  idle 43 %
    pp1    F0 F1 F2             B0─── F3 B1───    B2───    B3───        idle 43 %
    pp2       F0 F1       B0─── F2 B1─── F3 B2───    B3───              idle 43 %
    pp3          F0 B0─── F1 B1─── F2 B2─── F3 B3───                    idle 43 %

    Raises:
        ValueError: fewer microbatches than ranks: the first would run out of forwards before its first backward, as in
            GPipe.
    """
    if microbatches < stages:
        raise ValueError(
            f"`1f1b` on {stages} ranks wants at least {stages} microbatches, not {microbatches}: write"
            f" `microbatches {stages}` or more, or choose `gpipe`, which takes any number"
        )
    timelines = []
    for rank in range(stages):
        forwards, backwards = ([Action(rank, kind, m) for m in range(microbatches)] for kind in ("F", "B"))
        timelines.append(alternate(forwards, backwards, stages - 1 - rank))
    return tuple(timelines)


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> tuple[Action, ...]:
    """Return the work of a rank: ``ahead`` forwards, then a forward and a backward in turn, then the remaining
    backwards.

    >>> F, B = ([Action(0, kind, m) for m in range(3)] for kind in ("F", "B"))
    >>> " ".join(map(str, alternate(F, B, 1)))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    pairs = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
    return (*forwards[:ahead], *pairs, *backwards[max(len(forwards) - ahead, 0) :])
