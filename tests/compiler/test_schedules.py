"""Schedules over all small sizes: proved, compared with torch's lists, idle and live as published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from unittest import mock

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from parc.compiler.program.actions import Action, stages_in_turn
from parc.compiler.schedules import SCHEDULES, V_SHAPES, places_of, problem, timelines
from parc.compiler.schedules.timeline import peak_live, simulate
from parc.compiler.verify.communication import check_timelines
from tests.draws import wide

Timelines = Mapping[str, Sequence[Action]]
Sizes = tuple[str, int, int, int]


WHOLE = ("gpipe", "1f1b", "interleaved", "looped")
"""The schedules whose backwards are in one piece."""
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
    expected |= {(name, p, m, v) for name in ("1f1b", "async") for p, m, v in one_rank if v == 1 and m >= p}
    expected |= {("interleaved", p, m, v) for p, m, v in one_rank if v > 1 and m % p == 0}
    expected |= {("looped", p, m, v) for p, m, v in one_rank}
    expected |= {(f"zb-h{laps}", p, m, v) for laps in (1, 2) for p, m, v in one_rank if v == 1 and m >= laps * p}
    expected |= {("interleaved-zb", p, m, v) for p, m, v in one_rank if v > 1 and m % p == 0}
    expected |= {(name, p, m, v) for name in V_SHAPES for p, m, v in one_rank
                 if v == 2 and (name != "dualpipev" or m >= 2 * p)}  # fmt: skip
    assert set(accepted(limits)) == expected


@LIMITS
def test_every_schedule_is_proved(limits: tuple[int, int]) -> None:
    for (name, p, m, v), made in accepted(limits).items():
        also = [*["COUNT"] * (m % 2 == 0), "I", "W"]
        ranks = places_of(name, p * v, m, v)
        assert (ranks == stages_in_turn(p * v, p)) == (name not in V_SHAPES)
        assert not check_timelines(made, ranks, m, also=also), (name, p, m, v)


@LIMITS
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), wide(1, 1), (3, 2)])
def test_ranks_are_idle_as_published_to_the_slot(forward: int, backward: int, limits: tuple[int, int]) -> None:
    """The idle time is (p - 1)(F + B), divided by v for ranks of v chunks. Each is the time of one stage, as F and B
    are here."""
    for (name, p, m, v), made in accepted(limits).items():
        if name not in WHOLE or (name == "looped" and m < p):
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
        elif name in WHOLE:
            assert live == [m * v] * p


COSTS = [{"F": 1, "I": 1, "W": 1}, {"F": 4, "I": 5, "W": 3}, {"F": 4, "I": 6, "W": 2}, {"F": 2, "I": 2, "W": 1}]
"""Times of F, I and W of one stage."""
ROOM = {"zb-h1": lambda p: p, "zb-h2": lambda p: 2 * p - 1, "interleaved-zb": lambda p: 2 * p, "zbv": lambda p: 2 * p,
        "dualpipev": lambda p: 2 * p + 1, "v-half": lambda p: p + 2, "v-min": lambda p: -(-2 * p // 3) + 2}  # fmt: skip
"""The most microbatches of one stage that a rank holds: of 2p in 1F1B where it has two stages."""
MEASURED = {
    ("v-half", 4): (5, 33, 68, 15), ("v-half", 8): (17, 97, 174, 43), ("v-min", 4): (11, 141, 238, 53),
    ("v-min", 8): (27, 306, 504, 117), ("dualpipev", 4): (3, 18, 26, 9), ("dualpipev", 8): (7, 45, 66, 21),
}  # fmt: skip
"""The most slots that a rank is idle, at each of the ``COSTS``, with four times as many microbatches as ranks."""


def most_idle(timelines: Timelines, costs: Mapping[str, int]) -> float:
    played = simulate(timelines, work=lambda action: costs[action.kind])
    return max(played.idle(role) for role in timelines)


def closed_form(name: str, p: int, f: int, i: int, w: int) -> int | None:
    """The idle time of the slowest rank that a schedule with split backwards is published with, if there is one."""
    if name in ("zb-h1", "interleaved-zb"):
        return (p - 1) * (f + i - w)
    if name == "zb-h2":
        return (p - 1) * max(f, f + i - 2 * w)
    return {(1, 1, 1): p - 1, (2, 2, 1): 2 * (p - 1)}.get((f, i, w)) if name == "zbv" else None


@LIMITS
def test_ranks_with_split_backwards_wait_as_published_and_hold_no_more(limits: tuple[int, int]) -> None:
    for (name, p, m, v), made in accepted(limits).items():
        if name in WHOLE or name == "async":
            continue
        assert max(map(peak_live, made.values())) <= ROOM[name](p) * (v / 2 if name == "interleaved-zb" else 1)
        for costs in COSTS if name != "zbv" or m >= 2 * p else ():
            if (published := closed_form(name, p, *costs.values())) is not None:
                assert most_idle(made, costs) == published, (name, p, m, v, costs)


@LIMITS
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), wide(1, 1), (3, 2)])
def test_ranks_whose_steps_overlap_never_wait_though_they_meet_once_a_step(
    forward: int, backward: int, limits: tuple[int, int]
) -> None:
    """Each step begins on all ranks at one time, and all of them work to its end. Where microbatches are few, they wait
    for two forwards at most, if a backward takes as long, and hold no more than in 1F1B."""
    for (name, p, m, _), made in accepted(limits).items():
        if name != "async":
            continue
        played, live = simulate(made, forward, backward), [peak_live(actions) for actions in made.values()]
        if m >= 2 * p - 2:
            assert {played.idle(role) for role in made} == {0}
            assert simulate(made, forward, backward, steps=3).makespan == 3 * m * (forward + backward)
            assert live == [2 * (p - rank) - 1 for rank in range(p)]
        else:
            assert (forward, backward) != (1, 2) or max(played.idle(role) for role in made) <= 2
            assert live == [p - rank for rank in range(p)]


@pytest.mark.parametrize(("name", "p"), MEASURED)
def test_v_shapes_wait_no_longer_than_measured(name: str, p: int) -> None:
    made = timelines(name, 2 * p, 4 * p, 2)
    for costs, most in zip(COSTS, MEASURED[name, p], strict=True):
        assert most_idle(made, costs) <= most
    assert max(map(peak_live, made.values())) <= ROOM[name](p)


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
        ("zb-h3", 4, 8, 1, "there is no schedule `zb-h3`: choose `gpipe`, `1f1b`, `interleaved`, `zb-h1`, `zb-h2`"),
        ("async", 4, 3, 1, "`async` on 4 ranks wants at least 4 microbatches, not 3: write `microbatches 4` or more"),
        ("async", 4, 8, 2, "`async` has one stage a rank, not 2 chunks: remove `chunks`, or choose `interleaved`"),
        ("zb-h1", 4, 3, 1, "`zb-h1` on 4 ranks wants at least 4 microbatches, not 3: write `microbatches 4` or more"),
        ("zb-h2", 4, 7, 1, "wants twice as many microbatches as ranks, at least 8 microbatches, not 7"),
        ("interleaved-zb", 4, 8, 1, "has 2 or more stages a rank: write `chunks 2`, or choose `zb-h1`"),
        ("zbv", 12, 12, 3, "`zbv` has 2 stages a rank, not 3: remove `chunks`"),
        ("dualpipev", 8, 7, 2, "`dualpipev` of 8 stages wants at least 8 microbatches, not 7: write `microbatches 8`"),
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
