"""Near ties of a top-k: the distance of scores is measured, and where rounding decides, no comparison fails for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from parc.checking.checks import Checked, case_of, check_numbers
from parc.compiler.program.program import Line, Ref
from parc.runtime.compare import agreement
from parc.runtime.compare.agreement import DRAWS, Margin
from parc.runtime.compare.simulate import Simulation, compare
from tests.checked_plans import compiled
from tests.planted_builds import ROOT
from tests.test_experts import plan


@pytest.mark.parametrize(
    ("scores", "options", "apart"),
    [
        ([[4.0, 1.0, 3.0, 2.0]], (2,), 1 / 4),
        ([[4.0, 1.0, 3.0, 2.0], [8.0, 7.0, 6.5, 6.5]], (2,), 1 / 16),
        ([[1.0], [4.0], [3.0]], (2, 0), 2 / 4),
        ([[1.0, 4.0, 3.0]], (1, -1, False), 2 / 4),
        ([[2.0, 2.0, 1.0]], (1,), math.inf),  # equal scores
        ([[2.0, -math.inf, -math.inf]], (1,), math.inf),
        ([[2.0, 1.0]], (2,), math.inf),
    ],
)
def test_the_margin_of_a_choice_is_measured(scores: Any, options: tuple[Any, ...], apart: float) -> None:
    margin = Margin()
    margin.watch(Line((), "aten.topk.default", (Ref("x"), *options)), [{"x": torch.tensor(scores)}])
    margin.watch(Line((), "aten.sort.default", (Ref("x"),)), [{"x": torch.zeros(2)}])
    assert margin.apart == apart


@pytest.mark.parametrize("wrong", [1, DRAWS])
def test_numbers_that_nearly_tie_are_drawn_anew(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    """The first draws are wrong, as where a rank chooses another expert."""
    case = case_of(compilation := compiled(plan(mesh="dp=1, ep=2"), ROOT / "tests"))
    run, step = [], Simulation.step

    def planted(self: Simulation, *args: Any) -> Any:
        losses, found = step(self, *args)
        run.append(losses)
        return [loss * (1 + (len(run) <= wrong)) for loss in losses], found

    monkeypatch.setattr(Simulation, "step", planted)
    assert not compare(case, 1).tied and len(run) == 1  # nothing is near
    run.clear()
    monkeypatch.setattr(agreement, "NEAR", 1.0)
    found = compare(case, 1)
    assert found.tied == (wrong == DRAWS) and len(run) == min(wrong + 1, DRAWS)
    run.clear()
    monkeypatch.setattr(agreement, "NEAR", 0.0)
    check_numbers(compilation, checked := Checked({}))
    assert any("; no top-k decides it, whose scores are at least" in str(fault) for fault in checked.faults)
    assert checked.report["numbers"]["margin"]["apart"] > 1e-9
