"""Twins: the work that counts as the same."""

from __future__ import annotations

from pathlib import Path

import pytest

import parc.checking.checks
import parc.checking.twins
from parc.checking.certified import Certificate
from parc.checking.checks import check_build
from parc.checking.twins import find_twin, subject_of, twin_text, work_of
from parc.grammar.diagnostics import PlanError
from tests.checked_plans import compiled, compiled_net
from tests.planted_bugs import LARGE
from tests.planted_builds import ROOT, table_text
from tests.runtime.tiny import PLAN, TENSOR

SIX = """\
model "./planted_models.py:Stack" (width=16)
input x float32 [B, D]
input wanted float32 [B, D]
sizes B=64, D=16
loss "./planted_models.py:square"(output, wanted)
optimizer sgd lr 0.1
mesh a=2, b=2, c=2, d=2, e=2, f=2
shard x, wanted [B/a/b/c, _]
column a over d
row b over d
shard c.weight [o/e/f, _]
"""


def test_what_is_wrong_with_one_repetition_of_a_large_build_is_not_certified() -> None:
    rows = LARGE.rows(["gpt dp=8, tp=2"], 1, share=4)
    print(table_text(rows))
    assert not [what for row in rows.values() for what in row.accepted]
    assert len(rows) >= 15
    assert sum(row.first["certificate"] for row in rows.values()) >= 5


def test_a_twin_is_nowhere_larger_than_its_build() -> None:
    lines = TENSOR + "verify layers=4, width=8, S=16\n"
    compilation = compiled(PLAN.replace("layers=2", "layers=1") + lines)
    twin = find_twin(compilation)
    assert twin_text(twin).startswith("the twin: layers=1, width=8, B=4, S=8, mesh tp=2")


def test_a_mesh_of_six_axes_has_a_twin() -> None:
    compilation = compiled(SIX, ROOT / "tests")
    assert compilation.mesh.world == 64
    twin = find_twin(compilation)
    assert twin.mesh == compilation.mesh


_POSITIONS = """
import torch
from torch import nn

class Positions(nn.Module):
    def __init__(self, length=128, width=8):
        super().__init__()
        self.table, self.places = nn.Linear(width, width), nn.Parameter(torch.zeros(length, width))

    def forward(self, x):
        return self.table(x + self.places[: x.shape[1]])
"""


def test_a_twin_of_shorter_sequences_has_no_more_positions_than_these(tmp_path: Path) -> None:
    """In the build ``places[: 128]`` is no slice, and would be one beside the 128 places of the build."""
    compilation = compiled_net(tmp_path, _POSITIONS, 'Positions"', shape="B, S, 8", sizes="B=64, S=128")
    twin = find_twin(compilation)
    assert twin.overrides == {"length": 32} and {name: size.high for name, size in twin.plan.sizes.items()}["S"] == 32


_PICTURES = """
import torch
from torch import nn

class Pictures(nn.Module):
    def __init__(self, size=32, width=8):
        super().__init__()
        self.stem, self.place = nn.Conv2d(3, width, 4, stride=4), nn.Parameter(torch.zeros(width, size // 4, size // 4))
        self.mix, self.head = nn.Conv2d(width, width, 3, padding=1, groups=width), nn.Linear(width, 4)

    def forward(self, x):
        x = self.stem(x) + self.place
        return self.head((x + self.mix(x)).mean((2, 3)))
"""


def test_a_large_model_without_smaller_arguments_is_tested_on_a_smaller_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilation = compiled_net(tmp_path, _PICTURES, 'Pictures"', shape="B, 3, H, H", sizes="B=32, H=32")
    assert subject_of(compilation).compiled is compilation
    monkeypatch.setattr(parc.checking.twins, "_SMALL_WORK", work_of(compilation) // 4)
    small = subject_of(compilation)
    assert (small.text, small.steps) == ("the same plan at B=4, H=32", 3)
    assert subject_of(compilation, certified=False).compiled is compilation
    monkeypatch.setattr(parc.checking.checks, "certificate_of", lambda _: Certificate(missing="no rule for `x`"))
    checked = check_build(compilation)
    assert not checked.faults and checked.report["numbers"]["on"] == "the build itself"
    monkeypatch.setattr(parc.checking.twins, "_LARGE_WORK", work_of(small.compiled) // 2)
    monkeypatch.setattr(parc.checking.twins, "_MOST_WORK", work_of(small.compiled))
    few = subject_of(compilation)
    assert few.steps == 1 and few.text.startswith("the twin: B=4, H=32, mesh dp=2, pp=1 (")
    monkeypatch.setattr(parc.checking.twins, "_MOST_WORK", work_of(small.compiled) // 2)
    with pytest.raises(PlanError) as refused:
        subject_of(compilation)
    assert "too large to test its numbers" in refused.value.diagnostics[0].message
