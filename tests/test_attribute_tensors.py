"""Tensors that a model keeps in plain attributes, alone or in containers: read, assigned, views of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from parc.checking.checks import check_build
from parc.grammar.diagnostics import PlanError
from tests.checked_plans import compiled_net
from tests.draws import star

_MODEL = """
import numpy
import torch
from torch import nn


class Rope:
    def __init__(self):
        self.angles = torch.arange(8.0)


class Net(nn.Module):
    default = None

    def __init__(self, attribute, line=""):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("count", torch.ones(8))
        fresh = torch.arange(8.0) + 1
        self.kept = {
            "alone": lambda: fresh,
            "view": lambda: fresh.view(2, 4)[:, :2].t(),
            "list": lambda: [fresh, "text", fresh * 2],
            "dict": lambda: {"a": (fresh, [fresh.cos()])},
            "numpy": lambda: [torch.from_numpy(numpy.ones(8, dtype="float32"))],
            "buffer": lambda: self.count,
            "buffers": lambda: [self.count, self.count],
            "part": lambda: self.count[:4],
            "weight": lambda: [self.fc.weight],
            "row": lambda: self.fc.weight[0],
            "detached": lambda: [self.fc.weight.detach()],
            "object": lambda: Rope(),
            "modules": lambda: [nn.Linear(8, 8)],
        }[attribute]()
        self.default = fresh / 2
        self.kept_0 = "a name that is taken"
        self.line = line

    def forward(self, x):
        if self.line == "adds":
            self.count.add_(x.mean(0).detach())
        kept = self.kept
        if isinstance(kept, dict):
            kept = [kept["a"][0], kept["a"][1][0]]
        if isinstance(kept, Rope):
            kept = kept.angles
        if isinstance(kept, list) and isinstance(kept[0], nn.Module):
            kept = kept[0](x)
        if isinstance(kept, list):
            kept = sum(value for value in kept if not isinstance(value, str))
        y = self.fc(x) * kept.sigmoid().mean() + self.default
        if self.line == "keeps":
            self.default = y.detach()
        if self.line == "moves":
            self.kept = y.detach()[0]
        if self.line == "stores":
            self.kept[0] = y.detach()
        return y


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.utils.weight_norm(nn.Linear(8, 8))
        self.seen = torch.zeros(1)
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        self.seen = self.fc(x)
        return self.lstm(torch.tanh(self.seen)[:, None])[0]
"""


KINDS = ("alone", "view", "list", "dict", "numpy", "buffer", "buffers", "weight")


@pytest.mark.parametrize(("attribute", "line"), star(KINDS, ["adds", ""]))
def test_tensors_of_plain_attributes_are_read(tmp_path: Path, attribute: str, line: str) -> None:
    compilation = compiled_net(tmp_path, _MODEL, f'Net" (attribute="{attribute}", line="{line}")')
    assert not check_build(compilation).faults
    assert "default" not in compilation.captured.updates


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_what_a_forward_assigns_before_it_reads_it_is_not_kept(tmp_path: Path) -> None:
    compilation = compiled_net(tmp_path, _MODEL, 'Normed" ()')
    assert not check_build(compilation).faults and not compilation.captured.updates


@pytest.mark.parametrize(("arguments", "message", "help_"), [
    ('attribute="row"', "`kept` shares the memory of `fc.weight`, which a step changes", "in the forward"),
    ('attribute="detached"', "`kept_0_` shares the memory of `fc.weight`", "in the forward"),
    ('attribute="part", line="adds"', "`kept` shares the memory of `count`", "`clone`"),
    ('attribute="object"', "no module holds", "an attribute of a module"),
    ('attribute="modules"', "no module holds", "`nn.ModuleList`"),
    ('attribute="alone", line="keeps"', "assigns a new tensor to `default`", "register it as a buffer"),
    ('attribute="alone", line="moves"', "assigns a new tensor to `kept`", "register it as a buffer"),
    ('attribute="list", line="stores"', "assigns a new tensor to `kept`", "register it as a buffer"),
])  # fmt: skip
def test_what_a_program_cannot_hold_is_refused(tmp_path: Path, arguments: str, message: str, help_: str) -> None:
    with pytest.raises(PlanError) as error:
        compiled_net(tmp_path, _MODEL, f'Net" ({arguments})')
    (diagnostic,) = error.value.diagnostics
    assert message in diagnostic.message and help_ in diagnostic.help
