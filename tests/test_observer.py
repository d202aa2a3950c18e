"""Forwards that do something beside returning numbers: carried by a build, or refused in words that name it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import nn

from parc.compiler.capture.faults import CaptureError
from parc.compiler.capture.model_calls import TaskLines, made_in_eval, model_builder
from parc.compiler.capture.observer import (
    LARGEST_DRAWS,
    LEAST_DRAWS,
    PythonState,
    check_module,
    kept_draws,
    observing,
    python_draws,
    seed_draws,
    state_changes,
)
from parc.compiler.plan.plan import read_plan
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source
from tests.cases.observed import EXPECTED, FOLDER, PLAN, outcome

_DRAWN = ("momentum_buffer", "spectral", "pruned", "tied", "renormed", "log_normal", "data_buffer", "two_halves")
"""Right models that other tests have too: `python -m tests.cases` replays them."""


@pytest.mark.parametrize("kind", [kind for kind in EXPECTED if kind not in _DRAWN])
def test_what_a_forward_does_beside_returning_numbers_is_carried_or_refused(kind: str) -> None:
    assert outcome(kind) == EXPECTED[kind]


def test_a_part_that_is_in_eval_stays_so_in_the_program() -> None:
    text = PLAN.format(kind="frozen_tower")
    reference = compile_plan(read_plan(Source("tower.parc", text)), FOLDER).build.reference.text()
    assert "dropout" not in reference and "rng" not in reference and "running_mean" in reference


def test_a_model_that_is_in_eval_as_a_whole_is_set_to_train() -> None:
    lines = TaskLines("./observed_models.py:Net", (("kind", "all_eval"),), ("x",), ())
    model = model_builder(lines, FOLDER)()
    assert made_in_eval(model) and all(part.training for part in model.modules())


def test_views_of_one_memory_that_have_no_entry_in_common_are_two_parameters() -> None:
    whole = torch.randn(4, 6)
    model = nn.Module()
    model.left, model.right = nn.Parameter(whole[:, :3]), nn.Parameter(whole[:, 3:])
    check_module(model)
    model.right = nn.Parameter(whole[:, 2:])
    with pytest.raises(CaptureError, match="the parameters `left` and `right` are on one memory"):
        check_module(model)
    model.requires_grad_(False)
    check_module(model)


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.data.mul_(1.0),
        lambda p: torch.no_grad()(p.add_)(0.0),
        lambda p: p.view(-1)[:2].detach().zero_(),
        lambda p: setattr(p, "data", p.data.clone()),
    ],
)
def test_a_write_of_a_parameter_is_seen_although_it_changes_no_number(write: object) -> None:
    model = nn.Linear(3, 3)
    with observing(model) as faults:
        write(model.weight)  # type: ignore[operator]
        model(torch.ones(1, 3))
    assert [fault.kind for fault in faults] == ["written"] and "`weight`" in str(faults[0])
    assert Path(__file__).name in faults[0].source


def test_the_ends_of_draws_are_drawn_and_the_draws_are_as_before() -> None:
    before = python_draws()
    with kept_draws():
        seed_draws(LEAST_DRAWS)
        least = [random.random(), random.uniform(2, 3), numpy.random.rand(), random.randrange(5)]
        seed_draws(LARGEST_DRAWS)
        largest = [random.random(), random.uniform(2, 3), numpy.random.rand()]
        random.gauss(), random.normalvariate(), numpy.random.normal()  # end although they reject draws
    assert least == [0, 2, 0, 0] and min(largest[0], largest[1] - 2, largest[2]) > 1 - 1e-9
    assert python_draws() == before


def test_state_in_python_is_compared_by_its_values(tmp_path: Path) -> None:
    class Holds(nn.Module):
        shared: ClassVar[dict[str, int]] = {}

    holds: Any = Holds()
    model = nn.Sequential(holds, nn.Identity())
    holds.steps, holds.rates = 0, [0.5, float("nan")]
    box = {"calls": 0}
    state = PythonState([model, lambda: box], tmp_path)
    first = state.take()
    assert state_changes(first, state.take()) == ()
    holds.steps += 1
    holds.rates.append(1.0)
    box["calls"] += 1
    Holds.shared["x"] = 1
    assert state_changes(first, state.take()) == ("0.shared", "0.steps", "0.rates", "box")
    holds.mean = torch.zeros(2)
    second = state.take()
    holds.mean = torch.zeros(2)
    third = state.take()
    assert state_changes(second, third) == ("0.mean",) and state_changes(second, third, tensors=False) == ()
    with state.undone():
        holds.rates.clear()
        box["more"] = 2
    assert len(holds.rates) == 3 and box == {"calls": 1}


def test_an_iterator_cannot_be_compared(tmp_path: Path) -> None:
    model: Any = nn.Identity()
    model.batches = iter([1, 2])
    state = PythonState([model], tmp_path)
    state.take()
    assert not state.whole
