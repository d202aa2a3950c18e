"""Derivatives of split values that torch writes with zeros, or with operators of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from parc.build import build

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.step = nn.Parameter(torch.full((8,), 0.3))

    def forward(self, x):
        h = self.fc(x)
        flat = torch.div(h, self.step, rounding_mode="floor") + torch.sgn(h) + torch.copysign(h, h.roll(1, -1))
        square = (h + flat).unflatten(-1, (2, 4))
        return torch.i0(square.diagonal(dim1=-1, dim2=-2)).mean() + (
            square.log().nansum() + h.nansum(1).sum() + h.sum(-1, dtype=torch.float64).float().sin().sum()
        ) / 99
"""
PLAN = """
model "./model.py:Model"
sizes B=4
optimizer sgd lr 1e-2
steps 2
loss output
input x float32 [B, 4, 8]
mesh dp=2, tp=2
shard x [B/dp, ...]
column fc over tp
"""


def test_are_those_of_the_unsharded_model(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "some.parc").write_text(PLAN)
    _, checked = build(tmp_path / "some.parc", tmp_path / "build", {})
    assert checked.agreement is not None and not checked.faults


FOCAL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, exponent):
        super().__init__()
        self.fc, self.exponent = nn.Linear(8, 8), exponent

    def forward(self, x):
        p = self.fc(x).sigmoid()
        return -((1 - p) ** self.exponent * p.log() * torch.arange(8) ** self.exponent).mean()
"""


@pytest.mark.parametrize("exponent", ["1", "1.0"])
def test_a_first_power_is_what_it_raises(tmp_path: Path, exponent: str) -> None:
    (tmp_path / "model.py").write_text(FOCAL)
    (tmp_path / "some.parc").write_text(PLAN.replace('"./model.py:Model"', f'"./model.py:Model" (exponent={exponent})'))
    _, checked = build(tmp_path / "some.parc", tmp_path / "build", {})
    assert not checked.faults and not checked.certificate.missing
