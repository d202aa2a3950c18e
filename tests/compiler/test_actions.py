"""Actions and schedules: their text, and the order of accumulation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parc.compiler.program.actions import (
    ACTIONS,
    Action,
    accumulation,
    parse_schedule,
    receive_kind,
    schedule_text,
    send_kind,
    work_kinds,
)
from parc.compiler.verify.communication import check_timelines

MESSAGES = [kind(work) for work in work_kinds() if ACTIONS[work].to for kind in (send_kind, receive_kind)]

actions = st.one_of(
    st.builds(
        Action,
        st.integers(0, 99),
        st.sampled_from([*(kind for kind, row in ACTIONS.items() if row.each), *MESSAGES]),
        st.integers(0, 99),
    ),
    st.builds(Action, st.integers(0, 99), st.sampled_from([kind for kind, row in ACTIONS.items() if not row.each])),
)


@given(actions)
def test_an_action_reads_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(st.dictionaries(st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True), st.lists(actions, min_size=1), max_size=3))
def test_a_schedule_reads_back(timelines: dict[str, Sequence[Action]]) -> None:
    assert parse_schedule(schedule_text(timelines)) == {role: tuple(found) for role, found in timelines.items()}


@pytest.mark.parametrize(
    "text", ["", "F", "0F", "0STEP1", "0f1", "F0", "0X1", "0F-1", "0F1 ", "-1F0", "0FB1", "0SEND1", "0SEND_F"]
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an action"):
        Action.parse(text)


@given(st.text(max_size=8))
def test_any_text_is_an_action_or_refused(text: str) -> None:
    try:
        action = Action.parse(text)
    except ValueError:
        return
    assert Action.parse(str(action)) == action


def test_a_line_without_a_role_is_refused() -> None:
    with pytest.raises(ValueError, match="line 1"):
        parse_schedule("0F0 0B0\n")


@given(st.integers(1, 5), st.booleans())
def test_accumulation_is_a_schedule_that_holds(microbatches: int, counts: bool) -> None:
    made = accumulation(microbatches, also=["COUNT"] * counts)
    assert not check_timelines({"stage0": made}, (0,), microbatches, also=["COUNT"] * counts)
    assert len(made) == microbatches * (3 if counts else 2) + 4
    assert len(set(made)) == len(made)
