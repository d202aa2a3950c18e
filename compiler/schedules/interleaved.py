"""Interleaved 1F1B: each rank has several stages, which follow each other in laps (Narayanan et al. 2021,
arXiv:2104.04473)."""

from __future__ import annotations

from collections.abc import Iterator

from ..program.actions import Action
from .one_f_one_b import alternate
from .zero_bubble import weights_later


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
    timelines, ranks = [], stages // chunks
    for rank in range(ranks):
        forwards, backwards = _in_rounds("interleaved", rank, ranks, microbatches, chunks, "FB")
        timelines.append(alternate(forwards, backwards, (chunks - 1) * ranks + 2 * (ranks - 1 - rank)))
    return tuple(timelines)


def interleaved_zb(stages: int, microbatches: int, chunks: int) -> tuple[tuple[Action, ...], ...]:
    """Return the work of each rank, with backwards in two phases as in `zb-h1`. Each of p ranks with v chunks is idle
    for (p - 1)(F + I - W) of one chunk, and holds at most v p microbatches of a chunk.

    >>> from parc.compiler.schedules import timelines
    >>> from parc.compiler.schedules.timeline import draw, simulate
    >>> print(draw(simulate(timelines("interleaved-zb", 4, 2, chunks=2))))
    pp0 0F0 0F1 2F0 2F1     2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1  idle 8 %
    pp1     1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1  idle 8 %

    Raises:
        ValueError: microbatches do not make whole rounds.
    """
    timelines, ranks = [], stages // chunks
    for rank in range(ranks):
        forwards, inputs, weights = _in_rounds("interleaved-zb", rank, ranks, microbatches, chunks, "FIW")
        timelines.append(weights_later(forwards, inputs, weights, chunks * ranks - 1 - rank, rank))
    return tuple(timelines)


def _in_rounds(name: str, rank: int, ranks: int, microbatches: int, chunks: int, kinds: str) -> Iterator[list[Action]]:
    """Yield the work of each kind of one rank, in rounds of as many microbatches as there are ranks: a chunk after the
    other, in backward from the last chunk on.

    Raises:
        ValueError: microbatches do not make whole rounds.
    """
    if microbatches % ranks:
        below = microbatches - microbatches % ranks
        near = " or ".join(f"`microbatches {m}`" for m in (below, below + ranks) if m)
        raise ValueError(
            f"`{name}` does rounds of {ranks} microbatches on {ranks} ranks, and {microbatches} are no whole"
            f" number of rounds: write {near}, or choose `looped`, which takes any number"
        )
    rounds = range(0, microbatches, ranks)
    laps = [(chunk, m) for first in rounds for chunk in range(chunks) for m in range(first, first + ranks)]
    for kind in kinds:
        places = ((chunk if kind == "F" else chunks - 1 - chunk, m) for chunk, m in laps)
        yield [Action(chunk * ranks + rank, kind, m) for chunk, m in places]
