"""Tensors that lie otherwise in memory than their programs compute with them: of a model's factory, of a checkpoint, of
a state that was loaded. Each is copied into its program's layout once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import parc
from parc.checking.reports import report_of
from parc.compiler.build.directory import write_build
from parc.compiler.plan.plan import read_plan
from tests.captured_once import compile_once
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


def built(folder: Path, optimizer: str, mesh: str = "") -> Path:
    """Build the model's plan, without checks."""
    folder.mkdir()
    (folder / "net.py").write_text(MODEL)
    (folder / "net.parc").write_text(PLAN.format(optimizer=optimizer) + mesh)
    compiled = compile_once(read_plan(folder / "net.parc"), folder)
    write_build(compiled.to_write(report_of(compiled)), folder / "build")
    return folder / "build"


def batch(step: int) -> dict[str, torch.Tensor]:
    """Return a batch, whose images lie by pixels."""
    images = torch.randn(8, 4, 6, 6, generator=torch.Generator().manual_seed(step))
    return {"x": images.to(memory_format=torch.channels_last)}


def strided(session: parc.Session) -> Iterator[str]:
    """Yield the tensors of a session that do not lie row by row."""
    state = session.state
    held = {**state.parameters, **state.buffers, **{str(key): value for key, value in state.steps.items()}}
    for name, parameter in state.parameters.items():
        held |= {f"{slot} of {name}": value for slot, value in session.optimizer.state.get(parameter, {}).items()}
    yield from (name for name, value in held.items() if isinstance(value, torch.Tensor) and not value.is_contiguous())


def trained(path: str, checkpoint: str) -> tuple[list[str], list[float], dict[str, torch.Tensor]]:
    """Train two steps, save, train one more, restore and repeat it. Return what lay otherwise on the way, the losses,
    and the weights at the end."""
    with parc.load(path) as session:
        wrong, losses = [*strided(session)], []
        losses += [session.step(batch(step)).loss for step in range(2)]
        wrong += strided(session)
        session.save(checkpoint)
        losses.append(session.step(batch(2)).loss)
        session.restore(checkpoint)
        wrong += strided(session)
        losses.append(session.step(batch(2)).loss)
        wrong += strided(session)
        return wrong, losses, session.state_dict()


def plainly(path: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of three steps of the plain module, and its weights."""
    plain = parc.reference(path)
    return [plain.step(batch(step)).loss for step in range(3)], plain.module.state_dict()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tensors_of_a_model_that_lie_otherwise_train_as_in_the_plain_module(optimizer: str, tmp_path: Path) -> None:
    path = built(tmp_path / "one", optimizer)
    losses, weights = plainly(path)
    wrong, found, state = trained(str(path), str(tmp_path / "checkpoint"))
    assert not wrong and found == pytest.approx([*losses, losses[-1]], rel=1e-5)
    torch.testing.assert_close(state, weights, rtol=1e-4, atol=1e-5)
    file = load_file(tmp_path / "checkpoint" / "state.safetensors")
    assert file["optimizer.exp_avg.first" if "adam" in optimizer else "optimizer.momentum_buffer.first"].shape == (
        8,
        16,
    )


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
                assert len([*strided(session)]) > 6
            session.step(batch(1))
            assert not [*strided(session)]
            session.step(batch(2))
            states.append(session.state_dict())
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-6)
