"""Processes of benchmarks: one that ends badly gives no measurement."""

from __future__ import annotations

import pytest

from benchmarks.turns import ONE_THREAD, in_turn

_SIDE = """
import sys
from benchmarks.turns import steps
assert len(steps(lambda: None, sys.argv[1], sys.argv[2], 2)) == 2
sys.exit({status})
"""


@pytest.mark.parametrize("status", [0, 3])
def test_a_side_that_ends_badly_after_its_steps_is_an_error(status: int) -> None:
    sides = {"parc": (["-c", _SIDE.format(status=status)], ONE_THREAD)}
    if status == 0:
        in_turn(sides, 1, 2)
        return
    with pytest.raises(RuntimeError, match="parc ended with status 3"):
        in_turn(sides, 1, 2)
