"""Processes of benchmarks: they give what each rank returns, and one that ends badly gives no measurement."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks.turns import Side, Timed, in_turn, run


def measured(timed: Timed, status: int) -> int:
    """Return the number of steps that were timed; or end with a status after them."""
    seconds = timed(lambda: None)
    if status:
        sys.exit(status)
    return len(seconds)


def variable(name: str) -> str:
    """Return what the environment says by a name."""
    return os.environ[name]


def test_a_side_that_ends_badly_after_its_steps_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="bad ended with status 3"):
        in_turn({"good": Side(measured, (0,)), "bad": Side(measured, (3,))}, 2)


def test_a_side_returns_what_each_rank_returns() -> None:
    assert run(Side(variable, ("RANK",), ranks=2)) == ["0", "1"]
