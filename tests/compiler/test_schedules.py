"""Schedules over all small sizes: proved, compared with torch's lists, idle and live as published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from unittest import mock

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from parc.compiler.program.actions import Action, stages_in_turn
from parc.compiler.schedules import SCHEDULES, problem, timelines
from parc.compiler.schedules.timeline import peak_live, simulate
from parc.compiler.verify.communication import check_timelines
from tests.draws import wide

Timelines = Mapping[str, Sequence[Action]]
Sizes = tuple[str, int, int, int]


LIMITS = pytest.mark.parametrize("limits", [(5, 10), wide((8, 16))])
"""Most ranks and microbatches."""


def sizes(limits: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Return all numbers of ranks, microbatches and chunks: of these there are at most 3."""
    ranks, microbatches = limits
    return [(p, m, v) for p in range(1, ranks + 1) for m in range(1, microbatches + 1) for v in range(1, 4)]


@cache
def accepted(limits: tuple[int, int]) -> Mapping[Sizes, Timelines]:
    """Return every schedule of these sizes that is made: by its name, ranks, microbatches and chunks."""
    made = {}
    for name in SCHEDULES:
        for p, m, v in sizes(limits):
            with suppress(ValueError):
                made[name, p, m, v] = timelines(name, p * v, m, v, also=["COUNT"] * (m % 2 == 0))
    return made


def work_of(actions: Sequence[Action]) -> list[Action]:
    return [action for action in actions if action.works]


@LIMITS
def test_sizes_are_accepted_that_the_schedules_are_published_for(limits: tuple[int, int]) -> None:
    one_rank = [(p, m, v) for p, m, v in sizes(limits) if p > 1 or v == 1]
    expected = {("gpipe", p, m, v) for p, m, v in one_rank if v == 1}
    expected |= {("1f1b", p, m, v) for p, m, v in one_rank if v == 1 and m >= p}
    expected |= {("interleaved", p, m, v) for p, m, v in one_rank if v > 1 and m % p == 0}
    expected |= {("looped", p, m, v) for p, m, v in one_rank}
    assert set(accepted(limits)) == expected


@LIMITS
def test_every_schedule_is_proved(limits: tuple[int, int]) -> None:
    for (name, p, m, v), made in accepted(limits).items():
        assert not check_timelines(made, stages_in_turn(p * v, p), m, also=["COUNT"] * (m % 2 == 0)), (name, p, m, v)


@LIMITS
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), wide(1, 1), (3, 2)])
def test_ranks_are_idle_as_published_to_the_slot(forward: int, backward: int, limits: tuple[int, int]) -> None:
    """The idle time is (p - 1)(F + B), divided by v for ranks of v chunks. Each is the time of one stage, as F and B
    are here."""
    for (name, p, m, v), made in accepted(limits).items():
        if name == "looped" and m < p:
            continue  # microbatches run out before the loop closes
        played = simulate(made, forward, backward)
        assert {played.idle(role) for role in made} == {(p - 1) * (forward + backward)}, (name, p, m, v)


@LIMITS
def test_ranks_hold_as_many_microbatches_as_published(limits: tuple[int, int]) -> None:
    for (name, p, m, v), made in accepted(limits).items():
        live = [peak_live(actions) for actions in made.values()]
        if name == "1f1b":
            assert live == [min(m, p - rank) for rank in range(p)]
        elif name == "interleaved":
            assert live[0] == min(p * v + p - 1, m * v)  # p(1 + (p - 1) / (pv)) microbatches of v chunks
            assert live == sorted(live, reverse=True)
        else:
            assert live == [m * v] * p


@LIMITS
@pytest.mark.parametrize(
    ("name", "theirs"),
    [("gpipe", "GPipe"), ("1f1b", "1F1B"), ("interleaved", "Interleaved1F1B"), ("looped", "LoopedBFS")],
)
def test_torch_lists_the_same_work(
    name: str, theirs: str, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mock, "create_autospec", cache(mock.create_autospec))  # slow, and the same for all sizes
    compared = 0
    for (other, p, m, v), made in accepted(limits).items():
        if other != name or p < 2 or (name == "looped" and v < 2):
            continue
        listed = get_schedule_ops(theirs, p, m, v)
        rows = [[str(action) for action in row if action and str(action)[-1].isdigit()] for row in listed]
        if name == "1f1b":  # it numbers the forwards of the last rank from 1
            last = [Action.parse(text) for text in rows[-1]]
            rows[-1] = [str(Action(a.stage, a.kind, a.microbatch - (a.kind == "F"))) for a in last]
        assert [list(map(str, work_of(actions))) for actions in made.values()] == rows, (p, m, v)
        compared += 1
    assert compared > 20


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "chunks", "why"),
    [
        ("zb-h1", 4, 8, 1, "there is no schedule `zb-h1`: choose `gpipe`, `1f1b`, `interleaved`, `looped`, or `table`"),
        ("gpipe", 4, 10**9, 1, "4 stages with 1000000000 microbatches are over 1,000,000 forwards: write fewer"),
        ("1f1b", 4, 8, 2, "`1f1b` has one stage a rank, not 2 chunks: remove `chunks`, or choose `interleaved`"),
        ("1f1b", 4, 3, 1, "on 4 ranks wants at least 4 microbatches, not 3: write `microbatches 4` or more, or choose"),
        ("interleaved", 4, 8, 1, "`interleaved` has 2 or more stages a rank: write `chunks 2`, or choose `1f1b`"),
        ("interleaved", 8, 2, 2, "2 are no whole number of rounds: write `microbatches 4`, or choose `looped`"),
        ("interleaved", 8, 6, 2, "write `microbatches 4` or `microbatches 8`, or choose `looped`"),
        ("interleaved", 7, 8, 2, "7 stages do not divide into 2 chunks"),
        ("looped", 2, 8, 2, "2 stages in 2 chunks are on one rank"),
    ],
)
def test_sizes_that_a_schedule_does_not_take_are_refused(
    name: str, stages: int, microbatches: int, chunks: int, why: str
) -> None:
    found = problem(name, stages, microbatches, chunks)
    assert found is not None and why in found, found
