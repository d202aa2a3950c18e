"""The texts of programs stay as they are, letter by letter."""

import json

import pytest

from tests.goldens import GOLDEN, PLANS, GoldenPlan, changes


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan.quick], ids=lambda plan: plan.name.replace("\n", ", "))
def test_a_plan_compiles_to_the_golden_texts(plan: GoldenPlan) -> None:
    difference = changes(plan, plan.texts())
    assert not difference, difference


def test_every_plan_of_the_corpus_has_golden_hashes() -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert list(golden) == [plan.name for plan in PLANS]
    assert all("memory" in hashes and "plan.parc" in hashes for hashes in golden.values())


def test_a_changed_letter_shows_the_line_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = GoldenPlan("gpt")
    texts = {"stage0.F.py": "a = mul(b, c)\nreturn a", "plan.parc": "mesh dp=2"}
    monkeypatch.setattr("tests.goldens._texts_then", lambda _: {**texts, "stage0.F.py": "a = mul(b, d)\nreturn a"})
    difference = changes(plan, texts)
    assert "-a = mul(b, d)\n+a = mul(b, c)\n return a" in difference and "make goldens-update" in difference
