"""The memory of a step: what a build estimates beside what gloo ranks take, tensor by tensor."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import parc
from benchmarks.storages import Storages
from parc.compiler.ops.rules import TABLE
from parc.compiler.program.together import made_in_place
from parc.runtime.machine.execute import Machine
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import DATA, PLAN, batch, build

WIDE = PLAN.replace("layers=2, width=16", "layers=1, width=32").replace("B=8", "B=32")


STAGES = "schedule 1f1b microbatches 4\nmesh pp=2, dp=2\nshard tokens, targets [B/dp, _]\nzero 1 over dp\n"
STAGES += "stage before blocks.1 over pp\n"


def peaks(*folders: str) -> list[int]:
    return [peak_of_a_step(folder) for folder in folders]


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


def test_a_step_takes_what_was_estimated(tmp_path: Path) -> None:
    lines = ["zero 2 over dp\nprecision bf16\n", "zero 3 over dp\nbucket 4KB\n"]
    lines.append("compress gradients over dp using int8\nbucket 4KB\n")
    made = [build(tmp_path, DATA + line, WIDE, name=f"build{at}") for at, line in enumerate(lines)]
    estimated = [json.loads((path / "report.json").read_text())["memory"][0]["peak_bytes"] for path in made]
    for found in run_ranks(peaks, 2, *map(str, made)):
        hold(found, estimated)


def test_stages_take_what_was_estimated(tmp_path: Path) -> None:
    """The last stage delays gradients of weights until after its sends, but not in the last microbatch, whose backward
    starts sums over data ranks."""
    plan = WIDE.replace("schedule  microbatches 2\n", "").replace("layers=1, width=32", "layers=2, width=64")
    made = build(tmp_path, STAGES, plan)
    estimated = [row["peak_bytes"] for row in json.loads((made / "report.json").read_text())["memory"]]
    found = [peak for (peak,) in run_ranks(peaks, 4, str(made))]
    hold(found, [estimated[0]] * 2 + [estimated[1]] * 2)


def test_gradients_that_lie_together_take_their_room_when_the_first_is_made(tmp_path: Path) -> None:
    assert {op for op in TABLE if made_in_place(op)} == set(Machine.into)
    plan = WIDE.replace("schedule  microbatches 2\n", "").replace("width=32", "width=256")
    made = build(tmp_path, DATA, plan)
    estimated = [row["peak_bytes"] for row in json.loads((made / "report.json").read_text())["memory"]]
    for found in run_ranks(peaks, 2, str(made)):
        hold(found, estimated)


def hold(found: list[int], estimated: list[int]) -> None:
    for peak, number in zip(found, estimated, strict=True):
        assert abs(number - peak) < 0.05 * peak
