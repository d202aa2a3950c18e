"""Twins: what counts as the same work."""

from __future__ import annotations

from parc.twins import find_twin, twin_text
from tests.checked_plans import compiled
from tests.planted_builds import ROOT
from tests.planted_large import refusals, refusals_text
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


def test_what_is_wrong_with_one_repetition_of_a_large_build_is_seen_beside_its_twin() -> None:
    rows = refusals(1, ["gpt dp=8, tp=2"])
    print(refusals_text(rows))
    accepted = [found for row in rows.values() for found in row if found.startswith("accepted")]
    assert not accepted
    assert len(rows) >= 20
    assert sum(row["twin"] for row in rows.values()) >= 15


def test_a_twin_is_nowhere_larger_than_its_build() -> None:
    lines = TENSOR + "verify layers=4, width=8, S=16\n"
    made = compiled(PLAN.replace("layers=2", "layers=1") + lines)
    twin, differences = find_twin(made, made.built.programs)
    assert not differences
    assert twin_text(twin).startswith("the twin: layers=1, width=8, S=8, B=8, mesh tp=2")


def test_a_mesh_of_six_axes_has_a_twin() -> None:
    made = compiled(SIX, ROOT / "tests")
    assert made.mesh.world == 64
    twin, differences = find_twin(made, made.built.programs)
    assert not differences and twin.mesh == made.mesh
