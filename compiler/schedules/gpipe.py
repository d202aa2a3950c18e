"""GPipe: every forward of a step, then every backward (Huang et al. 2019, arXiv:1811.06965)."""

from __future__ import annotations

from ..program.actions import Action


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Return the work of each rank. Each of p ranks is idle for (p - 1)(F + B), and holds what backward needs of every
    microbatch.

    >>> from parc.compiler.schedules import timelines
    >>> from parc.compiler.schedules.timeline import draw, simulate
    >>> print(draw(simulate(timelines("gpipe", 4, 4))))
    pp0 F0 F1 F2 F3                            B0─── B1─── B2─── B3───  idle 43 %
    pp1    F0 F1 F2 F3                   B0─── B1─── B2─── B3───        idle 43 %
    pp2       F0 F1 F2 F3          B0─── B1─── B2─── B3───              idle 43 %
    pp3          F0 F1 F2 F3 B0─── B1─── B2─── B3───                    idle 43 %
    """
    every = range(microbatches)
    return tuple(
        (*(Action(rank, "F", m) for m in every), *(Action(rank, "B", m) for m in every)) for rank in range(stages)
    )
