"""Processes of benchmarks: one that ends badly gives no measurement."""

from __future__ import annotations

import pytest

from benchmarks.turns import ONE_THREAD, in_turn

_SIDE = """
import sys
from benchmarks.turns import steps
assert len(steps(lambda: None, sys.argv[-2], sys.argv[-1], 2)) == 2
sys.exit(int(sys.argv[1]))
"""


def test_a_side_that_ends_badly_after_its_steps_is_an_error() -> None:
    good, bad = ((["-c", _SIDE, status], ONE_THREAD) for status in ("0", "3"))
    with pytest.raises(RuntimeError, match="bad ended with status 3"):
        in_turn({"good": good, "bad": bad}, 1, 2)
