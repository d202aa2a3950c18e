"""PipeDream-2BW: ranks do not drain between steps, and a step computes with the weights before the last update
(Narayanan et al. 2021, arXiv:2006.09503)."""

from __future__ import annotations

from ..program.actions import Action
from .one_f_one_b import one_f_one_b


def asynchronous(stages: int, microbatches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Return the work of each rank, in the order of 1F1B.

    Raises:
        ValueError: fewer microbatches than ranks.
    """
    return one_f_one_b(stages, microbatches, chunks, "async")
