"""Compressed gradients: the numbers of 8 bits, what their rounding leaves, and training with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import parc
from parc.checking.checks import case_of, static_faults
from parc.checking.reports import report_of
from parc.compiler.layout.pieces import BLOCK_ENTRIES, pack, packed_bytes, round_int8, sum_packed, unpack
from parc.compiler.padding.tensors import packed
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.actions import REDUCE
from parc.compiler.program.program import Ref
from parc.compiler.program.step_values import residual
from parc.compiler.verify.compressed import check_compressed
from parc.compiling.compiled import Compiled
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from parc.runtime.compare.simulate import Simulation, compare
from parc.runtime.data.random_batch import random_batch
from parc.runtime.state.step_state import read_residual
from tests.captured_once import compile_once
from tests.draws import wide
from tests.planted_bugs import EARLY, SUMS
from tests.planted_builds import COMPRESSED_BUILDS, good_build
from tests.planted_edits import with_lines
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import DATA, batch, build

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
GPT = """\
model "./gpt.py:GPT" (layers=1, width=16, heads=4, vocab=24, length=4)
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=16, S=4
loss cross_entropy(output, targets)
optimizer sgd lr 1e-2
shard tokens, targets [B/dp, _]
schedule microbatches 2
"""
STEPS = 8
NODES = "mesh dp=4\nnode 2\nhierarchical over dp\n"


def compiled(lines: str) -> Compiled:
    """Compile the small GPT with further lines."""
    return compile_once(read_plan(Source("compressed.parc", GPT + lines)), EXAMPLES)


def gradient_bytes(report: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of gradients that a rank of each role sends in a step."""
    found: dict[str, int] = {}
    for row in report["communication"]:
        if row["carries"] == "gradients":
            found[row["role"]] = found.get(row["role"], 0) + row["wire_bytes"] * row["count_per_step"]
    return found


@given(st.integers(0, 3 * BLOCK_ENTRIES), st.integers(-40, 38), st.integers(0, 2**31))
def test_rounded_numbers_round_to_themselves(entries: int, power: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.rand(entries, generator=generator) - 0.5) * 10.0**power
    once = round_int8(x)
    assert torch.equal(round_int8(once), once)
    assert pack(x).numel() == packed_bytes(entries)
    for block, exact in zip(once.split(BLOCK_ENTRIES), x.split(BLOCK_ENTRIES), strict=True):
        largest = float(exact.abs().max()) if len(exact) else 0.0
        assert float((block - exact).abs().max()) <= max(largest / 127, 2.0**-126) if len(exact) else True


def test_every_block_of_a_large_tensor_has_a_scale_of_its_own() -> None:
    """A block's numbers are a thousand times those of the one before it, over and over; the last block is shorter."""
    count = 3 * 64 * BLOCK_ENTRIES + 100  # three slabs, and more
    x = torch.rand(count, generator=torch.Generator().manual_seed(0)) - 0.5
    x *= 1000.0 ** (torch.arange(count) // BLOCK_ENTRIES % 3)
    rounded = round_int8(x)
    for block, exact in zip(rounded.split(BLOCK_ENTRIES), x.split(BLOCK_ENTRIES), strict=True):
        assert float((block - exact).abs().max()) <= float(exact.abs().max()) / 127
    assert torch.equal(unpack(pack(x), torch.empty_like(x)), rounded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_packed_parts_of_all_ranks_are_summed_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(2 * BLOCK_ENTRIES, generator=generator) for _ in range(8)]
    whole = sum_packed([pack(part) for part in parts], torch.empty(2 * BLOCK_ENTRIES, dtype=dtype))
    wanted = torch.zeros(2 * BLOCK_ENTRIES)
    for part in parts:
        wanted += round_int8(part)
    assert torch.equal(whole, wanted.to(dtype))


def test_a_number_that_is_not_finite_stays_so() -> None:
    for bad in (float("inf"), float("nan")):
        x = torch.ones(2 * BLOCK_ENTRIES)
        x[3] = bad
        assert round_int8(x)[:BLOCK_ENTRIES].isnan().all()
        assert torch.equal(round_int8(x)[BLOCK_ENTRIES:], x[BLOCK_ENTRIES:])


@pytest.mark.parametrize("lines", [
    wide("mesh dp=2\ncompress gradients over dp using int8\n"),
    "mesh dp=4\nnode 2\nhierarchical over dp\nzero 1 over dp\ncompress gradients over dp using fp16\n",
    "mesh dp=4\nnode 2\nhierarchical over dp\nzero 1 over dp within node\ncompress gradients over dp using int8\n",
    "mesh dp=2\ncompress gradients over dp using int8\nzero 1 over dp on blocks\n",
    "mesh dp=2, tp=2\ncolumn blocks.*.mlp.up over tp\nrow blocks.*.mlp.down over tp\nvocab embed, head over tp\n"
    "compress gradients over dp using int8\nprecision fp16 loss_scale dynamic\n",
    "mesh pp=2, dp=2\nstage before blocks.0 over pp\nschedule 1f1b\ncompress gradients over dp using int8\n",
    f"{NODES}compress gradients over dp using int8\n",
    f"{NODES}zero 1 over dp\ncompress gradients over dp using int8\nprecision fp16 loss_scale dynamic\n",
    f"{NODES}zero 2 over dp within node\ncompress gradients over dp using int8\n",
    wide("mesh dp=8\nnode 4\nhierarchical over dp\nzero 3 over dp within node\n"
         "compress gradients over dp using fp16\n"),
    wide("mesh dp=8\nnode 2\nhierarchical over dp\ncompress gradients over dp using fp16\n"),
    "mesh dp=4, tp=2\nnode 4\nhierarchical over dp\ncolumn blocks.*.mlp.up over tp\nrow blocks.*.mlp.down over tp\n"
    "vocab embed, head over tp\ncompress gradients over dp using fp16\n",
    "mesh pp=2, dp=4\nnode 2\nhierarchical over dp\nstage before blocks.0 over pp\nschedule 1f1b\n"
    "compress gradients over dp using fp16\n",
])  # fmt: skip
def test_all_ranks_agree_with_the_model(lines: str) -> None:
    text = GPT.replace("schedule microbatches 2\n", "") if "1f1b" in lines else GPT
    plan = read_plan(Source("compressed.parc", text + lines.replace("1f1b", "1f1b microbatches 2")))
    compilation = compile_once(plan, EXAMPLES)
    assert static_faults(compilation.build) == []
    assert compare(case_of(compilation), 2).largest <= 1e-10
    report = report_of(compilation)
    (row,) = [row for row in report["numerics"] if "compress" in row["directive"]]
    assert all(row["residuals"] > 0 for row in report["memory"])
    without = text + "".join(line for line in lines.replace("1f1b", "1f1b microbatches 2").splitlines(keepends=True)
                             if not line.startswith("compress"))  # fmt: skip
    plain = report_of(compile_once(read_plan(Source("plain.parc", without)), EXAMPLES))
    assert row["saved_bytes"] == max(gradient_bytes(plain).values()) - max(gradient_bytes(report).values()) > 0
    if "hierarchical" in lines and "pp" not in lines:  # exact inside nodes; what stages share is not compressed
        sums = [row for row in report["communication"] if row["carries"] == "gradients" and row["axis"][:2] == "dp"]
        exact = {row["axis"] for row in sums if row["dtype"] == "float32" and row["op"] != "all_gather"}
        assert exact == {"dp_1"} and {row["axis"] for row in sums} == {"dp_0", "dp_1"}


@pytest.mark.parametrize("mesh", ["mesh dp=2\n", NODES])
@pytest.mark.parametrize(("form", "added"), [("int8", 1e-8), ("fp16", 3e-5)])
def test_what_is_sent_and_what_is_left_are_the_whole_gradient(form: str, added: float, mesh: str) -> None:
    """In the programs' own types: over two steps the sum of what was sent is that of all gradients, less what is left
    at the end, of which in nodes each rank has a part. float16 is ``added`` as it is, which rounds too."""
    plain, made = (Simulation(case_of(compiled(f"{mesh}{line}")), float64=False)
                   for line in ("", f"compress gradients over dp using {form}\n"))  # fmt: skip
    batches = random_batch(plain.case.reference, 2, torch.Generator().manual_seed(5))
    names = ["blocks.0.mlp.up.weight", "blocks.0.attn.out.bias"]
    sent: dict[str, Any] = {}
    exact: dict[str, Any] = {}
    for simulation, total in ((made, sent), (plain, exact)):
        for _ in range(2):  # with the same weights
            results = simulation.run(lambda stepper, *given: stepper.gradients(*given), batches, 0)
            for state, result in zip(simulation.states, results, strict=True):
                state.steps.update(result.state)
            for name in names:
                total[name] = total.get(name, 0) + results[0].gradients[name].double()
    for name in names:
        own = [state.steps[residual(name).name].double() for state in made.states]
        if mesh == NODES:
            assert own[0].numel() * 2 == exact[name].numel()
            own = [torch.cat(own[:2]), torch.cat(own[2:])]
        left = torch.stack(own).sum(0)
        assert float(left.abs().max()) > 0
        torch.testing.assert_close(sent[name] + left, exact[name], rtol=1e-5 if form == "int8" else 2e-3, atol=added)


@pytest.mark.parametrize(("lines", "message"), [
    ("zero 2 over dp\ncompress gradients over dp using int8\n", "every backward sums"),
    ("freeze norm\ncompress gradients over dp using fp16 on norm\n", "`norm.weight` is frozen: it has no gradient"),
    ("compress gradients over dp using int8\ncompress gradients over dp using fp16 on norm\n", "two lines compress"),
    ("compress gradients over dp using int4\n", "gradients are not sent as `int4`"),
])  # fmt: skip
def test_gradients_that_cannot_be_compressed_are_refused(lines: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        compiled(f"mesh dp=2\n{lines}")


WHOLE = """\
import torch
from torch import nn


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.digits = nn.Linear(4, 4), nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x):
        return self.line(x) * self.digits
"""
WHOLE_PLAN = """\
model "./whole.py:Scaled"
input x float32 [B, 4]
sizes B=4
loss "./planted_models.py:square"(output, x)
optimizer sgd lr 1e-2
mesh dp=2
shard x [B/dp, _]
compress gradients over dp using int8{where}
"""


def test_a_parameter_of_whole_numbers_is_left_out_or_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "whole.py").write_text(WHOLE)
    (tmp_path / "planted_models.py").write_text((EXAMPLES.parent / "tests" / "planted_models.py").read_text())
    compilation = compile_once(read_plan(Source("whole.parc", WHOLE_PLAN.format(where=""))), tmp_path)
    assert compare(case_of(compilation), 2).largest <= 1e-10
    with pytest.raises(PlanError, match="`digits` holds whole numbers: it has no gradient"):
        compile_once(read_plan(Source("whole.parc", WHOLE_PLAN.format(where=" on digits"))), tmp_path)


def test_a_gradient_minus_itself_is_no_residual() -> None:
    build = good_build(COMPRESSED_BUILDS[0], False)
    main = build.case.programs[REDUCE].main
    at, line = next((at, line) for at, line in enumerate(main.lines) if line.op == "aten.sub.Tensor")
    name = next(iter(main.bound("gradient").values())).name
    changed = with_lines(build.case.programs, REDUCE, {at: replace(line, args=(Ref(name), Ref(name)))})
    faults = [fault.message for fault in check_compressed(changed, build.build.rounding.sent)]
    assert faults == ["is not what all roundings of the gradient took from it"]


@pytest.mark.parametrize("early", [True, False])
def test_every_rounding_of_which_nothing_is_kept_is_refused(early: bool) -> None:
    for name in COMPRESSED_BUILDS:
        assert static_faults(good_build(name, early).build) == []
    rows = (EARLY if early else SUMS).rows(COMPRESSED_BUILDS, 1)
    assert {kind: row.accepted for kind, row in rows.items()} == {kind: [] for kind in rows}
    assert rows["round what nothing asks for"].mutants >= 4 and not rows["round what nothing asks for"].first["numbers"]


class _Files:
    """A checkpoint's residuals of a gradient, one row a rank."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def fill(self, key: str, target: torch.Tensor, runs: Any) -> None:
        ((rank, *_), _) = runs
        target.copy_(self.rows[rank.first])


@pytest.mark.parametrize(("there", "here"), [(4, 2), (2, 4), (4, 4)])
def test_residuals_of_another_number_of_ranks_are_divided_equally(there: int, here: int) -> None:
    rows = torch.randn(there, 3, generator=torch.Generator().manual_seed(0))
    targets = [torch.full((3,), 9.0) for _ in range(here)]
    for rank, target in enumerate(targets):
        files: Any = _Files(rows)
        read_residual(
            files, "w", (there, here), target, [packed(((rank % there, rank % there + 1),)), packed(((0, 3),))]
        )
    assert torch.allclose(sum(targets, torch.zeros(3)), rows.sum(0), atol=1e-6)
    assert there == here or all(torch.equal(target, targets[0]) for target in targets)


@pytest.mark.parametrize(("form", "mesh"), [("fp16", "mesh dp=2\n"), ("int8", "mesh dp=2\n"), ("int8", NODES)])
def test_compressed_sums_travel_while_other_blocks_are_differentiated(form: str, mesh: str) -> None:
    text = GPT.replace("layers=1", "layers=12").replace("vocab=24", "vocab=4")
    plan = read_plan(Source("deep.parc", f"{text}{mesh}bucket 1KB\ncompress gradients over dp using {form}\n"))
    report = report_of(compile_once(plan, EXAMPLES))
    rows = [row for row in report["communication"] if row["carries"] == "gradients"]
    beside = sum(row["wire_bytes"] * row["count_per_step"] for row in rows if row["hidden"])
    assert beside > (0.75 if mesh == NODES else 0.8) * sum(row["wire_bytes"] * row["count_per_step"] for row in rows)


def train(path: str, steps: int, saved: str) -> dict[str, Any]:
    """Train on one rank, all steps on one batch, and save; or go on from there for a step. Return losses, weights,
    residuals, and notes on what was restored."""
    with parc.load(path) as session:
        if steps == 1:
            session.restore(saved)
        start = {key: value.clone() for key, value in session.state.steps.items()}
        losses = [session.step(batch(0)).loss for _ in range(steps)]
        if steps > 1:
            session.save(saved)
        residuals = {key: value.clone() for key, value in session.state.steps.items()}
        return {"losses": losses, "weights": session.state_dict(), "start": start, "residuals": residuals,
                "notes": session.notes}  # fmt: skip


def train_twice(path: str, saved: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train, and go on from what was saved."""
    return train(path, STEPS, saved), train(path, 1, saved)


def skip_and_train(paths: list[str], saved: str, name: str) -> list[dict[str, Any]]:
    """Restore on one rank, do a step whose gradients overflow, then a good one, save and restore that. Return, for each
    build, the notes on what was restored first, the last loss, and a residual after each of these."""
    made = []
    for path in paths:
        with parc.load(path) as session:
            session.restore(saved)
            found: dict[str, Any] = {"notes": session.notes, "start": session.state.steps[name].clone()}
            for scale, word in ((2.0**90, "skipped"), (2.0**8, "end")):
                session.state.steps["loss_scale"].fill_(scale)
                report = session.step(batch(0))
                assert report.skipped == (word == "skipped")
                found |= {"loss": report.loss, word: session.state.steps[name].clone()}
            session.save(f"{path}-saved")
            session.state.steps[name].zero_()
            session.restore(f"{path}-saved")
            made.append({**found, "restored": session.state.steps[name].clone()})
    return made


def test_real_ranks_train_as_well_with_int8_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    one = str(build(tmp_path, "", name="one"))
    two = str(build(tmp_path, f"{DATA}compress gradients over dp using int8\n", name="two"))
    checkpoint = str(tmp_path / "saved")
    expected = train(one, STEPS, str(tmp_path / "plain"))["losses"]
    made = run_ranks(train_twice, 2, two, checkpoint)
    (first, again), (second, _) = made
    assert first["losses"] != expected
    assert first["losses"][-1] < 0.8 * expected[0]
    assert first["losses"][-1] == pytest.approx(expected[-1], rel=0.05)
    assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())
    for before, after in made:
        assert after["notes"] == ()
        assert before["residuals"].keys() == after["start"].keys() != set()
        assert all(torch.equal(value, after["start"][name]) for name, value in before["residuals"].items())
    # on four ranks each has a quarter of what is left in all, or a node's half of it, also after a skipped step
    narrow = "shard tokens, targets [B/dp, _]\nprecision fp16 loss_scale dynamic\ncompress gradients over dp using "
    four = [f"mesh dp=4\nzero 1 over dp\n{narrow}fp16\n", f"{NODES}{narrow}int8\n"]
    paths = [str(build(tmp_path, lines, name=f"four{at}")) for at, lines in enumerate(four)]
    name = residual("blocks.0.mlp.up.weight").name
    own = [first["residuals"][name], second["residuals"][name]]
    ranks = run_ranks(skip_and_train, 4, paths, checkpoint, name)
    for rank, (flat, nodes) in enumerate(ranks):
        assert len(flat["notes"]) == 1 and "divided equally over 4" in flat["notes"][0]
        torch.testing.assert_close(flat["start"] * 4, own[0] + own[1])
        assert nodes["notes"] == () and torch.equal(nodes["start"], own[rank // 2].chunk(2)[rank % 2])
        for run in (flat, nodes):
            assert torch.equal(run["start"], run["skipped"]) and not torch.equal(run["start"], run["end"])
            assert run["end"].isfinite().all() and torch.equal(run["end"], run["restored"])
            assert run["loss"] == pytest.approx(again["losses"][0], rel=1e-2)
