"""Tensors that lie otherwise in memory than their programs compute with them: of a model's factory, of a checkpoint, of
a state that was loaded. Each is copied into its program's layout once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import parc
from parc.checking.reports import report_of
from parc.compiler.build.directory import write_build
from parc.compiler.plan.plan import read_plan
from tests.captured_once import compile_once
from tests.checked_plans import compiled, compiled_net
from tests.family_plans import plan_text
from tests.layouts import strided, strided_after_a_step
from tests.planted_builds import ROOT
from tests.runtime.ranks import run_ranks

MODEL = '''
import torch
from torch import nn


class Net(nn.Module):
    """A module whose tensors lie in memory as they came: by pixels, by columns, as parts of others, as loaded ones."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.first = nn.Parameter(torch.randn(16, 8).t() / 4)
        self.second, self.orthogonal = nn.Linear(16, 8), nn.Linear(8, 8)
        self.part = nn.Parameter((torch.randn(8, 12) / 4)[:, 2:10])
        nn.init.orthogonal_(self.orthogonal.weight)
        self.register_buffer("table", torch.arange(64.0).view(8, 8).t() / 64)
        loaded = {"weight": torch.randn(16, 8).t() / 4, "bias": torch.zeros(16)[::2]}
        self.second.load_state_dict(loaded, assign=True)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = self.norm(self.conv(x)).mean((2, 3)) @ self.first
        return self.orthogonal(torch.tanh(self.second(x)) @ (self.part + self.table))


def square(output):
    return (output ** 2).mean()
'''
PLAN = """
model     "./net.py:Net"
input     x float32 [B, 4, 6, 6]
sizes     B=8
loss      "./net.py:square" (output)
optimizer {optimizer}
seed      3
ema       0.9
"""
BOTH = """
mesh      dp=2, tp=2
shard     x [B/dp, _, _, _]
row       second, orthogonal over tp
column    conv over tp
zero 3 over dp
"""
OPTIMIZERS = ("adamw lr 1e-2 eps 1e-5", "sgd lr 1e-1 momentum 0.9")
KEPT = 'offload optimizer, parameters to "kept"\n'


def built(folder: Path, optimizer: str, lines: str = "") -> Path:
    """Build the model's plan with further lines, without checks."""
    folder.mkdir()
    (folder / "net.py").write_text(MODEL)
    (folder / "net.parc").write_text(PLAN.format(optimizer=optimizer) + lines)
    compilation = compile_once(read_plan(folder / "net.parc"), folder)
    write_build(compilation.to_write(report_of(compilation)), folder / "build")
    return folder / "build"


def batch(step: int) -> dict[str, torch.Tensor]:
    """Return a batch, whose images lie by pixels."""
    images = torch.randn(8, 4, 6, 6, generator=torch.Generator().manual_seed(step))
    return {"x": images.to(memory_format=torch.channels_last)}


def trained(path: str, checkpoint: str) -> tuple[list[str], list[float], dict[str, torch.Tensor]]:
    """Train two steps, save, train one more, restore and repeat it. Return what lay otherwise on the way, the losses,
    and the weights at the end."""
    with parc.load(path) as session:
        wrong, losses = strided(session.state, session.optimizer), []
        losses += [session.step(batch(step)).loss for step in range(2)]
        wrong += strided(session.state, session.optimizer)
        session.save(checkpoint)
        losses.append(session.step(batch(2)).loss)
        session.restore(checkpoint)
        wrong += strided(session.state, session.optimizer)
        losses.append(session.step(batch(2)).loss)
        wrong += strided(session.state, session.optimizer)
        return wrong, losses, session.state_dict()


def plainly(path: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of three steps of the plain module, and its weights."""
    plain = parc.reference(path)
    return [plain.step(batch(step)).loss for step in range(3)], plain.module.state_dict()


@pytest.mark.parametrize(
    ("optimizer", "lines"), [(OPTIMIZERS[0], ""), (OPTIMIZERS[0], KEPT), (OPTIMIZERS[1], "")],
    ids=["adamw", "adamw in files", "sgd"],
)  # fmt: skip
def test_tensors_of_a_model_that_lie_otherwise_train_as_in_the_plain_module(
    optimizer: str, lines: str, tmp_path: Path
) -> None:
    path = built(tmp_path / "one", optimizer, lines)
    losses, weights = plainly(path)
    wrong, found, state = trained(str(path), str(tmp_path / "checkpoint"))
    assert not wrong and found == pytest.approx([*losses, losses[-1]], rel=1e-5)
    torch.testing.assert_close(state, weights, rtol=1e-4, atol=1e-5)
    file = load_file(tmp_path / "checkpoint" / "state.safetensors")
    moment = "exp_avg" if "adam" in optimizer else "momentum_buffer"
    assert file[f"optimizer.{moment}.first"].shape == (8, 16)


def test_so_do_their_pieces_on_ranks(tmp_path: Path) -> None:
    path = built(tmp_path / "four", OPTIMIZERS[0], BOTH)
    losses, weights = plainly(path)
    for wrong, found, state in run_ranks(trained, 4, str(path), str(tmp_path / "checkpoint")):
        assert not wrong and found == pytest.approx([*losses, losses[-1]], rel=1e-5)
        torch.testing.assert_close(state, weights, rtol=1e-4, atol=1e-5)


def otherwise(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers, by columns or by pixels."""
    if tensor.dim() == 4:
        return tensor.to(memory_format=torch.channels_last)
    return tensor.mT.contiguous().mT if tensor.dim() == 2 else tensor


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_that_was_loaded_by_hand_is_copied_once(optimizer: str, tmp_path: Path) -> None:
    path = built(tmp_path / "one", optimizer)
    states = []
    for by_hand in (False, True):
        with parc.load(path) as session:
            session.step(batch(0))
            if by_hand:
                state = session.optimizer.state_dict()
                for slots in state["state"].values():
                    slots |= {slot: otherwise(value) for slot, value in slots.items()}
                session.optimizer.load_state_dict(state)
                for parameter in session.state.parameters.values():
                    parameter.data = otherwise(parameter.data)
                assert len(strided(session.state, session.optimizer)) > 6
            session.step(batch(1))
            assert not strided(session.state, session.optimizer)
            session.step(batch(2))
            states.append(session.state_dict())
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-6)


# ---- in the simulator: tensors of all ranks


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
