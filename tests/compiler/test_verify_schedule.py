"""The checker of timelines: it refuses broken schedules, and accepts orders exactly if they can be run."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parc.compiler.program.actions import Action, StageRanks, accumulation, one_step
from parc.compiler.program.program import Fault
from parc.compiler.schedules import SCHEDULES, places_of, problem, timelines
from parc.compiler.verify.communication import check_timelines
from tests.draws import wide
from tests.planted_schedules import Timelines, wrong_at

Good = tuple[Timelines, StageRanks, int]
"""Timelines, the ranks of their stages, and the number of microbatches."""


@cache
def good() -> Sequence[Good]:
    """Return schedules on 2 to 5 ranks; every second has counts. Those whose backwards are whole are there as they are
    run, too."""
    sizes = [(p, m, v) for p in range(2, 6) for m in range(1, 9) for v in range(1, 4)]
    return [
        (
            timelines(name, p * v, m, v, also=["COUNT"] * (m % 2 == 0), as_run=m % 3 == 0),
            places_of(name, p * v, m, v),
            m,
        )
        for name in SCHEDULES
        for p, m, v in sizes
        if problem(name, p * v, m, v) is None
    ]


def faults_of(timelines: Timelines, ranks: StageRanks, m: int) -> Sequence[Fault]:
    """Return the faults of timelines like the good ones."""
    return check_timelines(timelines, ranks, m, also=["COUNT"] * (m % 2 == 0) + ["I", "W"])


def may_run(timelines: Timelines, ranks: StageRanks) -> bool:
    """Return whether complete timelines can be run, by definition: the order that actions need has no cycle."""
    before: dict[Action, set[Action]] = {action: set() for actions in timelines.values() for action in actions}
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(timelines.values()):
        of_role = ranks.index(rank)
        for first, then in pairwise(actions):
            before[then].add(first)
        for a in actions:
            k, m, message = a.stage, a.microbatch, a.message
            if message is not None and message.sends:
                there = Action(k + message.to, f"RECV_{message.work}", m)
                before[a].add(Action(k, message.work, m))
                before[there].add(a)
                sent[rank, ranks[there.stage]].append(there)
            elif message is not None:
                readers = "F" if message.work == "F" else "BI"
                before[next(b for b in (Action(k, kind, m) for kind in readers) if b in before)].add(a)
                received[ranks[k + message.to], rank].append(a)
            elif a.kind in ("B", "I"):
                nearer = (Action(k + 1, kind, m) for kind in "BI" if ranks[k + 1 : k + 2] == (rank,))
                before[a] |= {Action(k, "F", m), *(b for b in nearer if b in before)}
            elif a.kind == "F" and k and ranks[k - 1] == rank:
                before[a].add(Action(k - 1, "F", m))
            elif a.kind == "W":
                before[a].add(Action(k, "I", m))
            elif a.kind == "COUNT":
                before[Action(of_role, "SCALE")].add(a)
            if a.works:
                before[a].add(Action(of_role, "SCALE"))
            if a.kind not in ("LOSS", "REDUCE", "STEP"):
                before[Action(of_role, "LOSS")].add(a)
        before[Action(of_role, "REDUCE")].add(Action(of_role, "LOSS"))
        before[Action(of_role, "STEP")].add(Action(of_role, "REDUCE"))
    for wire, messages in sent.items():
        if messages != received[wire]:
            return False
        for early, late in pairwise(messages):
            step = -1 if late.kind == "RECV_F" else 1
            before[Action(late.stage + step, late.kind.replace("RECV", "SEND"), late.microbatch)].add(early)
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return True


@pytest.mark.parametrize("number", [600, wide(2000)])
def test_mutants_are_refused(number: int) -> None:
    draw = random.Random(0)
    refused: Counter[str] = Counter()
    while refused.total() < number:
        made, ranks, m = draw.choice(good())
        role = draw.choice(list(made))
        for kind, mutant in wrong_at(made, role, draw.randrange(len(made[role])), draw):
            assert faults_of(mutant, ranks, m), (kind, mutant)
            refused[kind] += 1
    assert min(refused.values()) > number / 40 and len(refused) == 8, refused


def overlap(timelines: Timelines) -> bool:
    """Return whether actions of two steps stand side by side."""
    return any(action.ahead for actions in timelines.values() for action in actions)


def moved(timelines: Timelines, draw: random.Random) -> dict[str, list[Action]]:
    """Return timelines in which some actions have moved by a few places."""
    made = {role: list(actions) for role, actions in timelines.items()}
    for _ in range(draw.choice((1, 1, 2, 3))):
        actions = draw.choice(list(made.values()))
        at = draw.randrange(len(actions) - 1)
        action = actions.pop(at)
        actions.insert(min(max(at + draw.choice((-3, -2, -1, 1, 2, 3)), 0), len(actions)), action)
    return made


def one_after_the_other(timelines: Timelines, m: int, steps: int = 3) -> Timelines:
    """Return the work and the messages of several steps that overlap as one step of as many microbatches."""

    def numbered(action: Action, step: int) -> Action:
        return replace(action, ahead=False, microbatch=action.microbatch + m * (step + action.ahead))

    long: dict[str, list[Action]] = {}
    for role, actions in timelines.items():
        work = [action for action in actions if action.works or action.message is not None]
        first = [numbered(replace(action, ahead=False), 0) for action in work if action.ahead]
        rest = [numbered(action, step) for step in range(steps) for action in work
                if step < steps - 1 or not action.ahead]  # fmt: skip
        scale, *ends = (Action(actions[-1].stage, kind) for kind in ("SCALE", "LOSS", "REDUCE", "STEP"))
        long[role] = [scale, *first, *rest, *ends]
    return long


@pytest.mark.parametrize("number", [150, wide(500)])
def test_steps_that_overlap_are_accepted_only_if_they_can_run_one_after_the_other(number: int) -> None:
    draw, outcomes = random.Random(2), Counter[bool]()
    overlapping = [row for row in good() if overlap(row[0])]
    for made, ranks, m in overlapping:
        assert may_run(one_after_the_other(made, m), ranks) and not faults_of(made, ranks, m)
    for _ in range(number):
        some, ranks, m = draw.choice(overlapping)
        made = moved(some, draw)
        accepted = not faults_of(made, ranks, m)
        if accepted:
            assert may_run(one_after_the_other(made, m), ranks), made
            alone = {role: one_step(actions) for role, actions in made.items()}
            assert may_run(alone, ranks)
        outcomes[accepted] += 1
    assert min(outcomes[True], outcomes[False]) > number / 10, outcomes


@pytest.mark.parametrize("number", [150, wide(500)])
def test_another_order_is_refused_just_if_it_cannot_run(number: int) -> None:
    draw = random.Random(1)
    outcomes: Counter[bool] = Counter()
    alone = [row for row in good() if not overlap(row[0])]
    for _ in range(number):
        some, ranks, m = draw.choice(alone)
        made = moved(some, draw)
        runs = may_run(made, ranks)
        assert bool(faults_of(made, ranks, m)) == (not runs), made
        outcomes[runs] += 1
    assert min(outcomes[True], outcomes[False]) > number / 10, outcomes


@given(st.integers(1, 3), st.randoms())
def test_an_order_of_one_stage_is_refused_just_if_it_cannot_run(microbatches: int, draw: random.Random) -> None:
    actions = list(accumulation(microbatches, also=["COUNT"]))
    draw.shuffle(actions)
    made = {"stage0": actions}
    assert bool(check_timelines(made, (0,), microbatches, also=["COUNT"])) != may_run(made, (0,))


def test_counts_are_there_just_if_the_loss_is_over_a_count() -> None:
    for also, other in ((["COUNT"], []), ([], ["COUNT"])):
        made = timelines("1f1b", 2, 2, also=also)
        assert not check_timelines(made, (0, 1), 2, also=also)
        assert check_timelines(made, (0, 1), 2, also=other)


@pytest.mark.parametrize(
    ("orders", "why"),
    [
        (["0SCALE 0B0 0F0 0LOSS 0REDUCE 0STEP"], "stage0: `0B0` comes before `0F0`"),
        (["0F0 0B0 0SCALE 0LOSS 0REDUCE 0STEP"], "stage0: `0B0` comes before `0SCALE`"),
        (["0SCALE 0F0 0LOSS 0REDUCE 0B0 0STEP"], "stage0: `0REDUCE` comes before `0B0`"),
        (["0SCALE 0F0 0B0 0LOSS 0STEP 0REDUCE"], "stage0: `0STEP` comes before `0REDUCE`"),
        (["0SCALE 0F0 0B0 0LOSS 0REDUCE 0STEP 0STEP"], "stage0: `0STEP` is there 2 times, not once"),
        (["1SCALE 0F0 0B0 0LOSS 0REDUCE 0STEP"], "stage0: `0SCALE` is there 0 times, not once"),
        (["0SCALE 0F0 0B0 0LOSS 0REDUCE 0STEP 1F0"], "stage0: `1F0` is not one of its actions in this step"),
        ([], "schedule: 1 stages are not on 0 roles, the same number on each"),
        (
            [
                "0SCALE 0F0 0SEND_F0 0RECV_B0 0B0 0LOSS 0REDUCE 0STEP",
                "1SCALE 1RECV_F0 1F0 1B0 1LOSS 1REDUCE 1SEND_B0 1STEP",
            ],
            "stage1: `1REDUCE` comes before `1SEND_B0`",
        ),
        (
            [
                "0SCALE 0RECV_B0 0F0 0SEND_F0 0B0 0LOSS 0REDUCE 0STEP",
                "1SCALE 1RECV_F0 1F0 1B0 1SEND_B0 1LOSS 1REDUCE 1STEP",
            ],
            "no role can go on: stage0 waits at `0RECV_B0` for `1SEND_B0` of stage1; "
            "stage1 waits at `1RECV_F0` for `0SEND_F0` of stage0",
        ),
        (
            [
                "0SCALE 0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1 0LOSS 0REDUCE 0STEP",
                "1SCALE 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1LOSS 1REDUCE 1STEP",
            ],
            "no role can go on: stage0 waits at `0SEND_F0` until stage1 receives `1RECV_F1`; "
            "stage1 waits at `1RECV_F0` and `1RECV_F1` is before it",
        ),
    ],
)
def test_a_fault_names_the_role_and_the_actions(orders: Sequence[str], why: str) -> None:
    made = {f"stage{k}": [Action.parse(word) for word in text.split()] for k, text in enumerate(orders)}
    microbatches = 1 + max((action.microbatch for actions in made.values() for action in actions), default=0)
    faults = [str(fault) for fault in check_timelines(made, tuple(range(max(len(made), 1))), microbatches)]
    assert any(why in fault for fault in faults), faults
