"""Bounds of activations: operators whose derivatives compare with numbers that no line of a model has."""

from __future__ import annotations

import re
from pathlib import Path

from parc.checking.certified import certificate_of
from parc.checking.checks import check_build
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.program import Program
from parc.compiler.program.text import parse_program
from parc.compiling.driver import compile_plan
from tests.checked_plans import in_texts

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Bounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, wanted):
        y = F.relu6(self.up(x)) + F.hardtanh(self.up(x), -0.5, 2.0)
        never = torch.where(torch.arange(16) >= 0, torch.zeros(16), -3e38)  # a number, or a tensor that holds it
        y = y.masked_fill(never.bool(), -3e38)
        y = torch.where(torch.isfinite(y), y, 0.0) + torch.nan_to_num(y)
        y = y + torch.where(y.masked_fill(y > 40.0, float("nan")).isnan(), 0.0, y)
        loss = F.soft_margin_loss(self.down(y), torch.ones_like(wanted), reduction="none")
        return loss.mean() + torch.where(y > 50.0, 0.0, y).mean()
"""
PLAN = """
model "./bounded.py:Bounded"
input x float32 [B, D]
input wanted float32 [B, D]
sizes B=8, D=8
loss output
optimizer sgd lr 0.1
mesh dp=2, tp=2
shard x, wanted [B/dp, _]
column up over tp
row down over tp
"""

_SAME = {"ha": " = aten.relu.default(up_addmm)", "gt": " = aten.logical_not.default(mul)"}
"""Models without the bound, which give the same on random data."""


def test_derivatives_may_compare_with_what_no_line_has_and_a_bound_beyond_the_data_may_not_move(tmp_path: Path) -> None:
    (tmp_path / "bounded.py").write_text(MODEL)
    (tmp_path / "bounded.parc").write_text(PLAN)
    compiled = compile_plan(read_plan(tmp_path / "bounded.parc"), tmp_path)
    assert check_build(compiled).faults == []
    programs = compiled.build.programs
    assert not certificate_of(compiled.build).missing
    for old, new in (("50", "500"), ("6", "60"), ("2", "1000000"), ("2", "inf")):
        changed: dict[str, Program] = {}
        for action in ("F", "B"):
            text = programs[action].text()
            changed[action] = parse_program(re.sub(rf", {old}(\.0)?\)", f", {new})", text), action)
        assert certificate_of(in_texts(compiled.build, {**programs, **changed})).missing, (old, new)
    text = programs["F"].text()
    for bound in ("hardtanh = aten.hardtanh.default(up_addmm, 0, 6)", "gt_1 = aten.gt.Scalar(add_2, 50.0)"):
        assert bound in text
        without = parse_program(text.replace(bound, bound.partition(" = ")[0] + _SAME[bound[:2]]), "F")
        assert certificate_of(in_texts(compiled.build, {**programs, "F": without})).missing, bound
