"""Zero bubble: backwards in two phases, of which the second fills the time that 1F1B waits (Qi et al. 2023,
arXiv:2401.10241).

A backward is I, the gradients that the stage before waits for, and W, the gradients of weights, for which nobody waits.
W of a microbatch comes some microbatches after its I.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..program.actions import ACTIONS, BACKWARD, FORWARD, Action, StageRanks, one_step, phases_of


def zb_h1(stages: int, microbatches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Return the work of each rank. Each of p ranks is idle for (p - 1)(F + I - W), and holds at most p microbatches,
    as the first rank of 1F1B does.

    >>> from parc.compiler.schedules import timelines
    >>> from parc.compiler.schedules.timeline import draw, simulate
    >>> print(draw(simulate(timelines("zb-h1", 4, 4))))
    pp0 F0 F1 F2 F3          I0 W0 I1 W1 I2 W2 I3 W3  idle 20 %
    pp1    F0 F1 F2       I0 F3 I1 W0 I2 W1 I3 W2 W3  idle 20 %
    pp2       F0 F1    I0 F2 I1 F3 I2 W0 I3 W1 W2 W3  idle 20 %
    pp3          F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3  idle 20 %

    Raises:
        ValueError: fewer microbatches than ranks.
    """
    return _one_stage_a_rank("zb-h1", stages, microbatches, 1)


def zb_h2(stages: int, microbatches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Return the work of each rank, which starts twice as many microbatches ahead as `zb-h1`. Each of p ranks is idle
    for (p - 1) max(F, F + I - 2 W), and holds at most 2p - 1 microbatches.

    >>> from parc.compiler.schedules import timelines
    >>> from parc.compiler.schedules.timeline import draw, simulate
    >>> print(draw(simulate(timelines("zb-h2", 3, 6))))
    pp0 F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5        idle 10 %
    pp1    F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5     idle 10 %
    pp2       F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5  idle 10 %

    Raises:
        ValueError: fewer microbatches than twice the ranks.
    """
    return _one_stage_a_rank("zb-h2", stages, microbatches, 2)


def _one_stage_a_rank(name: str, stages: int, microbatches: int, laps: int) -> tuple[tuple[Action, ...], ...]:
    """Return the work of ranks that begin ``laps`` times as many forwards ahead as in 1F1B. Rank r makes the gradients
    of weights ``laps`` r microbatches behind those of inputs."""
    if microbatches < laps * stages:
        times = "at least" if laps == 1 else "twice as many microbatches as ranks, at least"
        raise ValueError(
            f"`{name}` on {stages} ranks wants {times} {laps * stages} microbatches, not {microbatches}: write"
            f" `microbatches {laps * stages}` or more, or choose `gpipe`, which takes any number"
        )
    timelines = []
    for rank in range(stages):
        forwards, inputs, weights = ([Action(rank, kind, m) for m in range(microbatches)] for kind in "FIW")
        timelines.append(weights_later(forwards, inputs, weights, laps * (stages - 1 - rank), laps * rank))
    return tuple(timelines)


def weights_later(
    forwards: Sequence[Action], inputs: Sequence[Action], weights: Sequence[Action], ahead: int, behind: int
) -> tuple[Action, ...]:
    """Return the work of a rank: ``ahead`` forwards, then a forward, an I, and the W of ``behind`` microbatches before
    it, in turn.

    >>> F, I, W = ([Action(0, kind, m) for m in range(3)] for kind in "FIW")
    >>> " ".join(map(str, weights_later(F, I, W, 1, 1)))
    '0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2'
    """
    order = [*forwards[:ahead]]
    for at, action in enumerate(inputs):
        order += forwards[ahead + at : ahead + at + 1]
        order.append(action)
        order += weights[at - behind : at - behind + 1] if at >= behind else ()
    return (*order, *weights[max(len(inputs) - behind, 0) :])


def split_last(work: Sequence[Sequence[Action]], ranks: StageRanks) -> tuple[tuple[Action, ...], ...]:
    """Return the work of each rank with I and W in the place of a B whose result another rank waits for, in two cases:
    no other microbatch of its own rank waits for backward, so that W delays nobody, and takes no memory beside others;
    or it is the last of its stage, whose gradients are summed over data ranks before the rank goes on.

    >>> rows = "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"
    >>> work = [[Action.parse(word) for word in row.split()] for row in rows]
    >>> [" ".join(map(str, row)) for row in split_last(work, (0, 1))]
    ['0F0 0F1 0B0 0B1', '1F0 1I0 1W0 1F1 1I1 1W1']
    """
    to, split = ACTIONS[BACKWARD].to, list[tuple[Action, ...]]()
    for actions in work:
        order, waiting = list[Action](), set[tuple[int, int, bool]]()
        last = {action.stage: action for action in one_step(actions) if action.accumulates}
        for action in (action for action in actions if action.ahead):  # done beside the step before
            piece = (action.stage, action.microbatch, False)
            (waiting.discard if action.accumulates else waiting.add)(piece)
        for action in actions:
            piece, neighbour = (action.stage, action.microbatch, action.ahead), action.stage + to
            if action.kind == FORWARD:
                waiting.add(piece)
            elif action.accumulates:
                waiting.discard(piece)
            sends = neighbour >= 0 and ranks[neighbour] != ranks[action.stage]
            alone = action.kind == BACKWARD and sends and (not waiting or last[action.stage] == action)
            kinds = phases_of(BACKWARD) if alone else (action.kind,)
            order += (replace(action, kind=kind) for kind in kinds)
        split.append(tuple(order))
    return tuple(split)
