"""Buffers that a forward assigns: each other's old values, in stages, of no elements, nothing but rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from parc.checking.checks import check_build
from parc.grammar.diagnostics import PlanError
from tests.checked_plans import compiled_net
from tests.draws import star

_MODEL = """
import torch
from torch import nn


class Part(nn.Module):
    def __init__(self, lines):
        super().__init__()
        self.fc, self.lines = nn.Linear(8, 8), lines
        self.register_buffer("now", torch.zeros(8))
        self.register_buffer("before", torch.ones(8))
        self.register_buffer("cache", torch.zeros(0))

    def forward(self, h, x):
        h = self.fc(h)
        mean = h.detach().mean(0)
        if self.lines == "shift":
            self.before = self.now
            self.now = mean
        if self.lines == "swap":
            self.now, self.before = self.before, self.now
        if self.lines == "moves":
            self.now = 0.9 * self.now + 0.1 * mean
        if self.lines == "spread":  # one number to all of a buffer, twice, and numbers of another type
            self.now.copy_(mean[:1])
            self.now.copy_(2 * mean.mean() + self.now.sum())
            self.before.copy_((self.now + mean).double())
        if self.lines == "input":
            self.now = x.mean(0)
        if self.lines == "other":
            self.now = self.before
        if self.lines == "cache" and self.cache.shape[0] < h.shape[1]:
            self.cache = torch.arange(h.shape[1], dtype=h.dtype)
        if self.lines == "infinite":
            self.now = torch.where(mean > 0, mean, -torch.inf)
            return h
        return h * (1 + self.cache.sum()) + self.now + 2 * self.before


class Net(nn.Module):
    def __init__(self, a="", b=""):
        super().__init__()
        self.a, self.b = Part(a), Part(b)
        self.register_buffer("start", torch.full((8,), 0.5))

    def forward(self, x):
        y = self.b(torch.tanh(self.a(x, x)), x)
        if "one" in (self.a.lines, self.b.lines):
            self.a.now = self.b.now = x.mean(0)
        if "reset" in (self.a.lines, self.b.lines):
            self.a.now = self.b.now = self.start
        if self.a.lines == "last":
            self.a.now = self.b.now = self.a.before
        return y


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.again = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.again(self.norm(self.fc(x)))


class Called(Twice):
    def __init__(self):
        super().__init__()
        self.same = nn.ModuleList([self.norm])

    def forward(self, x):
        return self.same[0](self.fc(x))
"""


ASSIGNED = (
    ("shift", "swap"), ("moves", "shift"), ("cache", "input"), ("other", "infinite"), ("", "one"), ("", "reset"),
    ("last", "moves"), ("spread", "moves"),
)  # fmt: skip
"""Pairs of what the first and the second part assign."""


@pytest.mark.parametrize(("assigned", "stages"), star(ASSIGNED, (True, False)), ids=str)
def test_what_a_forward_assigns_is_kept(tmp_path: Path, assigned: tuple[str, str], stages: bool) -> None:
    first, second = assigned
    assert not check_build(compiled_net(tmp_path, _MODEL, f'Net" (a="{first}", b="{second}")', stages)).faults


def test_statistics_that_are_nothing_but_rounding_are_compared_with_others(tmp_path: Path) -> None:
    assert not check_build(compiled_net(tmp_path, _MODEL, 'Twice" ()')).faults


def test_a_module_of_two_names_whose_buffers_change_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        compiled_net(tmp_path, _MODEL, 'Called" ()')
    (diagnostic,) = error.value.diagnostics
    assert "`norm` and `same.0` have the same buffers" in diagnostic.message and "one name" in diagnostic.help
