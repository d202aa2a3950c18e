"""Tensors that lie otherwise in memory than their programs compute with them: of a model's factory, of a checkpoint, of
a state that was loaded. Each is copied into its program's layout once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import parc
from tests.runtime.ranks import run_ranks

MODEL = '''
import torch
from torch import nn


class Net(nn.Module):
    """A module whose tensors lie in memory as they came: by pixels, by columns, as parts of others, as loaded ones."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
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
TENSOR = """
mesh      tp=2
shard     first [_, 16/tp]
row       second over tp
shard     part [_, 8/tp]
shard     orthogonal.weight [_, 8/tp]
shard     conv.weight [8/tp, _, _, _]
"""
OPTIMIZERS = ("adamw lr 1e-2 eps 1e-5", "sgd lr 1e-1 momentum 0.9")


def built(folder: Path, optimizer: str, mesh: str = "") -> Path:
    """Build the model's plan."""
    folder.mkdir()
    (folder / "net.py").write_text(MODEL)
    (folder / "net.parc").write_text(PLAN.format(optimizer=optimizer) + mesh)
    assert parc.cli.main(["build", str(folder / "net.parc"), "-o", str(folder / "build")]) == 0
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
