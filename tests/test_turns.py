"""Processes of benchmarks: one that ends badly gives no measurement."""

from __future__ import annotations

import pytest

from benchmarks.turns import ONE_THREAD, in_turn

_SIDE = """
import sys
from benchmarks.turns import steps
assert len(steps(lambda: None, sys.argv[-2], sys.argv[-1], 2)) == 2
sys.exit(3)
"""


def test_a_side_that_ends_badly_after_its_steps_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="bad ended with status 3"):
        in_turn({"bad": (["-c", _SIDE], ONE_THREAD)}, 1, 2)
