"""Sessions: the plain module's numbers on one and two real ranks, checkpoints across plans, weights that load back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import parc
from parc.compiler.layout.placement import parse_type
from parc.compiler.program.roles import SINGLE
from parc.grammar.codes import BAD_DATA, BAD_STATE, NO_DEVICE, OTHER_TORCH, WORLD_SIZE
from parc.runtime.backends.in_process import InProcess
from parc.runtime.ranks.faults import RunError
from parc.runtime.ranks.processes import DEVICE, check_device
from parc.runtime.ranks.work import RankState
from parc.runtime.state.opening import build_mesh, check_fits, open_build
from parc.runtime.step import Stepper
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import DATA, EVAL, FLAT, ONE, PLAN, TENSOR, batch, build, without_onednn

STEPS = 3
NODES = DATA.replace("dp=2", "dp=4") + "node 2\nzero 3 over dp within node\nhierarchical over dp\n"


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model under four plans."""
    folder = tmp_path_factory.mktemp("builds")
    plans = {"one": ONE, "dp": DATA, "tp": TENSOR, "nodes": NODES}
    return {name: build(folder, text + EVAL, name=name) for name, text in plans.items()}


@pytest.fixture(scope="module")
def plain(builds: dict[str, Path]) -> tuple[list[parc.StepReport], dict[str, torch.Tensor]]:
    """Return reports and weights of the plain module over twice ``STEPS`` steps."""
    module = parc.reference(builds["one"])
    reports = [module.step(batch(step)) for step in range(2 * STEPS)]
    return reports, {name: value.detach().clone() for name, value in module.module.state_dict().items()}


def train(path: str, first: int, checkpoint: str, restore: bool) -> dict[str, Any]:
    """Train some steps on one rank; return their results, and write a checkpoint."""
    with parc.load(path) as session:
        if restore:
            session.restore(checkpoint)
        reports = [session.step(batch(step)) for step in range(first, first + STEPS)]
        before = session.step_number, session.evaluate(batch(0))
        assert before == (session.step_number, session.evaluate(batch(0)))
        if not restore:
            session.save(checkpoint)
        return {"reports": reports, "weights": session.state_dict()}


def hold(reports: list[parc.StepReport], expected: list[parc.StepReport]) -> None:
    """Check that losses and norms are the plain module's."""
    for found, wanted in zip(reports, expected, strict=True):
        assert found.step == wanted.step
        assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)


def test_one_rank_trains_as_the_plain_module(builds: dict[str, Path], plain: Any) -> None:
    with parc.load(builds["one"]) as session:
        hold([session.step(batch(step)) for step in range(2 * STEPS)], plain[0])
        for name, value in session.state_dict().items():
            torch.testing.assert_close(value, plain[1][name], rtol=1e-3, atol=1e-5)


def test_two_ranks_train_as_the_plain_module_and_checkpoints_change_plans(
    builds: dict[str, Path], plain: Any, tmp_path: Path
) -> None:
    reports, weights = plain
    checkpoint = str(tmp_path / "checkpoint")
    tensor = run_ranks(train, 2, str(builds["tp"]), 0, checkpoint, False)
    for rank in tensor:
        hold(rank["reports"], reports[:STEPS])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]
    data = run_ranks(train, 2, str(builds["dp"]), STEPS, checkpoint, True)
    for rank in data:
        hold(rank["reports"], reports[STEPS:])
        for name, value in rank["weights"].items():
            torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=1e-5)
    module = parc.reference(builds["one"]).module
    module.load_state_dict(data[0]["weights"])
    assert all(torch.equal(value, data[1]["weights"][name]) for name, value in module.state_dict().items())
    with parc.load(builds["one"]) as session:
        session.restore(checkpoint)
        hold([session.step(batch(step)) for step in range(STEPS, 2 * STEPS)], reports[STEPS:])


def test_four_ranks_in_two_nodes_train_as_the_plain_module(builds: dict[str, Path], plain: Any, tmp_path: Path) -> None:
    for rank in run_ranks(train, 4, str(builds["nodes"]), 0, str(tmp_path / "checkpoint"), False):
        hold(rank["reports"], plain[0][:STEPS])


def gradients(path: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return one rank's loss and gradients of a step, by torch's own products, which a simulation has too."""
    with without_onednn(), parc.load(path) as session:
        result = session.gradients(batch(0))
        return result.loss, result.gradients


@pytest.mark.parametrize("plan", ["dp", "tp"])
def test_two_real_ranks_are_bitwise_the_two_in_one_process(builds: dict[str, Path], plan: str) -> None:
    opened = open_build(builds[plan])
    mesh = build_mesh(opened)
    weights = parc.reference(builds[plan]).module.state_dict()
    stepper = Stepper(opened.programs, opened.roles[SINGLE].actions, InProcess(mesh), torch.device("cpu"))
    types = {name: parse_type(text, mesh) for name, text in opened.manifest["parameters"].items()}
    from parc.compiler.layout.pieces import take
    from parc.runtime.data.feed import Feed

    at = [mesh.coordinates(rank) for rank in range(2)]
    states = [RankState({n: take(weights[n], t.placement, mesh, c) for n, t in types.items()}) for c in at]
    parts = [Feed(opened, mesh, place, torch.device("cpu")).cut(batch(0)) for place in at]
    with without_onednn():
        simulated = stepper.gradients(states, parts, 0)
    for (loss, found), expected in zip(run_ranks(gradients, 2, str(builds[plan])), simulated, strict=True):
        assert torch.equal(loss, expected.loss)
        assert all(torch.equal(found[name], value) for name, value in expected.gradients.items())


def test_batches_that_are_not_the_plans_are_refused(builds: dict[str, Path]) -> None:
    good = batch(0)
    faults: list[tuple[dict[str, torch.Tensor], str]] = [
        ({"tokens": good["tokens"]}, "the batch has no `targets`"),
        ({**good, "tokens": good["tokens"][:4]}, r"`tokens` is int64 \[4, 8\], not int64 \[8, 8\]"),
        ({**good, "tokens": good["tokens"].int()}, r"`tokens` is int32 \[8, 8\], not int64 \[8, 8\]"),
        ({**good, "tokens": good["tokens"] + 1000}, r"`tokens` holds 1\d+, but the model knows 0 to 255"),
        ({**good, "targets": good["targets"].clamp_min(-1)}, r"`targets` holds -1, but the model knows 0 to 255"),
    ]
    with parc.load(builds["one"]) as session:
        before = session.state_dict()
        for given, message in faults:
            with pytest.raises(RunError, match=message) as caught:
                session.step(given)
            assert caught.value.code is BAD_DATA and caught.value.help
        assert session.step_number == 0
        assert all(torch.equal(value, before[name]) for name, value in session.state_dict().items())


def test_checkpoints_that_do_not_fit_are_refused(builds: dict[str, Path], tmp_path: Path) -> None:
    other = build(tmp_path / "other", ONE, PLAN.replace("width=16", "width=32"))
    with parc.load(other) as session:
        session.save(tmp_path / "wide")
    plan = FLAT.replace("adamw lr 1e-2 eps 1e-5 weight_decay 0.1", "sgd lr 1e-2 momentum 0.9")
    with parc.load(build(tmp_path / "sgd", ONE, plan)) as session:
        session.step(batch(0))
        session.save(tmp_path / "by_sgd")
    deeper = build(tmp_path / "deep", ONE, PLAN.replace("layers=2", "layers=3"))
    with parc.load(deeper) as session:
        session.save(tmp_path / "deeper")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("kept")
    with parc.load(builds["one"]) as session:
        faults = {"wide": "of another model", "deeper": "of another model", "none": "does not exist",
                  "notes": "not a checkpoint",
                  "by_sgd": "holds the state of `sgd`, but the plan's optimizer is `adamw`"}  # fmt: skip
        for folder, message in faults.items():
            with pytest.raises(RunError, match=message) as caught:
                session.restore(tmp_path / folder)
            assert caught.value.code is BAD_STATE
        with pytest.raises(RunError, match="exists and is not a checkpoint"):
            session.save(tmp_path / "notes")
        assert (tmp_path / "notes" / "a.txt").read_text() == "kept"


def test_another_world_and_another_torch_are_refused(builds: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="1 process for a mesh of dp=2, which has 2 ranks") as caught:
        parc.load(builds["dp"])
    assert caught.value.code is WORLD_SIZE
    monkeypatch.setattr(torch, "__version__", "2.0.1+cu118")
    with pytest.raises(RunError, match=r"was built with torch .*; this is torch 2\.0\.1") as caught:
        check_fits(open_build(builds["one"]), 1)
    assert caught.value.code is OTHER_TORCH


CONSTANTS = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.unused = nn.Linear(4, 4), nn.Linear(2, 2)
        self.register_buffer("kept", torch.full((4,), 2.0))
        self.register_buffer("fleeting", torch.arange(4.0), persistent=False)
        self.plain = torch.tensor([0.5, 0.25, 0.125, 1.0])

    def forward(self, x, y):
        z = self.linear(x) * self.kept + self.fleeting * self.plain
        return ((z * torch.tensor([1.0, 3.0, 1.0, 7.0]) - y) ** 2).mean()
"""


def test_buffers_and_constants_of_the_code_are_there(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(CONSTANTS)
    plan = """
model     "./model.py:Model" ()
input     x float32 [B, 4]
input     y float32 [B, 4]
sizes     B=4
loss      output
optimizer sgd lr 0.01
schedule  microbatches 2
"""
    made = build(tmp_path, ONE, plan)
    generator = torch.Generator().manual_seed(0)
    batches = [{name: torch.randn(4, 4, generator=generator) for name in ("x", "y")} for _ in range(3)]
    module = parc.reference(made)
    with parc.load(made) as session:
        for given in batches:
            assert session.step(given).loss == pytest.approx(module.step(given).loss, rel=1e-5)
        before = {name: value.clone() for name, value in module.module.state_dict().items()}
        module.module.load_state_dict(session.state_dict())
        torch.testing.assert_close(dict(module.module.state_dict()), before)


def test_a_gpu_that_is_not_there_is_never_replaced_by_the_cpu(
    builds: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(call: Callable[[], object], message: str) -> None:
        with pytest.raises(RunError, match=message) as fault:
            call()
        assert fault.value.code is NO_DEVICE and "--device cpu" in fault.value.help

    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(lambda: parc.load(builds["one"], gpu), "torch finds no `cuda` here")
    refused(lambda: parc.reference(builds["one"], gpu), "torch finds no `cuda` here")
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    refused(lambda: parc.load(builds["dp"], gpu), "torch finds no `cuda` here")
    with monkeypatch.context() as chosen:
        chosen.setenv(DEVICE, "cuda")
        refused(lambda: parc.load(builds["dp"]), "torch finds no `cuda` here")
        for word in ("meta", "banana"):
            chosen.setenv(DEVICE, word)
            with pytest.raises(RunError, match=f"`PARC_DEVICE` is `{word}`, and parc computes on `cpu` or `cuda`"):
                parc.load(builds["dp"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refused(lambda: parc.load(builds["dp"], gpu), "torch finds 1 GPU here, and 2 processes need one each")
    refused(lambda: check_device(torch.device("cuda", 3)), "torch finds no `cuda:3` here")
