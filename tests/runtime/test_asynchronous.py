"""Asynchronous pipelines: every step computes with the weights before the last update, on simulated and on real
ranks, as a loop of plain torch does that holds a ring of weights."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from runpy import run_path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parc
from certificate.step import certify_texts
from certificate.text import Refused
from parc.checking.checks import case_of
from parc.compiler.plan.open_plan import read_open
from parc.grammar.codes import SCHEDULE_MISFIT
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from parc.runtime.compare.simulate import Simulation
from parc.runtime.ranks.faults import RunError
from tests.checked_plans import compiled
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import DATA, EXAMPLES, PLAN, batch, build

LAYERS = 4


def staged(ranks: int, microbatches: int, more: str = "", dp: int = 1) -> str:
    """Return a plan of stages of one layer or two, on ranks that split the batch too."""
    plan = PLAN.replace("layers=2", f"layers={LAYERS}").replace("dropout=0.1", "dropout=0.0")
    plan = plan.replace("microbatches 2", f"async microbatches {microbatches}").replace("steps     3", "steps     40")
    cuts = "before " + ", ".join(f"blocks.{at}" for at in range(1, ranks))
    return plan + DATA.replace("dp=2", f"dp={dp}, pp={ranks}") + f"stage {cuts} over pp\n{more}"


def ring(weights: dict[str, torch.Tensor], steps: int, seed: int = 0) -> tuple[list[float], nn.Module]:
    """Train the plain model in float64 for some steps: the gradients of a step are those at the weights before the last
    update, and it updates the newest. Return the losses, and the model with the newest weights."""
    make = run_path(str(EXAMPLES / "gpt.py"))["GPT"]
    newest, read = (make(layers=LAYERS, width=16, heads=2, vocab=256, length=8, dropout=0.0).double() for _ in range(2))
    newest.load_state_dict({name: value.double() for name, value in weights.items()}, strict=False)
    versions = deque([{name: value.clone() for name, value in newest.state_dict().items()}] * 2, maxlen=2)
    optimizer = torch.optim.AdamW(newest.parameters(), 1e-2, eps=1e-5, weight_decay=0.1)
    losses = []
    for step in range(steps):
        whole = batch(step, seed)
        read.load_state_dict(versions[0])
        read.zero_grad()
        loss = F.cross_entropy(read(whole["tokens"]).flatten(0, 1), whole["targets"].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(read.parameters(), 1.0)
        for parameter, other in zip(newest.parameters(), read.parameters(), strict=True):
            parameter.grad = other.grad
        optimizer.step()
        versions.append({name: value.clone() for name, value in newest.state_dict().items()})
        losses.append(float(loss.detach()))
    return losses, newest


def parts(step: int) -> list[dict[str, torch.Tensor]]:
    """Return the microbatches of a step."""
    return [{name: value.chunk(4)[part] for name, value in batch(step).items()} for part in range(4)]


@pytest.mark.parametrize(
    ("ranks", "dp", "more"),
    [(2, 1, ""), (3, 1, ""), (4, 1, ""), (2, 2, "zero 1 over dp\n"), (2, 2, "zero 3 over dp\n")],
    ids=["2 ranks", "3 ranks", "4 ranks", "zero 1", "zero 3"],
)  # fmt: skip
def test_twenty_steps_of_simulated_ranks_are_those_of_a_ring_of_weights(ranks: int, dp: int, more: str) -> None:
    case = case_of(compiled(staged(ranks, 4, more, dp)))
    simulation = Simulation(case)
    losses, plain = ring({**case.parameters, **case.buffers}, 20)
    for step, expected in enumerate(losses):
        coming = (parts(step + 1), step + 1) if step % 7 != 3 else None  # now and then nothing is known of the next
        for loss in simulation.step(parts(step), step, coming)[0]:
            assert abs(float(loss) - expected) <= 1e-10
    wanted = plain.state_dict()
    for name, value in simulation.parameters():
        torch.testing.assert_close(value, wanted[name].reshape(value.shape), rtol=0, atol=1e-10)


def trained(
    folder: str, steps: int, saved: str, restored: str = "", how: str = "data"
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on the plan's data, or on batches that are passed, with the next one, or where that is not known."""
    with parc.load(folder) as session:
        if restored:
            session.restore(restored)
        losses, batches = [], [session.feed.beginning(step, 8) for step in range(steps)] if how != "data" else []
        while (step := session.step_number) < steps:
            after = batches[step + 1] if how == "coming" and step + 1 < steps else None
            report = session.step() if how == "data" else session.step(batches[step], coming=after)
            assert (session._coming is not None) == (how == "data" or after is not None)
            assert report.step == step + 1
            losses.append(report.loss)
        session.save(saved)
        return losses, session.state_dict()


def test_ranks_that_go_on_from_a_checkpoint_are_those_that_never_stopped_to_the_bit(tmp_path: Path) -> None:
    """Checkpoints are made while the next step is under way, and hold both weights."""
    folder = str(build(tmp_path, "", staged(2, 4)))
    at = [str(tmp_path / name) for name in ("whole", "half", "rest", "passed", "coming")]
    whole = run_ranks(trained, 2, folder, 6, at[0])[0]
    half = run_ranks(trained, 2, folder, 3, at[1])[0]
    rest = run_ranks(trained, 2, folder, 6, at[2], at[1])[0]
    passed = run_ranks(trained, 2, folder, 6, at[3], "", "passed")[0]
    coming = run_ranks(trained, 2, folder, 6, at[4], "", "coming")[0]
    assert half[0] + rest[0] == whole[0] == passed[0] == coming[0]
    for other in (rest, passed, coming):
        assert all(torch.equal(value, other[1][name]) for name, value in whole[1].items())
    plain = parc.reference(folder)
    start = {name: value.clone() for name, value in plain.module.state_dict().items()}
    losses = [plain.step(batch(step)).loss for step in range(6)]
    exact, _ = ring(start, 6)
    torch.testing.assert_close(losses, exact, rtol=1e-4, atol=1e-5)
    plain = parc.reference(folder)
    torch.testing.assert_close(whole[0], [plain.step().loss for _ in range(6)], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole[1], dict(plain.module.state_dict()), rtol=1e-3, atol=2e-5)


def wandered(folder: str, saved: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train five steps in a way that leaves what was begun of the next step again and again."""
    with parc.load(folder) as session:
        losses = [session.step().loss]
        session.gradients()
        losses.append(session.update(session.gradients()).loss)  # the same step again
        session.save(saved)
        session.step()
        session.restore(saved)
        losses.append(session.step(session.feed.beginning(2, 8), coming=session.feed.beginning(0, 8)).loss)
        session.state_dict()
        before = session.evaluate(batch(0))
        losses.append(session.step().loss)
        assert session.evaluate(batch(0)) != before
        losses.append(session.update(session.gradients()).loss)
        return losses, session.state_dict()


def test_whatever_a_loop_does_between_steps_they_are_the_same_to_the_bit(tmp_path: Path) -> None:
    lines = "zero 1 over dp\nema 0.9\neval\n"
    folder = str(build(tmp_path, "", staged(2, 4, lines, 2).replace("dropout=0.0", "dropout=0.1")))
    straight = run_ranks(trained, 4, folder, 5, str(tmp_path / "straight"))
    for (losses, weights), expected in zip(
        run_ranks(wandered, 4, folder, str(tmp_path / "saved")), straight, strict=True
    ):
        assert losses == expected[0]
        assert all(torch.equal(value, weights[name]) for name, value in expected[1].items())


def apart(folder: str, last: int) -> str:
    """Return the error of ranks that do their second step in two ways."""
    with parc.load(folder) as session:
        session.last_step = last
        session.step()
        with pytest.raises(RunError) as caught:
            session.step(session.feed.beginning(1, 8) if session.rank else None)
        return str(caught.value)


@pytest.mark.parametrize("last", [2, 3])
def test_ranks_that_go_on_in_different_ways_are_told_so(tmp_path: Path, last: int) -> None:
    folder = str(build(tmp_path, "", staged(2, 4)))
    for error in run_ranks(apart, 2, folder, last):
        assert "rank 0 is in `session.step beside another`, and rank 1 is in `session.step`" in error


def misled(folder: str) -> tuple[list[str], float]:
    """Return the errors of batches that are said to come and cannot, and the loss of the step that then is done."""
    errors = []
    with parc.load(folder) as session:
        good = session.feed.beginning(0, 8)
        for coming in ({**good, "tokens": good["tokens"][:4]}, {"tokens": good["tokens"]}):
            with pytest.raises(RunError) as caught:
                session.step(good, coming=coming)
            errors.append(str(caught.value))
        return errors, session.step(good).loss


def test_a_batch_that_cannot_come_is_told_from_that_of_the_step(tmp_path: Path) -> None:
    folder = str(build(tmp_path, "", staged(2, 4)))
    straight = run_ranks(trained, 2, folder, 1, str(tmp_path / "saved"))[0][0]
    for errors, loss in run_ranks(misled, 2, folder):
        assert "the batch that is coming: `tokens` is int64 [4, 8], not int64 [8, 8]" in errors[0]
        assert "the batch that is coming: the batch has no `targets`" in errors[1]
        assert [loss] == straight


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("precision fp16 loss_scale dynamic\n", "before it is known whether the one before it is skipped"),
        ('offload optimizer to "files"\n', "`offload` keeps one step's"),
    ],
    ids=["a dynamic loss scale", "offload"],
)
def test_what_a_step_cannot_have_that_begins_before_the_last_one_ends_is_refused(more: str, why: str) -> None:
    with pytest.raises(PlanError) as caught:
        compiled(staged(2, 4, more))
    (found,) = caught.value.diagnostics
    assert found.code == SCHEDULE_MISFIT and why in found.message and found.help and "1f1b" in found.help
    assert found.primary is not None and found.primary.span.text in more


def test_a_model_whose_steps_change_buffers_is_refused(tmp_path: Path) -> None:
    net = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
    def forward(self, x):
        return self.b(self.norm(self.a(x))).mean()
"""
    (tmp_path / "net.py").write_text(net)
    text = f"""
model "{tmp_path}/net.py:Net"
input x float32 [B, 8]
sizes B=8
loss output
optimizer sgd lr 0.1
mesh pp=2
stage before b over pp
schedule async microbatches 2
"""
    with pytest.raises(PlanError, match="steps change the buffer"):
        compiled(text, tmp_path)


def test_a_search_does_not_choose_between_two_algorithms() -> None:
    text = "let s = 1f1b | async\n" + staged(2, 4).replace("schedule  async", "schedule $s")
    with pytest.raises(PlanError) as caught:
        read_open(Source("plan.parc", text), {})
    assert "`async` computes with weights of the step before" in caught.value.diagnostics[0].message


def test_a_build_that_does_not_say_that_its_weights_are_older_is_refused() -> None:
    compilation = compiled(staged(2, 4))
    manifest = {**compilation.build.manifest, "optimizer": {**compilation.build.manifest["optimizer"]}}
    del manifest["optimizer"]["previous"]
    build = replace(compilation.build, manifest=manifest)
    assert any("has no `previous`" in str(fault) for fault in build.fact_faults())
    with pytest.raises(Refused, match="a step begins before the last update"):
        certify_texts(build.texts, manifest)
