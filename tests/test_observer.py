"""Forwards that do something beside returning numbers: carried by a build, or refused in words that name it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import nn

from parc.checking.checks import case_of, check_build
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
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from parc.runtime.compare.simulate import Simulation
from parc.runtime.data.random_batch import random_batch
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


CLAMPED = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, width), nn.Linear(width, 5)
        self.least = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        if self.training:
            self.wide.weight.data.clamp_(-0.2, 0.1)
            self.least.data.clamp_(min=0.75)
        return self.narrow(torch.relu(self.wide(x)) / self.least)
"""
CLAMPED_PLAN = """\
model "./net.py:Net" (width=16)
input x float32 [B, 6]
input y int64 [B]
sizes B=16
loss cross_entropy(output, y)
optimizer adamw lr 3e-2 weight_decay 0.1
mesh dp=4, tp=2
shard x, y [B/dp, ...]
column wide over tp
row narrow over tp
zero 3 over dp
schedule microbatches 2
"""


def test_clamped_weights_are_trained_as_in_plain_pytorch(tmp_path: Path) -> None:
    """They are clamped before each step, and not after the last update."""
    (tmp_path / "net.py").write_text(CLAMPED)
    compiled = compile_plan(read_plan(Source("net.parc", CLAMPED_PLAN)), tmp_path)
    case = case_of(compiled)
    simulation, names = Simulation(case), dict[str, Any]()
    exec(CLAMPED, names)
    plain = names["Net"](16).double()
    plain.load_state_dict(case.parameters)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-2, weight_decay=0.1)
    random = torch.Generator().manual_seed(0)
    for step in range(4):
        batches = random_batch(case.reference, case.microbatches, random)
        simulation.step(batches, step)
        optimizer.zero_grad()
        x, y = (torch.cat([batch[name] for batch in batches]) for name in ("x", "y"))
        torch.nn.functional.cross_entropy(plain(x.double()), y).backward()
        optimizer.step()
    trained = dict(plain.named_parameters())
    for name, value in simulation.parameters():
        torch.testing.assert_close(value, trained[name].detach(), rtol=1e-9, atol=1e-12)
    assert trained["wide.weight"].max() > 0.1 and trained["least"].min() < 0.75  # as an evaluation reads them


def test_an_evaluation_reads_weights_that_are_not_clamped(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(CLAMPED)
    compiled = compile_plan(read_plan(Source("net.parc", f"{CLAMPED_PLAN}eval every 2\n")), tmp_path)
    assert check_build(compiled).faults == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"if self.training": "if True", "zero 3": "eval every 2\nzero 3"},
         "the forward clamps the parameter `least` in `eval()`, where a build changes none"),
        ({"zero 3": "freeze least\nzero 3"}, "the forward clamps the frozen parameter `least`"),
        ({"mesh dp=4, tp=2": "mesh pp=2, dp=2, tp=2", "schedule ": "stage before narrow over pp\nschedule async "},
         "the forward clamps `least`, and a step of `async` begins before the one before it ends"),
        ({"mesh dp=4, tp=2": "mesh dp=4, tp=1", "width=16": "width=31"},
         "the forward clamps `least` to numbers without zero, and ranks hold it with zeros for padding"),
    ],
)  # fmt: skip
def test_clamps_that_no_step_can_do_are_refused(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    text, model = CLAMPED_PLAN, CLAMPED
    for old, new in changes.items():
        text, model = text.replace(old, new), model.replace(old, new)
    (tmp_path / "net.py").write_text(model)
    with pytest.raises(PlanError) as error:
        compile_plan(read_plan(Source("net.parc", text)), tmp_path)
    assert message in str(error.value)


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


def test_an_iterator_cannot_be_compared_unless_it_has_not_begun(tmp_path: Path) -> None:
    model: Any = nn.Identity()
    model.batches = (batch for batch in [1, 2])
    state = PythonState([model], tmp_path)
    before = state.take()
    assert state.whole
    next(model.batches)
    assert state_changes(before, state.take()) == ("batches",) and not state.whole
