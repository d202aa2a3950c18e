"""Losses that are sums: every term has its own denominator, however the batch is split."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import parc
from parc.advice import warnings_of
from parc.checking.certified import certificate_of
from parc.checking.checks import case_of
from parc.checking.reports import report_of
from parc.compiler.build.directory import write_build
from parc.compiler.program.actions import SCALING
from parc.compiler.program.text import parse_program
from parc.grammar.diagnostics import Severity
from parc.runtime.compare.model_run import step_errors
from tests.checked_plans import checked, compiled, in_texts
from tests.draws import all_but
from tests.planted_builds import ROOT
from tests.runtime.ranks import run_ranks
from tests.summed_losses import Gated

PLAN = """\
model "./summed_losses.py:Gated"
input tokens int64 [B, S]
input targets int64 [B, S]
input later int64 [B, S]
sizes B=8, S=4
loss cross_entropy(output.logits, targets, ignore=0) + 0.3 cross_entropy(output.ahead, later, ignore=1) + {terms}
optimizer adamw lr 1e-2 clip 1.0
"""
TERMS = "0.01 output.aux_loss + 0.1 output.z_loss"
MESHES = {
    "dp=2, microbatches": "mesh dp=2\nshard tokens, targets, later [B/dp, _]\nschedule microbatches 2\n",
    "zero 3": "mesh dp=4\nshard tokens, targets, later [B/dp, _]\nzero 3 over dp\n",
    "a pipeline": "mesh pp=2, dp=2\nshard tokens, targets, later [B/dp, _]\nstage before blocks.1 over pp\n"
    "schedule 1f1b microbatches 4\n",
    "fp16": "mesh dp=2\nshard tokens, targets, later [B/dp, _]\nschedule microbatches 2\n"
    "precision fp16 loss_scale dynamic\n",
    "vocabulary split": "mesh tp=2\nvocab heads.* over tp pad\nschedule microbatches 2\n",
}
TWO = MESHES["dp=2, microbatches"]


@pytest.mark.parametrize("mesh", all_but(["dp=2, microbatches"], MESHES))
def test_a_sum_of_losses_composes_with(mesh: str) -> None:
    compilation = compiled(PLAN.format(terms=TERMS) + MESHES[mesh], ROOT / "tests")
    assert checked(compilation).report["checks"]["numbers"] == "tested"
    balance = (3,) * ("microbatches" in MESHES[mesh])  # it is no mean over tokens
    assert compilation.built.averaged == balance
    assert [(w.code.name, w.severity) for w in warnings_of(compilation)] == [("P0217", Severity.NOTE) for _ in balance]


PAIRS = """
import torch
import torch.nn.functional as F
from torch import nn


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(5, 4)

    def forward(self, x, y):
        return self.first(x), self.second(y)


def matched(output):
    x, y = output
    return F.cross_entropy(x @ y.T, torch.arange(x.shape[0]))
"""


@pytest.mark.parametrize("mesh", ["dp=2", "dp=1"])
def test_targets_that_are_numbers_of_the_code_are_counted(mesh: str, tmp_path: Path) -> None:
    """Each sample's own pair is its class: what is counted reads no input."""
    (tmp_path / "pairs.py").write_text(PAIRS)
    lines = f'loss "./pairs.py:matched" (output)\noptimizer sgd lr 0.1\nmesh {mesh}\nshard x, y [B/dp, _]\n'
    inputs = "input x float32 [B, 6]\ninput y float32 [B, 5]\nsizes B=8\n"
    compilation = compiled(f'model "./pairs.py:Pairs"\n{inputs}{lines}', tmp_path)
    assert checked(compilation).report["checks"]["numbers"] == "tested"
    assert parse_program(compilation.build.reference.text(), "model") == compilation.build.reference


@pytest.mark.parametrize("loss", ["0.5 output.aux_loss + {near}", "{near} + 0.5 {near}", "0.5 {near} + 0.5 {near}"])
def test_terms_may_stand_in_any_order_and_share_a_mean(loss: str, tmp_path: Path) -> None:
    """Terms that are one mean, as after common subexpressions, have one count each."""
    near = "cross_entropy(output.logits, targets, ignore=0)"
    text = re.sub(r"loss .*", f"loss {loss.format(near=near)}", PLAN.format(terms=TERMS)).replace("input later", "#")
    compilation = compiled(text + TWO.replace(", later", ""), ROOT / "tests")
    assert checked(compilation).report["checks"]["numbers"] == "tested"
    assert compilation.built.averaged == tuple(
        number for number, term in enumerate(loss.split(" + "), 1) if "aux" in term
    )
    write_build(compilation.to_write(report_of(compilation)), tmp_path / "build")
    plain, given = parc.reference(tmp_path / "build"), {key: batch()[key] for key in ("tokens", "targets")}
    logits = plain.module(given["tokens"])["logits"].flatten(0, 1)
    mean = F.cross_entropy(logits, given["targets"].flatten(), ignore_index=0)
    aux = sum(plain.module(part)["aux_loss"] for part in given["tokens"].chunk(2)) / 2
    wanted = 0.5 * aux + mean if "aux" in loss else mean * (1.5 if loss[0] == "{" else 1)
    assert plain.step(given).loss == pytest.approx(float(wanted.detach()), rel=1e-6)


def batch() -> dict[str, torch.Tensor]:
    """Return a batch in which samples have very different numbers of targets."""
    draw = torch.Generator().manual_seed(5)
    tokens, targets, later = torch.randint(17, (3, 8, 4), generator=draw)
    targets[:3], later[2:, 1:] = 0, 1
    return {"tokens": tokens, "targets": targets, "later": later}


def train(path: str, steps: int) -> list[float]:
    """Train on one batch; return the losses. A step that is not done before has that of the first."""
    with parc.load(path) as session:
        evaluated, losses = float(session.gradients(batch()).loss), [session.step(batch()).loss for _ in range(steps)]
        assert evaluated == pytest.approx(losses[0], rel=1e-6)
        return losses


def expected(model: Gated, given: Mapping[str, torch.Tensor]) -> float:
    """Return the loss of a batch of two microbatches, term by term: means over targets of the whole step, and averages
    over microbatches."""
    parts = [model(tokens) for tokens in given["tokens"].chunk(2)]
    whole = {key: torch.cat([part[key] for part in parts]) for key in ("logits", "ahead")}
    near = F.cross_entropy(whole["logits"].flatten(0, 1), given["targets"].flatten(), ignore_index=0)
    far = F.cross_entropy(whole["ahead"].flatten(0, 1), given["later"].flatten(), ignore_index=1)
    others = [0.01 * part["aux_loss"] + 0.1 * part["z_loss"] for part in parts]
    return float((near + 0.3 * far + sum(others) / 2).detach())


def test_each_term_has_its_own_denominator_on_real_ranks(tmp_path: Path) -> None:
    compilation = compiled(PLAN.format(terms=TERMS) + TWO, ROOT / "tests")
    write_build(compilation.to_write(report_of(compilation)), tmp_path / "build")
    plain = parc.reference(tmp_path / "build")
    first = expected(plain.module, batch())  # type: ignore[arg-type]
    losses = [plain.step(batch()).loss for _ in range(3)]
    assert losses[0] == pytest.approx(first, rel=1e-6)
    for found in run_ranks(train, 2, str(tmp_path / "build"), 3):
        assert found == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("term_3 = aten.div.Tensor(to_copy, 2)", "term_3 = aten.div.Tensor(to_copy, 4)"),
        ("term_3 = aten.div.Tensor(to_copy, 2)", "term_3 = aten.div.Tensor(to_copy, to_copy_1)"),
        ("term_2 = aten.div.Tensor(to_copy, to_copy_1)", "term_2 = aten.div.Tensor(to_copy_1, to_copy)"),
        ("term_2 = aten.div.Tensor(to_copy, to_copy_1)", "term_2 = aten.div.Tensor(to_copy, 2)"),
        ("reciprocal.default(to_copy)", "reciprocal.default(to_copy_1)"),
    ],
)
def test_a_wrong_weight_of_a_term_is_not_certified(old: str, new: str) -> None:
    build = compiled(PLAN.format(terms=TERMS) + TWO, ROOT / "tests").build
    text = build.text(build.programs[SCALING])
    assert text.count(old) == 1 and not certificate_of(build).missing
    wrong = parse_program(text.replace(old, new))
    assert certificate_of(in_texts(build, {**build.programs, SCALING: wrong})).missing


def test_a_model_whose_scale_is_not_what_the_manifest_says_is_refused() -> None:
    """The certificate compares programs with ``scale()`` of the model, and this compares that with the manifest."""
    compilation = compiled(PLAN.format(terms=TERMS) + TWO, ROOT / "tests")
    case = case_of(compilation)
    assert max(error for _, error in step_errors(case)) < 1e-12
    text = case.reference.text()
    wrong = parse_program(text.replace("term_3 = aten.div.Tensor(to_copy, 2)", "term_3 = aten.div.Tensor(to_copy, 4)"))
    assert wrong.text() != text
    assert {name for name, error in step_errors(replace(case, reference=wrong)) if error > 1e-3} == {"term 3"}
