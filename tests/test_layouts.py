"""Layouts of a session's tensors: weights of a factory or a checkpoint that lie otherwise are copied once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import parc
from parc.checking.reports import report_of
from parc.compiler.build.directory import write_build
from parc.compiler.plan.plan import read_plan
from parc.compiling.driver import compile_plan
from tests.family_plans import plan_text
from tests.layouts import strided, strided_after_a_step

from .checked_plans import compiled, compiled_net
from .test_families import ROOT

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, way="plain"):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.mix = nn.Parameter(torch.linspace(-1, 1, 96).sin().reshape(12, 8))
        self.register_buffer("scale", torch.linspace(1, 2, 32).reshape(8, 4))
        if way == "channels_last":
            self.to(memory_format=torch.channels_last)
        elif way == "transposed":
            self.mix = nn.Parameter(self.mix.detach().t().contiguous().t())
            self.register_buffer("scale", self.scale.t().contiguous().t())
        elif way == "loaded":
            state = {name: x.mT.contiguous().mT if x.dim() > 1 else x for name, x in self.state_dict().items()}
            self.load_state_dict(state, assign=True)

    def forward(self, x):
        x = self.norm(self.conv(x)).mean((2, 3))
        return (x @ self.mix.t()) @ self.mix @ self.scale
"""
PLAN = """
model     "./net.py:Net" (way="{way}")
input     x float32 [B, 3, 4, 4]
input     y int64 [B]
sizes     B=8
loss      cross_entropy(output, y)
optimizer adamw lr 1e-2 eps 1e-5 weight_decay 0.1 clip 1.0
ema       0.5
seed      3
data      synthetic
{lines}"""
KEPT = 'offload optimizer, parameters to "kept"\n'


def made(folder: Path, way: str, lines: str = "") -> Path:
    (folder / "net.py").write_text(MODEL)
    (folder / "net.parc").write_text(PLAN.format(way=way, lines=lines))
    plan = compile_plan(read_plan(folder / "net.parc"), folder)
    write_build(plan.to_write(report_of(plan)), folder / "build")
    return folder / "build"


@pytest.mark.parametrize("lines", ["", KEPT], ids=["", "offload"])
@pytest.mark.parametrize("way", ["channels_last", "transposed", "loaded"])
def test_a_session_copies_what_lies_otherwise_and_trains_as_plain_pytorch(way: str, lines: str, tmp_path: Path) -> None:
    build = made(tmp_path, way, lines)
    batch = {"x": torch.linspace(-3, 3, 384).sin().reshape(8, 3, 4, 4), "y": torch.arange(8) % 4}
    batch["x"] = batch["x"].contiguous(memory_format=torch.channels_last)
    plain = parc.reference(build)
    with parc.load(build, "cpu") as session:
        for step in range(3):
            assert session.step(batch).loss == pytest.approx(plain.step(batch).loss, rel=1e-5)
            assert not strided(session.state, session.optimizer)
            if step == 1:
                session.save(tmp_path / "saved")
        trained = session.state_dict()
    for name, value in plain.module.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-6)
    with parc.load(build, "cpu") as session:
        session.restore(tmp_path / "saved")
        assert not strided(session.state, session.optimizer)
        session.step(batch)
        assert not strided(session.state, session.optimizer)
        assert all(torch.equal(value, trained[name]) for name, value in session.state_dict().items())


@pytest.mark.parametrize("name", ["convolutions", "llama"])
def test_every_tensor_of_a_rank_lies_as_its_type_says(name: str) -> None:
    """``make families`` asks this of every family under every plan."""
    assert strided_after_a_step(compiled(plan_text(name), ROOT, dp=2, tp=2)) == []


RESIDUALS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.mix = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 4).t())

    def forward(self, x):
        return self.a(x) @ self.mix.t()
"""


def test_residuals_and_moments_lie_as_their_types_say(tmp_path: Path) -> None:
    lines = "compress gradients over dp using int8\n"
    assert strided_after_a_step(compiled_net(tmp_path, RESIDUALS, 'Net"', lines=lines)) == []
