"""Batches of fewer samples than a step takes: the numbers of just these samples, or an error that says what is
legal."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import parc
from parc.compiler.build.directory import read_build
from parc.compiler.program.program import Program
from parc.compiler.program.text import parse_program
from parc.compiler.verify.padding import tail_fault
from parc.compiling.compiled import Compiled
from parc.runtime.ranks.faults import RunError
from tests import checked_plans
from tests.passes.test_padding import compiled
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import DATA, EVAL, FLAT, ONE, batch, build

CALM = FLAT.replace("dropout=0.1", "dropout=0.0")
FEW = re.sub("model .*", 'model "tests.padded_models:Mlp" (vocab=256, width=8, hidden=8)', CALM)
"""The plan of a model of few operators, for losses of all kinds."""


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Plans of one rank and of two, of two microbatches of four samples; one with dropout."""
    folder = tmp_path_factory.mktemp("tails")
    return {"one": build(folder, EVAL, CALM, "one"), "dp": build(folder, DATA, CALM, "dp"),
            "dropout": build(folder, ONE, FLAT, "dropout")}  # fmt: skip


def short(count: int) -> dict[str, torch.Tensor]:
    """Return the first samples of a batch."""
    return {name: value[:count] for name, value in batch(0).items()}


def gradients(path: str, count: int) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
    """Return loss, norm and this rank's gradients of a short batch."""
    with parc.load(path, torch.device("cpu")) as session:
        result = session.gradients(short(count))
        return result.loss, result.grad_norm, result.gradients


def test_a_short_batch_is_the_mean_over_its_own_targets(builds: dict[str, Path]) -> None:
    module = parc.reference(builds["one"]).module
    with parc.load(builds["one"], torch.device("cpu")) as session:
        for count in (1, 4, 5):
            module.zero_grad()
            given = short(count)
            expected = F.cross_entropy(module(given["tokens"]).flatten(0, 1), given["targets"].flatten())
            expected.backward()
            found = session.gradients(given)
            torch.testing.assert_close(found.loss, expected.detach())
            for name, parameter in module.named_parameters():
                torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)
            assert session.evaluate(given) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_data_ranks_share_a_short_batch(builds: dict[str, Path]) -> None:
    loss, norm, found = gradients(str(builds["one"]), 3)
    for rank in run_ranks(gradients, 2, str(builds["dp"]), 3):
        torch.testing.assert_close(rank[:2], (loss, norm))
        torch.testing.assert_close(rank[2], found, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("count", [2, 6])
def test_the_plain_module_takes_short_batches_too(builds: dict[str, Path], count: int) -> None:
    plain = parc.reference(builds["dropout"])
    with parc.load(builds["dropout"]) as session:
        assert session.step(short(count)).loss == pytest.approx(plain.step(short(count)).loss, rel=1e-5)


@pytest.mark.parametrize("count", [0, 9, 16])
def test_no_sample_or_too_many_are_refused_with_what_is_legal(builds: dict[str, Path], count: int) -> None:
    wrong = {name: value.repeat(2, 1)[:count] for name, value in batch(0).items()}
    with parc.load(builds["one"]) as session, pytest.raises(RunError, match="a step takes 1 to 8; give 1 to 8 samples"):
        session.step(wrong)


def test_inputs_of_different_numbers_of_samples_are_refused(builds: dict[str, Path]) -> None:
    with parc.load(builds["one"]) as session, pytest.raises(RunError, match=r"`targets` is int64 \[3, 8\]"):
        session.step({"tokens": batch(0)["tokens"], "targets": batch(0)["targets"][:3]})


def test_a_short_batch_of_other_sequences_is_refused_in_the_sizes_that_were_given(builds: dict[str, Path]) -> None:
    wrong = {name: value.repeat(1, 2)[:3] for name, value in batch(0).items()}
    with parc.load(builds["one"]) as session, pytest.raises(RunError, match=r"int64 \[3, 16\], not int64 \[3, 8\]"):
        session.step(wrong)


def test_a_loss_that_sees_how_many_samples_there_are_takes_no_fewer(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text("def mean(output, targets):\n    return (output * output).mean()\n")
    plan = FEW.replace("cross_entropy(output, targets)", '"./losses.py:mean"(output, targets)')
    with parc.load(build(tmp_path, ONE, plan)) as session, pytest.raises(RunError) as refused:
        session.step(short(3))
    assert "the batch has 3 samples; a step takes 8; give 8 samples" in str(refused.value)
    assert "its loss is not divided by a count" in str(refused.value)


@pytest.mark.parametrize("losses", ["each * keep", "torch.where(keep, each, 0.0)", "each.masked_fill(~keep, 0.0)"])
def test_a_mean_of_ones_own_over_a_mask_takes_fewer(tmp_path: Path, losses: str) -> None:
    own = f"""
import torch


def own(output, targets):
    keep = targets != 7
    each = (output[..., 0] - targets).square()
    return ({losses}).sum() / keep.sum()
"""
    (tmp_path / "losses.py").write_text(own)
    plan = FEW.replace("cross_entropy(output, targets)", '"./losses.py:own"(output, targets)')
    path = build(tmp_path, EVAL, plan)
    given = short(3)
    given["targets"][1, :5] = 7
    keep, output = given["targets"] != 7, parc.reference(path).module(given["tokens"])
    expected = float((output[..., 0] - given["targets"])[keep].square().mean().detach())
    with parc.load(path) as session:
        assert session.evaluate(given) == pytest.approx(expected, rel=1e-5)
        assert session.step(given).loss == pytest.approx(expected, rel=1e-5)
        given["targets"][:] = 7
        with pytest.raises(RunError, match="every target of the batch is ignored or masked"):
            session.step(given)


OWN = """
def own(output, targets{more}):
    keep = {keep}
    each = (output[..., 0] - targets).square()
    return {loss}
"""
MASKED = "(each * keep).sum() / keep.sum()"
MEAN = "(each * keep).mean()"
SHARE = f"{MEAN} / keep.float().mean()"


def with_own(folder: Path, keep: str, loss: str = MASKED) -> Path:
    """Build a plan whose loss is of one's own, with a microbatch for each of 8 samples."""
    (folder / "losses.py").write_text(OWN.format(keep=keep, loss=loss, more=""))
    plan = FEW.replace("cross_entropy(output, targets)", '"./losses.py:own"(output, targets)')
    return build(folder, ONE, plan.replace("microbatches 2", "microbatches 8"))


@pytest.mark.parametrize(("keep", "loss"), [("targets != 7", SHARE), ("targets != 7", MASKED), ("targets > 99", SHARE)])
def test_a_sample_that_is_a_microbatch_of_its_own_may_be_left_out(tmp_path: Path, keep: str, loss: str) -> None:
    path, given = with_own(tmp_path, keep, loss), short(3)
    given["targets"][1, :5] = 7
    targets, output = given["targets"], parc.reference(path).module(given["tokens"])
    kept = eval(keep, {"targets": targets})
    expected = float((output[..., 0] - targets)[kept].square().mean().detach())
    with parc.load(path) as session:
        assert session.step(given).loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("keep", ["targets == 7", "targets >= 3"])
def test_a_microbatch_of_one_sample_that_would_count_is_not_added(tmp_path: Path, keep: str) -> None:
    with parc.load(with_own(tmp_path, keep)) as session, pytest.raises(RunError) as refused:
        session.step(short(3))
    assert "the count of an added sample is not 0" in str(refused.value)


@pytest.mark.parametrize("loss", [f"{MEAN} / (keep.float().mean() + 0.5)", f"({MEAN} + 1.0) / keep.float().mean()"])
def test_a_mean_beside_a_number_takes_no_fewer(tmp_path: Path, loss: str) -> None:
    """Added samples would make the mean less, and not the number."""
    with parc.load(with_own(tmp_path, "targets != 7", loss)) as session, pytest.raises(RunError) as refused:
        session.step(short(3))
    assert "its loss is not divided by a count" in str(refused.value)


@pytest.mark.parametrize("microbatches", ["microbatches 8", "microbatches 2"])
def test_a_root_of_what_is_zero_in_added_samples_takes_no_fewer(tmp_path: Path, microbatches: str) -> None:
    """Its gradient there is 0 times infinity."""
    loss = "(output[..., 0].exp() * keep).sqrt().sum() / keep.sum()"
    (tmp_path / "losses.py").write_text(OWN.format(keep="targets != 7", loss=loss, more=""))
    plan = FEW.replace("cross_entropy(output, targets)", '"./losses.py:own"(output, targets)')
    path = build(tmp_path, ONE, plan.replace("microbatches 2", microbatches))
    with parc.load(path) as session, pytest.raises(RunError, match="has no finite slope"):
        session.step(short(3))


@pytest.mark.parametrize("microbatches", ["microbatches 8", "microbatches 2"])
def test_weights_that_are_no_samples_stay_as_they_are_beside_fewer(tmp_path: Path, microbatches: str) -> None:
    (tmp_path / "losses.py").write_text(OWN.format(more=", weights", keep="weights * (targets != 7)", loss=MASKED))
    plan = FEW.replace("cross_entropy(output, targets)", '"./losses.py:own"(output, targets, weights)')
    plan = plan.replace("sizes ", "input weights float32 [S]\nsizes ", 1).replace("microbatches 2", microbatches)
    path, given = build(tmp_path, ONE, plan), {**short(3), "weights": torch.linspace(0.1, 2, 8)}
    given["targets"][1, :5] = 7
    targets, output = given["targets"], parc.reference(path).module(given["tokens"])
    keep = given["weights"] * (targets != 7)
    expected = float(((output[..., 0] - targets).square() * keep).sum().detach() / keep.sum())
    with parc.load(path) as session:
        assert session.step(given).loss == pytest.approx(expected, rel=1e-5)


def test_a_term_that_counts_no_targets_takes_no_fewer_beside_one_that_does(tmp_path: Path) -> None:
    """Its own numbers are zeros in added samples, and yet its mean is one over them too."""
    code = "import torch.nn.functional as F\n\n\ndef own(output, targets):\n    return F.cross_entropy("
    (tmp_path / "losses.py").write_text(code + 'output.movedim(-1, 1), targets, reduction="none").sum(1).mean()\n')
    scores = "cross_entropy(output, targets)"
    with_own = FEW.replace(scores, f'"./losses.py:own"(output, targets) + 0.1 {scores}')
    with parc.load(build(tmp_path, ONE, with_own)) as session, pytest.raises(RunError) as refused:
        session.step(short(3))
    assert "term 1 of its loss is not divided by a count" in str(refused.value)
    both = FEW.replace(scores, f"{scores} + 0.1 {scores}")
    assert not tail_fault(reference(checked_plans.compiled(both)), {"targets": -100})


POOLING = """
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)

    def forward(self, tokens, keep):
        x, given = self.embed(tokens), keep[..., None].float()
        return self.head(x + ({pooled})[:, None])


def own(output, targets, keep):
    each = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return (each * keep).sum() / keep.sum()
"""


@pytest.mark.parametrize(
    ("pooled", "fault"),
    [
        ("(x * given).sum(1) / given.sum(1)", "hold nan"),
        ("x.sum(1) / given.sum(1)", "hold nan"),
        ("(x * given).sum(1) / given.sum(1).clamp(min=1)", ""),
    ],
)
def test_a_model_that_divides_by_a_mask_of_the_loss_takes_no_fewer(tmp_path: Path, pooled: str, fault: str) -> None:
    """Samples whose mask is 0 everywhere would have no mean."""
    (tmp_path / "pooling.py").write_text(POOLING.replace("{pooled}", pooled))
    plan = re.sub("model .*", 'model "./pooling.py:Model" ()', CALM).replace(
        "input     targets", "input keep int64 [B, S]\ninput     targets"
    )
    path = build(
        tmp_path, EVAL, plan.replace("cross_entropy(output, targets)", '"./pooling.py:own"(output, targets, keep)')
    )
    whole = batch(0) | {"keep": torch.ones(8, 8, dtype=torch.int64)}
    whole["targets"] = whole["targets"].clamp(min=0)
    given = {name: value[:3] for name, value in whole.items()}
    with parc.load(path) as session, pytest.raises(RunError, match=fault) if fault else nullcontext():
        assert session.evaluate(given) == pytest.approx(parc.reference(path).evaluate(given), rel=1e-5)
        assert math.isfinite(session.step(given).loss)


# ---- what is proved of the captured graph


def reference(compilation: Compiled) -> Program:
    """Return the reference, read from its text."""
    return parse_program(compilation.build.reference.text(), "model")


def test_samples_that_see_each_other_are_not_apart() -> None:
    program = reference(compiled("vocab embed over tp pad", 'kind="batch"'))
    fault = tail_fault(program, {"targets": -100})
    assert fault.startswith("samples meet in the model's own code or the loss at padded_models.py:")


MEETING = """
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(256, 16), nn.BatchNorm1d(8), nn.Linear(16, 256)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.norm(x)
        return self.head(x)
"""


def test_statistics_that_each_sample_moves_by_itself_take_no_fewer(tmp_path: Path) -> None:
    (tmp_path / "meeting.py").write_text(MEETING)
    plan = re.sub("model .*", 'model "./meeting.py:Model" ()', FLAT).replace("microbatches 2", "microbatches 8")
    with parc.load(build(tmp_path, ONE, plan)) as session, pytest.raises(RunError) as refused:
        session.step(short(3))
    assert "`norm.running_mean` moves with every sample" in str(refused.value)


def test_where_samples_meet_and_what_to_do_is_said(tmp_path: Path) -> None:
    (tmp_path / "meeting.py").write_text(MEETING)
    plan = re.sub("model .*", 'model "./meeting.py:Model" ()', FLAT)
    with parc.load(build(tmp_path, ONE, plan)) as session:
        with pytest.raises(RunError) as refused:
            session.step(short(3))
        with pytest.raises(RunError, match="has 9 samples; a step takes 8; give 8 samples, or build the plan") as many:
            session.step({name: value.repeat(2, 1)[:9] for name, value in batch(0).items()})
    assert many.value.notes == ("B of the plan's `sizes` line",)
    assert "numbers: samples meet in `norm` at meeting.py:12, where aten.sum" in refused.value.notes[0]
    assert refused.value.help.endswith("build the plan for another B; a line `sizes B=LOW..8 by STEP` is for several")


def test_targets_must_be_those_that_the_loss_ignores(builds: dict[str, Path]) -> None:
    program = read_build(builds["dropout"]).reference
    assert not tail_fault(program, {"targets": -100})
    assert tail_fault(program, {}) and tail_fault(program, {"targets": 0})
    assert "a row that there is not" in tail_fault(program, {"targets": -100, "tokens": -100})


def test_samples_of_gpt2_are_apart_with_its_dropout_of_attention() -> None:
    assert not tail_fault(reference(compiled("", "n_layer=1", 1, 1, "gpt2")), {"targets": -100})
