"""Schedules as text tables: their syntax, that every order that can end runs, and refusals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from parc.compiler.program.actions import Action, stages_in_turn
from parc.compiler.schedules import places_of, problem, timelines
from parc.compiler.schedules.timeline import simulate
from parc.compiler.verify.communication import check_timelines

PLAIN = "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1\n"


def test_a_plain_table_is_the_schedule_that_it_lists() -> None:
    assert timelines("table", 2, 2, text=PLAIN) == timelines("gpipe", 2, 2)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 3), (5, 4)])
def test_a_table_of_ranges_is_of_all_sizes(stages: int, microbatches: int) -> None:
    text = "# GPipe\nrank r: (r)F(0..m-1)   (r)B(0..m-1) # all of them\n"
    assert timelines("table", stages, microbatches, text=text) == timelines("gpipe", stages, microbatches)


def test_a_row_of_a_rank_is_before_the_row_of_all() -> None:
    text = "rank r: (r)F(0..m-1) (r)B(0..m-1)\nrank 1: 1F0 1B0 1F1 1B1"
    made = timelines("table", 2, 2, text=text)
    assert made["pp1"] == timelines("1f1b", 2, 2)["pp1"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (PLAIN.replace(" 1B0", ""), "`1B0` is not in the table: it needs `F` and `B`, or `F`, `I` and `W`, of"),
        (PLAIN.replace(" 1B0 1B1", ""), "`1B0` and 1 more are not in the table"),
        (PLAIN.replace("0F1", "0F1 0F1"), "line 1 of the table: `0F1` is there twice"),
        (PLAIN.replace("1B1", "1B1 0F1"), "line 2 of the table: `0F1` is of rank 0, not of rank 1"),
        (PLAIN.replace("1F1", "0F1").replace("0F1 ", "", 1), "line 2 of the table: `0F1` is of rank 0, not of rank 1"),
        (PLAIN.replace("1F1", "1F2"), "line 2 of the table: `1F2` is not of 2 stages and 2 microbatches"),
        (PLAIN.replace("1F1", "2F1"), "line 2 of the table: `2F1` is not of 2 stages and 2 microbatches"),
        (PLAIN.replace("rank 1", "rank 2"), "line 2 of the table is of rank 2, and there are 2 ranks"),
        (PLAIN.replace("rank 1", "rank 0"), "line 2 of the table is a second row of rank 0"),
        (PLAIN.splitlines()[0], "the table has no row of rank 1: 2 stages in 1 chunks are on 2 ranks"),
        (PLAIN.replace("rank 1", "pp1"), "line 2 of the table is not `rank 0: 0F0 0B0`: `pp1: 1F0 1F1 1B0 1B1`"),
        (PLAIN.replace("1F0", "1G0"), "line 2 of the table: `1G0` is not work such as `0F2` or `(0..1)F(0..m-1)`"),
        (PLAIN.replace("1F0", "1SEND_F0"), "`1SEND_F0` is not work"),
        (PLAIN.replace("0F1", "0F1+"), "`0F1+` is of the next step, which only `async` begins before a step ends"),
        (PLAIN.replace("1F0", "(1,1..3)F0"), "`(1,1..3)F0` is not work"),
        (PLAIN.replace("1F0", "(q)F0"), "`(q)F0` is not work"),
        ("rank r: (r)F(0..999999999)", "line 1 of the table: `0F2` is not of 2 stages and 2 microbatches"),
        ("", "the table has no row of rank 0"),
        ("stages of rank 0: 0\n" + PLAIN, "the table has no line of the stages of rank 1: 2 stages in 1 chunks are on"),
        ("stages of rank r: 0\n" + PLAIN, "line 1 of the table: stage 0 is of rank 0 and of rank 1"),
        ("stages of rank r: (r) (r+1)\n" + PLAIN, "line 1 of the table: rank 0 has 2 stages, not 1 as every rank"),
        ("stages of rank r: (r+1)\n" + PLAIN, "line 1 of the table: there is no stage 2, but 2 stages"),
        ("stages of rank r: 0F0\n" + PLAIN, "line 1 of the table: `0F0` is not stages such as `2` or `(n-1-r)`"),
        ("stages of rank r: (1-r)\n" + PLAIN, "line 2 of the table: `0F0` is of rank 1, not of rank 0"),
        ("stages of rank 1: 0\nstages of rank 1: 0\n" + PLAIN, "line 2 of the table is a second row of the stages of"),
        ("stages of rank 2: 0\n" + PLAIN, "line 1 of the table is of rank 2, and there are 2 ranks"),
        ("stages 0 1\n" + PLAIN, "line 1 of the table is not `rank 0: 0F0 0B0`: `stages 0 1`"),
        (PLAIN.replace("0F0 0F1 0B0", "0B0 0F0 0F1"), "the order of work deadlocks: rank 0 has `0B0` before `0F0`"),
        (
            PLAIN.replace("0F1 0B0", "0B0 0F1"),
            "rank 0 waits with `0B0` for `1B0` of rank 1, rank 1 waits with `1F1` for `0F1` of rank 0",
        ),
    ],
)  # fmt: skip
def test_a_table_that_is_wrong_is_refused_by_its_line_and_action(text: str, why: str) -> None:
    reason = problem("table", 2, 2, text=text)
    assert reason is not None and why in reason, reason


CSV = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (CSV.replace("1B0,", ""), "`1B0` is not in the table"),
        (CSV.replace("0F1", "0F1,0SEND_F1"), "line 1 of the table: `0SEND_F1` is no work, and parc places messages"),
        (CSV.replace(",1F0", "1UNSHARD,1F0"), 'write the file with `_dump_csv(name, format="compute_only")`'),
        (CSV.replace("1B1", "0F1"), "line 2 of the table: stage 0 is of rank 0 and of rank 1"),
        (CSV.replace("1B1", "1G1"), "line 2 of the table: `1G1` is not work such as `0F2`"),
        (CSV.replace("1B1", "B"), "line 2 of the table: `B` is not work such as `0F2`"),
        (CSV.replace("1B1", "1B"), "line 2 of the table: `1B` is not work such as `0F2`"),
        (CSV.replace("1B1", "(0..1)B1"), "line 2 of the table: `(0..1)B1` is not work such as `0F2`"),
        (CSV.splitlines()[0], "the table has no line of the stages of rank 1"),
        (CSV + "2F0,2F1,2B0,2B1", "line 3 of the table is of rank 2, and there are 2 ranks"),
    ],
)
def test_csv_that_is_no_table_is_refused_by_its_line_and_cell(text: str, why: str) -> None:
    found = problem("table", 2, 2, text=text)
    assert found is not None and why in found, found


class _Stage(SimpleNamespace):
    """A stage as torch's schedules look at it when they list their work."""

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        super().__init__(stage_index=index, num_stages=stages, group_size=ranks, group_rank=0, has_backward=True,
                         is_first=index == 0, is_last=index == stages - 1, submod=None, device="cpu")  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "ranks", "microbatches"),
    [(torch_schedules.ScheduleInterleaved1F1B, 3, 6), (torch_schedules.ScheduleLoopedBFS, 4, 5),
     (torch_schedules.ScheduleInterleavedZeroBubble, 4, 8), (torch_schedules.ScheduleZBVZeroBubble, 3, 7),
     (torch_schedules.ScheduleDualPipeV, 4, 10)],
)  # fmt: skip
def test_csv_that_torch_writes_is_read_as_its_work(theirs: Any, ranks: int, microbatches: int, tmp_path: Path) -> None:
    in_a_v = theirs in (torch_schedules.ScheduleZBVZeroBubble, torch_schedules.ScheduleDualPipeV)
    stages_of_rank = (0, 2 * ranks - 1) if in_a_v else (0, ranks)
    schedule = theirs([_Stage(stage, 2 * ranks, ranks) for stage in stages_of_rank], microbatches, loss_fn=max)
    schedule._dump_csv(str(tmp_path / "order.csv"), format="compute_only")
    listed = [
        [str(piece) for action in row if action for piece in action.sub_actions or (action,)]
        for row in schedule.pipeline_order.values()
    ]
    text = (tmp_path / "order.csv").read_text()
    read = timelines("table", 2 * ranks, microbatches, 2, text=text)
    assert [[str(action) for action in actions if action.works] for actions in read.values()] == listed
    again = "\n".join(",".join(row) for row in listed)
    assert timelines("table", 2 * ranks, microbatches, 2, text=again) == read
    places = places_of("table", 2 * ranks, microbatches, 2, text=text)
    assert not check_timelines(read, places, microbatches, also=["I", "W"])


V = (Path(__file__).parent.parent / "in_a_v.txt").read_text()


def test_a_table_says_where_stages_lie() -> None:
    made = timelines("table", 4, 1, 2, text=V)
    assert {role: " ".join(map(str, actions)) for role, actions in made.items()} == {
        "pp0": "0SCALE 0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0 0LOSS 0REDUCE 0STEP",
        "pp1": "1SCALE 1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0 1LOSS 1REDUCE 1STEP",
    }
    for p, m in ((2, 1), (2, 4), (3, 2), (5, 5)):
        made, ranks = timelines("table", 2 * p, m, 2, text=V), (*range(p), *reversed(range(p)))
        assert places_of("table", 2 * p, m, 2, text=V) == ranks
        assert not check_timelines(made, ranks, m)
        assert check_timelines(made, stages_in_turn(2 * p, p), m)


def test_a_value_of_the_rank_itself_is_there_before_it_is_read() -> None:
    made = timelines("table", 4, 1, 2, text=V)
    actions = list(made["pp1"])
    actions[2:4] = reversed(actions[2:4])
    assert [str(action) for action in actions[2:4]] == ["2F0", "1F0"]
    (fault,) = check_timelines({**made, "pp1": actions}, (0, 1, 1, 0), 1)
    assert fault.message == "`2F0` comes before `1F0`"


@given(st.integers(2, 4), st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_every_order_of_work_that_can_end_becomes_a_schedule_that_holds(
    p: int, m: int, v: int, draw: random.Random
) -> None:
    """Messages are put where no rank waits for ever, whatever the order and wherever stages lie; and an order that
    cannot end is refused."""
    order = draw.sample(range(p * v), p * v)
    lies = {stage: place % p for place, stage in enumerate(order)}
    done: list[Action] = []
    every = [Action(k, kind, i) for k in range(p * v) for i in range(m) for kind in draw.choice(("FB", "FIW"))]
    todo = [*every]
    while todo:
        ready = [action for action in todo if all(need in done for need in needs(action, every))]
        done.append(draw.choice(ready))
        todo.remove(done[-1])
    rows = [[action for action in done if lies[action.stage] == rank] for rank in range(p)]
    if draw.random() < 0.3:  # most often this is an order that cannot end
        row = draw.choice(rows)
        a, b = draw.randrange(len(row)), draw.randrange(len(row))
        row[a], row[b] = row[b], row[a]
    text = "".join(f"rank {rank}: {' '.join(map(str, row))}\n" for rank, row in enumerate(rows))
    text += "".join(f"stages of rank {rank}: {' '.join(map(str, order[rank::p]))}\n" for rank in range(p))
    graph = {action: set(needs(action, every)) for row in rows for action in row}
    for row in rows:
        for first, then in pairwise(row):
            graph[then].add(first)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        assert "deadlocks" in str(problem("table", p * v, m, v, text=text))
        return
    made = timelines("table", p * v, m, v, text=text)
    assert [[a for a in actions if a.works] for actions in made.values()] == rows
    assert not check_timelines(made, tuple(lies[stage] for stage in range(p * v)), m, also=["I", "W"])
    assert simulate(made).makespan >= 3 * m * v


def needs(action: Action, every: Sequence[Action]) -> list[Action]:
    """Return the work whose results a piece of ``every`` piece of work reads."""
    stage, m = action.stage, action.microbatch
    if action.kind == "F":
        return [Action(stage - 1, "F", m)] if stage else []
    if action.kind == "W":
        return [Action(stage, "I", m)]
    before = (Action(stage + 1, kind, m) for kind in "BI")
    return [Action(stage, "F", m), *(one for one in before if one in every)]


@given(st.text(alphabet="rank 012:FBIW(),.+-*pvnm\n", max_size=60))
def test_any_text_is_a_table_or_refused(text: str) -> None:
    found = problem("table", 2, 1, text=text)
    assert found is None or "table" in found or "order" in found
