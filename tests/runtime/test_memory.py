"""The memory of a step: what a build estimates beside what gloo ranks take, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import parc
from benchmarks.storages import Storages
from parc.compiler.analysis import products as facts
from parc.compiler.analysis.lifetimes import made_in_place
from parc.compiler.analysis.products import LIBRARIES, ONEDNN
from parc.compiler.ops.rules import TABLE
from parc.compiler.torch_private import onednn_linear
from parc.report import memory_by_library, plan_of
from parc.runtime.machine import products
from parc.runtime.machine.registry import code_for
from parc.runtime.state.opening import open_build
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import DATA, PLAN, batch, build

WIDE = PLAN.replace("layers=2, width=16", "layers=1, width=32").replace("B=8", "B=32")


STAGES = "schedule 1f1b microbatches 4\nmesh pp=2, dp=2\nshard tokens, targets [B/dp, _]\nzero 1 over dp\n"
STAGES += "stage before blocks.1 over pp\n"


@pytest.fixture(autouse=True)
def every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let oneDNN make products of any size where it makes large ones."""
    monkeypatch.setattr(facts, "LARGE_PRODUCT", 1)


def peaks(*folders: str) -> list[dict[str, int]]:
    """Return the peaks of a rank by the library that multiplies, which is forced, whichever is the faster here."""
    found: list[dict[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "LARGE_PRODUCT", 1)
        for folder in folders:
            found.append({})
            for library in LIBRARIES:
                patch.setattr(products, "_is_faster", lambda threads, library=library: library is ONEDNN)
                name, peak = peak_of_a_step(folder)
                found[-1][name] = peak
    return found


def peak_of_a_step(folder: str) -> tuple[str, int]:
    """Return the library of a session, and the most bytes that tensors of this rank take at once in its second step."""
    with Storages() as storages:
        session = parc.load(folder, torch.device("cpu"))
        report = json.loads((Path(folder) / "report.json").read_text())
        given = {name: value.repeat(4, 1)[: report["batch"]["samples"]] for name, value in batch(0).items()}
        overlaps = report["pipeline"]["schedule"] == "async"  # on the plan's own data
        for _ in range(1 + overlaps):
            session.step(None if overlaps else given)
        storages.begin()
        session.step(None if overlaps else given)
        session.close()
    return session.products.name, storages.peak


def estimated(folder: Path) -> list[dict[str, int]]:
    """Return the estimates of each role by library. The report has the larger."""
    build = open_build(folder)
    plan, report = plan_of(build), json.loads((folder / "report.json").read_text())
    rows = [
        {name: memory.peak_bytes for name, memory in memory_by_library(build, plan, role).items()}
        for role in build.roles.values()
    ]
    assert [max(row.values()) for row in rows] == [row["peak_bytes"] for row in report["memory"]]
    return rows


def hold(found: Iterable[dict[str, int]], wanted: Iterable[dict[str, int]]) -> None:
    """Hold peaks to estimates. A torch without oneDNN's operator has one library."""
    for peaks, numbers in zip(found, wanted, strict=True):
        assert set(peaks) == ({"BLAS", "oneDNN"} if onednn_linear() is not None else {"BLAS"})
        for library, peak in peaks.items():
            assert abs(numbers[library] - peak) < 0.02 * peak, (library, numbers[library], peak)


def test_a_step_takes_what_was_estimated(tmp_path: Path) -> None:
    lines = ["zero 2 over dp\nprecision bf16\n", "zero 3 over dp\nbucket 4KB\n", "precision bf16\n"]
    rows = [(line, WIDE) for line in lines]
    # where gradients take more than activations, what messages hold beside their results decides
    narrow = WIDE.replace("width=32", "width=64").replace("microbatches 2", "microbatches 4")
    rows += [(f"compress gradients over dp using {format_}\n", narrow) for format_ in ("fp16", "int8")]
    # where weights take more than gradients and activations, the last step's are there until this step's have arrived
    small = PLAN.replace("layers=2, width=16", "layers=6, width=128").replace("B=8", "B=2")
    small = small.replace("microbatches 2", "microbatches 1").replace(
        "adamw lr 1e-2 eps 1e-5 weight_decay 0.1", "sgd lr 0.1"
    )
    rows.append(("zero 2 over dp\n", small))
    made = [build(tmp_path, DATA + line, plan, name=f"build{at}") for at, (line, plan) in enumerate(rows)]
    wanted = [estimated(path)[0] for path in made]
    (row,) = json.loads((made[-1] / "report.json").read_text())["memory"]
    assert row["parameters"] == 2 * row["state"]["weights"]
    for found in run_ranks(peaks, 2, *map(str, made)):
        hold(found, wanted)


def test_stages_take_what_was_estimated(tmp_path: Path) -> None:
    """The last stage delays gradients of weights until after its sends, but not in the last microbatch, whose backward
    starts sums over data ranks."""
    plan = WIDE.replace("schedule  microbatches 2\n", "").replace("layers=1, width=32", "layers=2, width=64")
    made = build(tmp_path, STAGES, plan)
    first, last = estimated(made)
    hold([peak for (peak,) in run_ranks(peaks, 4, str(made))], [first, first, last, last])


def test_steps_that_overlap_take_what_was_estimated(tmp_path: Path) -> None:
    """Each rank holds two weights, and for a while the gradients and the activations of two steps."""
    plan = WIDE.replace("schedule  microbatches 2\n", "").replace("layers=1, width=32", "layers=2, width=64")
    plan = plan.replace("steps     3", "steps     9")
    made = build(tmp_path, STAGES.replace("1f1b", "async"), plan)
    first, last = estimated(made)
    hold([peak for (peak,) in run_ranks(peaks, 4, str(made))], [first, first, last, last])


def test_gradients_that_lie_together_take_their_room_when_the_first_is_made(tmp_path: Path) -> None:
    assert {op for op in TABLE if made_in_place(op)} == set(code_for("into"))
    plan = WIDE.replace("schedule  microbatches 2\n", "").replace("width=32", "width=256")
    made = build(tmp_path, DATA, plan)
    wanted = estimated(made)
    for found in run_ranks(peaks, 2, str(made)):
        hold(found, wanted)


def test_gradients_are_held_once_whatever_makes_them(tmp_path: Path) -> None:
    """Gradients of a tied weight are added up first, and under ``precision`` all are cast."""
    plan = WIDE.replace("width=32", "width=64").replace("dropout=0.1", "dropout=0.0")
    precise = ["", "precision bf16\n", "precision fp16\n"]
    made = [build(tmp_path, line, plan, name=f"build{at}") for at, line in enumerate(precise)]
    narrow = plan.replace("microbatches 2", "microbatches 2 accumulate bf16")
    made += [build(tmp_path, line, narrow, name=f"narrow{at}") for at, line in enumerate(precise)]
    wanted = [estimated(path)[0] for path in made]
    hold(peaks(*map(str, made)), wanted)
    size = 4 * json.loads((made[0] / "report.json").read_text())["parameters"]
    for build_, bytes_ in zip(made, [size] * 3 + [size // 2] * 3, strict=True):
        (row,) = json.loads((build_ / "report.json").read_text())["memory"]
        assert bytes_ <= row["gradients"] < 1.3 * bytes_


OPTIMIZERS = {
    "adadelta": "adadelta lr 1.0 weight_decay 0.1", "sgd": "sgd lr 1e-2 momentum 0.9 weight_decay 0.1",
}  # fmt: skip


def test_an_update_takes_no_more_than_its_largest_unit(tmp_path: Path) -> None:
    """With many microbatches the update has the peak; its temporaries are a part of it."""
    wide = WIDE.replace("width=32", "width=128").replace("microbatches 2", "microbatches 16")
    plans = [wide.replace("adamw lr 1e-2 eps 1e-5 weight_decay 0.1 clip 1.0", line) for line in OPTIMIZERS.values()]
    made = [build(tmp_path, "", plan, name=name) for name, plan in zip(OPTIMIZERS, plans, strict=True)]
    hold(peaks(*map(str, made)), [estimated(path)[0] for path in made])
    for path in made:
        (row,) = json.loads((path / "report.json").read_text())["memory"]
        assert row["optimizer"] > row["state"]["optimizer"], "the peak is not that of the update"


DROPPED = """
model     "benchmarks.peak_models:Attention" (width=32, heads=4, vocab=64)
input     tokens  int64 [B, S]
input     targets int64 [B, S]
sizes     B=4, S=256
loss      cross_entropy(output, targets)
optimizer sgd lr 1e-2
seed      3
data      synthetic
"""


def test_attention_with_dropout_takes_the_scores_of_a_tile(tmp_path: Path) -> None:
    made = build(tmp_path, "", DROPPED)
    with Storages() as storages, parc.load(made, "cpu") as session:
        session.step()
        storages.begin()
        session.step()
    (estimate,) = estimated(made)
    assert estimate["BLAS"] < 4 * 4 * 256 * 256 * (4 + 8), "all scores and their numbers are held at once"
    assert abs(estimate[session.products.name] - storages.peak) < 0.02 * storages.peak
