"""Loss scales: float16 beside torch's autocast and GradScaler, skipped steps, and the scale in checkpoints, pipelines
and sharded state."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import parc
from parc.checking.checks import check_files, prove
from parc.compiler.build.directory import read_build, write_build
from parc.compiler.program.actions import RESCALE, SCALING
from parc.compiler.program.step_values import BACKOFF, GROWTH, INITIAL, INTERVAL, residual
from parc.runtime.launch.train import skip_text
from parc.runtime.machine.kernels import KERNELS
from parc.runtime.ranks.faults import RunError
from parc.runtime.state.index import write_facts
from parc.runtime.state.step_state import LEAST, state_after
from tests.checked_plans import compiled, simulated
from tests.draws import share
from tests.planted_builds import TIED
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import BOTH, DATA, EVAL, ONE, PLAN, batch, build

DYNAMIC, FIXED = "precision fp16 loss_scale dynamic\n", "precision fp16 loss_scale 1024\n"
PLAIN = PLAN.replace("dropout=0.1", "dropout=0.0")


@share(0.4)
@given(st.lists(st.sampled_from([1.0, 0.0, math.inf, math.nan]), max_size=12), st.sampled_from([1, 2, 3]),
       st.sampled_from([INITIAL, 2.0**126, 2.0**-100]))  # fmt: skip
def test_the_scale_follows_the_rule_of_torch(norms: list[float], interval: int, first: float) -> None:
    theirs, tracker = torch.tensor(first), torch.tensor(0, dtype=torch.int32)
    ours = torch.tensor(first), torch.tensor(0), torch.tensor(0)
    for norm in norms:
        found = torch.tensor(float(not math.isfinite(norm)))
        torch._amp_update_scale_(theirs, tracker, found, GROWTH, BACKOFF, interval)
        ours = KERNELS["parc.next_loss_scale.default"](None, torch.tensor(norm), *ours, GROWTH, BACKOFF, interval)
        assert (float(ours[0]), int(ours[1])) == (float(theirs), int(tracker))
    assert int(ours[2]) == sum(not math.isfinite(norm) for norm in norms)
    scaler = torch.amp.GradScaler("cpu")
    defaults = scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    assert defaults == (INITIAL, GROWTH, BACKOFF, INTERVAL)


def weights(session: parc.Session) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in session.state.parameters.items()}


def test_a_skipped_step_leaves_the_residuals_of_compressed_gradients_as_they_are() -> None:
    after = {"loss_scale": torch.tensor(1.0), "good_steps": torch.tensor(0), "skipped_steps": torch.tensor(1)}
    residuals = {residual("w").name: torch.full((2,), float("nan"))}
    assert state_after(after | residuals, skipped=True) == after
    assert state_after(after | residuals, skipped=False).keys() == (after | residuals).keys()


@pytest.mark.parametrize(("scale", "steps"), [(INITIAL, 12), (2.0**26, 16)])
def test_training_is_that_of_autocast_with_a_grad_scaler(tmp_path: Path, scale: float, steps: int) -> None:
    path = build(tmp_path, ONE, PLAIN.replace("microbatches 2", "microbatches 1") + DYNAMIC)
    module = parc.reference(path).module
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.1)
    losses, skipped = [], 0
    for step in range(steps):
        given = batch(step % 4)
        with torch.autocast("cpu", dtype=torch.float16):
            output = module(given["tokens"])
        loss = torch.nn.functional.cross_entropy(output.float().flatten(0, 1), given["targets"].flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
        losses.append(float(loss.detach()))
    with parc.load(path) as session:
        session.state.steps["loss_scale"].fill_(scale)
        reports = [session.step(batch(step % 4)) for step in range(steps)]
    assert reports[-1].metrics == {"loss_scale": scaler.get_scale(), "skipped_steps": skipped}
    assert (skipped > 0) == (scale > INITIAL)
    assert [report.loss for report in reports] == pytest.approx(losses, rel=5e-3)
    assert losses[-1] < losses[0] - 0.2


NORMED = """
import torch
from torch import nn


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 16)

    def forward(self, tokens):
        return self.head(self.norm(self.table(tokens).flatten(0, 1))).unflatten(0, tokens.shape)
"""
SMALL = """
model "./normed.py:Normed"
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=4, S=4
loss cross_entropy(output, targets)
optimizer adamw lr 1e-2
"""


def small(step: int) -> dict[str, torch.Tensor]:
    tokens, targets = torch.randint(0, 16, (2, 4, 4), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens, "targets": targets}


def everything(session: parc.Session) -> dict[str, torch.Tensor]:
    """Return a copy of all that a session keeps from step to step."""
    state = {f"state.{name}": value for name, value in session.state.steps.items()} | session.state_dict()
    for name, parameter in session.state.parameters.items():
        state |= {f"{slot}.{name}": value for slot, value in session.optimizer.state[parameter].items()}
    return {name: value.clone() for name, value in state.items()}


def test_a_skipped_step_changes_nothing_but_the_scale(tmp_path: Path) -> None:
    (tmp_path / "normed.py").write_text(NORMED)
    path = build(tmp_path, EVAL, SMALL + DYNAMIC)
    with parc.load(path) as session:
        session.step(small(0))
        loss = float(session.gradients(small(1)).loss)
        exact = session.evaluate(small(1))
        before = everything(session)
        session.state.steps["loss_scale"].fill_(2.0**40)
        assert session.evaluate(small(1)) == exact  # the loss does not know the scale
        report = session.step(small(1))
        after = everything(session)
        assert report.skipped and not math.isfinite(report.grad_norm) and report.loss == loss
        assert report.metrics == {"loss_scale": 2.0**39, "skipped_steps": 1}
        assert skip_text(report).startswith("step 2 skipped: the gradients' norm is ")
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {"state.loss_scale", "state.good_steps", "state.skipped_steps"}
        assert "norm.running_mean" in before and "exp_avg.head.weight" in before
        assert session.step_number == 2
        session.state.steps["loss_scale"].fill_(INITIAL)
        assert not session.step(small(2)).skipped


def test_what_no_scale_helps_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "normed.py").write_text(NORMED)
    for line, words in ((DYNAMIC, "smallest loss scale"), (FIXED, "loss_scale dynamic"), ("", "lower `lr`")):
        with parc.load(build(tmp_path, ONE, SMALL + line)) as session:
            if line == DYNAMIC:
                session.state.steps["loss_scale"].fill_(LEAST / 2)
            session.state.parameters["head.weight"].fill_(math.nan)
            state = {name: value.clone() for name, value in session.state.steps.items()}
            with pytest.raises(RunError, match=words):
                session.step(small(0))
            assert session.step_number == 0 and state == session.state.steps
            assert "skipped_steps" not in "".join(session.state.steps) or line == DYNAMIC


def test_a_fixed_scale_changes_no_more_than_rounding(tmp_path: Path) -> None:
    losses = []
    for line in (FIXED, "precision fp16\n"):
        with parc.load(build(tmp_path, ONE, PLAIN + line)) as session:
            losses.append([session.step(batch(step)).loss for step in range(3)])
            assert not session.state.steps.keys() - {"loss_scale"}
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    programs = read_build(tmp_path / "build").programs
    assert RESCALE not in programs and not programs[SCALING].main.bound("state")


def test_a_checkpoint_holds_the_scale_and_other_plans_go_on_with_it(tmp_path: Path) -> None:
    path = build(tmp_path / "fp16", ONE, PLAIN + DYNAMIC)
    kept = tmp_path / "kept"
    with parc.load(path) as session:
        session.step(batch(0))
        session.state.steps["loss_scale"].fill_(2.0**40)
        session.step(batch(1))
        session.state.steps["loss_scale"].fill_(2.0**12)
        session.save(kept)
        state = dict(session.state.steps)
        expected = session.step(batch(2))
        session.restore(kept)
        assert session.state.steps == state
        assert session.step(batch(2)) == expected
    with parc.load(build(tmp_path / "bf16", ONE, PLAIN + "precision bf16\n")) as other:
        other.restore(kept)  # which has no use for it
        other.step(batch(2))
        other.save(tmp_path / "plain")
    with parc.load(path) as session:
        session.restore(tmp_path / "plain")
        assert float(session.state.steps["loss_scale"]) == INITIAL and session.step_number == 3
        facts = json.loads((kept / "state.json").read_text())
        for name, value in (("loss_scale", -1.0), ("loss_scale", 0.0), ("good_steps", -1), ("skipped_steps", None)):
            wrong = {**facts, "state": {**facts["state"], name: value}}
            write_facts(kept, wrong)
            with pytest.raises(RunError, match="holds a loss scale that no step can have made"):
                session.restore(kept)


def run_of(path: str, checkpoint: str) -> list[tuple[Any, ...]]:
    """Train on one rank, from a scale that is too large; return what each step reports."""
    with parc.load(path) as session:
        session.state.steps["loss_scale"].fill_(2.0**26)
        reports = [session.step(batch(step)) for step in range(8)]
        session.save(checkpoint)
        return [(report.skipped, report.metrics["loss_scale"], report.loss) for report in reports]


STAGES = "mesh pp=2\nstage before blocks.1 over pp\n"
PIPE = PLAIN.replace("schedule  microbatches 2", "schedule 1f1b microbatches 2")


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Any, ...]]]:
    """A build of one rank, and what its steps report."""
    folder = tmp_path_factory.mktemp("alone")
    one = build(folder, ONE, PLAIN + DYNAMIC)
    return one, run_of(str(one), str(folder / "kept"))


@pytest.mark.parametrize(("plan", "lines"), [(PIPE, STAGES), (PLAIN, DATA + "zero 3 over dp\n")])
def test_real_ranks_skip_the_same_steps(
    tmp_path: Path, trained_alone: tuple[Path, list[tuple[Any, ...]]], plan: str, lines: str
) -> None:
    one, alone = trained_alone
    many = build(tmp_path / "many", lines, plan + DYNAMIC)
    first, second = run_ranks(run_of, 2, str(many), str(tmp_path / "others"))
    assert first == second
    skipped, others = (sum(row[0] for row in rows) for rows in (alone, first))
    assert 0 < others < 8 and skipped - 1 <= others <= skipped  # a rank's part of a gradient may overflow later
    assert [row[2] for row in first[:others]] == pytest.approx([row[2] for row in alone[:others]], rel=1e-3)
    with parc.load(one) as session:
        session.restore(tmp_path / "others")
        assert float(session.state.steps["loss_scale"]) == first[-1][1]
        assert int(session.state.steps["skipped_steps"]) == others


@pytest.mark.parametrize(
    "lines",
    ["zero 1 over dp\n" + FIXED, "zero 2 over dp\n" + DYNAMIC, "precision fp16 on blocks.1 loss_scale dynamic\n"],
)
def test_builds_of_float16_are_accepted_and_proved_from_their_files(lines: str, tmp_path: Path) -> None:
    compilation = compiled(PLAN + BOTH + lines)
    report = simulated(compilation)
    assert [row["directive"] for row in report["numerics"]] == [lines.strip().split("\n")[-1]]
    write_build(compilation.to_write(report), tmp_path / "build")
    assert not check_files(read_build(tmp_path / "build"))


def test_a_pipeline_with_tied_weights_and_a_range_of_sizes_with_both_narrow_types_are_accepted() -> None:
    tied = TIED.format(layers=3) + "\nmesh tp=2, pp=2\ncolumn layers.1 over tp\nstage before layers.1 over pp\n"
    simulated(compiled(tied + "schedule 1f1b microbatches 2\n" + DYNAMIC, Path(__file__).parent.parent))
    frozen = tied.replace("mesh tp=2, pp=2", "mesh pp=3").replace("column layers.1 over tp\n", "")
    frozen += "stage before layers.2 over pp\nschedule gpipe microbatches 2\nfreeze layers.1\n"
    assert not prove(compiled(frozen + DYNAMIC, Path(__file__).parent.parent))  # a role without gradients
    ranged = SMALL.replace("./normed.py:Normed", "./padded_models.py:Mlp").replace("S=4", "S=4..8 by 4")
    split = "mesh tp=2\ncolumn up over tp\nrow down over tp\n"
    both = "precision bf16\nprecision fp16 on down loss_scale dynamic\n"
    assert not prove(compiled(ranged + split + both, Path(__file__).parent.parent))
