"""Captures: two of one model give the same programs, and so does one that was compiled before."""

from __future__ import annotations

from pathlib import Path

import pytest

import parc
from parc.compiler.plan.plan import read_plan
from parc.compiling.compiled import programs_of
from parc.compiling.driver import Captures, at_largest, compile_captured, compile_plan, compile_with, task_lines
from parc.compiling.plan_capture import capture_plan
from parc.passes.canonical.canonicalize import canonical_form

EXAMPLES = Path(parc.__file__).parent / "examples"


def test_a_capture_is_repeatable_and_compiling_does_not_change_it() -> None:
    plan = read_plan(EXAMPLES / "moe.parc")
    first, second = (capture_plan(plan, task_lines(plan), EXAMPLES, None) for _ in range(2))
    canonical_form.cache_clear()
    programs = programs_of(compile_captured(plan, EXAMPLES, *first))
    assert canonical_form.cache_info().misses == 1  # for the names of the plan's lines, and for its programs
    assert programs_of(compile_captured(plan, EXAMPLES, *second)) == programs
    assert programs_of(compile_captured(plan, EXAMPLES, *first)) == programs


@pytest.mark.parametrize("values", [{}, {"dp": "1", "ep": "4"}])
def test_builds_of_one_captured_model_share_their_first_passes(values: dict[str, str]) -> None:
    plan, captures = read_plan(EXAMPLES / "moe.parc", values), Captures(EXAMPLES)
    programs = programs_of(compile_plan(at_largest(plan), EXAMPLES))
    assert programs_of(compile_with(captures, plan)) == programs
    assert programs_of(compile_with(captures, plan)) == programs
