"""Buffers that a forward assigns: each other's old values, in stages, of no elements, nothing but rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from parc.checks import check_build
from parc.compiler.plan import read_plan
from parc.driver import Compiled, compile_plan
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source

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


def square(output):
    return (output ** 2).mean() + output.mean()
"""
_PLAN = """\
model "./net.py:{model}
input x float32 [B, 8]
sizes B=8
loss "./net.py:square"(output)
optimizer sgd lr 0.1
mesh dp=2, pp={pp}
shard x [B/dp, _]
"""
_STAGES = "stage before b over pp\nschedule gpipe microbatches 2\n"


def compiled(folder: Path, model: str, stages: bool = False) -> Compiled:
    (folder / "net.py").write_text(_MODEL)
    text = _PLAN.format(model=model, pp=1 + stages) + _STAGES * stages
    return compile_plan(read_plan(Source("net.parc", text)), folder)


@pytest.mark.parametrize("stages", [False, True], ids=["one stage", "stages"])
@pytest.mark.parametrize("where", ["a", "b"])
@pytest.mark.parametrize(
    "lines", ["shift", "swap", "moves", "input", "other", "cache", "infinite", "one", "reset", "last"]
)
def test_what_a_forward_assigns_is_kept(tmp_path: Path, lines: str, where: str, stages: bool) -> None:
    assert not check_build(compiled(tmp_path, f'Net" ({where}="{lines}")', stages)).faults


def test_statistics_that_are_nothing_but_rounding_are_compared_with_others(tmp_path: Path) -> None:
    assert not check_build(compiled(tmp_path, 'Twice" ()')).faults


def test_a_module_of_two_names_whose_buffers_change_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        compiled(tmp_path, 'Called" ()')
    (found,) = error.value.diagnostics
    assert "the buffers of `norm` are those of `same.0` too" in found.message and "one name" in found.help
