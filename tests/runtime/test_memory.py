"""The memory of a step: what a build estimates beside what gloo ranks take, tensor by tensor."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

import parc
from benchmarks.storages import Storages
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import DATA, PLAN, batch, build

WIDE = PLAN.replace("width=16", "width=32").replace("B=8", "B=32")


def peak_of_a_step(folder: str) -> int:
    """Return the most bytes that tensors of this rank take at once in its second step."""
    with Storages() as storages:
        session = parc.load(folder)
        given = {name: value.repeat(4, 1) for name, value in batch(0).items()}
        session.step(given)
        gc.collect()
        storages.peak = storages.bytes
        session.step(given)
    return storages.peak


@pytest.mark.parametrize(
    ("lines", "ranks"),
    [("precision bf16\n", 1), (DATA + "zero 2 over dp\n", 2), (DATA + "zero 3 over dp\nbucket 4KB\n", 2)],
)
def test_a_step_takes_what_was_estimated(tmp_path: Path, lines: str, ranks: int) -> None:
    made = build(tmp_path, lines, WIDE)
    (row,) = json.loads((made / "report.json").read_text())["memory"]
    for peak in run_ranks(peak_of_a_step, ranks, str(made)) if ranks > 1 else [peak_of_a_step(str(made))]:
        assert abs(row["peak_bytes"] - peak) < 0.05 * peak
