"""Twins: what counts as the same work."""

from __future__ import annotations

from parc.twins import find_twin, twin_text
from tests.checked_plans import compiled
from tests.planted_large import refusals, refusals_text
from tests.runtime.tiny import PLAN, TENSOR


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
