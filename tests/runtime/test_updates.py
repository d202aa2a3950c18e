"""Updates of ranks beside the optimizer's formula: right ones pass where gradients are rounding, wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch

from parc.checking.checks import case_of
from parc.runtime.compare import simulate
from parc.runtime.compare.agreement import TOLERANCE, Agreement
from parc.runtime.compare.model_run import Case
from parc.runtime.compare.simulate import compare
from parc.runtime.state.optimizer import make_optimizer, update
from tests.checked_plans import compiled
from tests.runtime.test_optimizers import FEW, LINE, SPLIT
from tests.runtime.tiny import EXAMPLES

GROUPS = "\noptimizer on **.bias weight_decay 0\noptimizer on head lr 1e-3\nema 0.9 every 2\n"
LINES = {
    "adamw": "adamw lr 1e-4 clip 0.01 weight_decay 0.1",
    "sgd": "sgd lr 1e-2 clip 0.01 weight_decay 0.1 momentum 0.9",
}

Line = Mapping[str, Any]
Change = Callable[[torch.optim.Optimizer], object]


@cache
def case(name: str) -> Case:
    return case_of(compiled(FEW.replace(LINE, LINES[name]) + SPLIT + GROUPS, EXAMPLES))


def with_line(monkeypatch: pytest.MonkeyPatch, change: Callable[[Line], Line]) -> None:
    """Let ranks take what they need of the plan's line from another."""
    monkeypatch.setattr(simulate, "make_optimizer", lambda parameters, line: make_optimizer(parameters, change(line)))

    def changed(optimizer: torch.optim.Optimizer, line: Line, *given: Any) -> None:
        update(optimizer, change(line), *given)

    monkeypatch.setattr(simulate, "update", changed)


def around(monkeypatch: pytest.MonkeyPatch, before: Change = id, after: Change = id) -> None:
    """Let ranks change an optimizer before or after each of its updates."""

    def changed(optimizer: torch.optim.Optimizer, *given: Any) -> None:
        before(optimizer)
        update(optimizer, *given)
        after(optimizer)

    monkeypatch.setattr(simulate, "update", changed)


def later(optimizer: torch.optim.Optimizer) -> None:
    """Correct the biases of moments as in a later step."""
    for state in optimizer.state.values():
        state["step"] += 1


def decayed(optimizer: torch.optim.Optimizer) -> None:
    """Decay the weights once more, after the update."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - 1e-5 * group["weight_decay"])


def _times(key: str, factor: float) -> Callable[[Line], Line]:
    return lambda line: {**line, key: line[key] * factor}


def _group(key: str, factor: float) -> Callable[[Line], Line]:
    def change(line: Line) -> Line:
        groups = [{**g, "set": {**g["set"], **({key: g["set"][key] * factor} if key in g["set"] else {})}}
                  for g in line["groups"]]  # fmt: skip
        return {**line, "groups": groups}

    return change


WRONG = {
    "eps": ("adamw", _times("eps", 1.01)),
    "weight decay": ("adamw", _times("weight_decay", 1.001)),
    "clip": ("adamw", _times("clip", 1.001)),
    "the rate of a group": ("adamw", _group("lr", 1.001)),
    "groups": ("adamw", lambda line: {**line, "groups": []}),
    "betas": ("adamw", lambda line: {**line, "betas": [0.9, 0.9991]}),
    "averages": ("adamw", lambda line: {**line, "ema": {**line["ema"], "decay": 0.91}}),
    "steps of averages": ("adamw", lambda line: {**line, "ema": {**line["ema"], "every": 1}}),
    "L2 for decay": ("adamw", lambda line: {**line, "name": "adam"}),
    "momentum": ("sgd", _times("momentum", 1.001)),
    "clipping by sgd": ("sgd", lambda line: {**line, "clip": None}),
}  # fmt: skip


def refused(name: str) -> str:
    """Return the place of the largest error of updates, which nothing else may have."""
    agreement: Agreement = compare(case(name), 2)
    others = max(agreement.loss, agreement.gradient, agreement.norm, agreement.buffer)
    assert others <= TOLERANCE < agreement.parameter
    return agreement.worst["parameter"]


@pytest.mark.parametrize("name", LINES)
def test_right_updates_are_within_rounding_of_the_formula(name: str) -> None:
    assert compare(case(name), 3).parameter < 1e-12


@pytest.mark.parametrize("what", WRONG)
def test_updates_by_another_line_are_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = WRONG[what]
    with_line(monkeypatch, change)
    refused(name)


def test_a_bias_correction_of_another_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    around(monkeypatch, after=later)
    assert refused("adamw").startswith("step 1")


def test_decay_in_another_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    around(monkeypatch, after=decayed)
    refused("adamw")


def test_state_that_a_rank_forgets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    around(monkeypatch, before=lambda optimizer: optimizer.state.clear())
    assert refused("sgd").startswith("step 1")
