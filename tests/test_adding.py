"""Each new thing has one place: a row or a file is added from outside, and everything else follows. An action has a
test of its own (`test_own_actions.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from parc.checking.checks import case_of, static_faults
from parc.compiler.ops.op_row import OpRow, pointwise
from parc.compiler.ops.rules import TABLE
from parc.compiler.plan import directives
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.optimizers import OPTIMIZERS, OptimizerRow
from parc.compiling.driver import compile_plan
from parc.compiling.request import ask
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from parc.passes.pipeline import ALL_PASSES, Pass, run_passes, values_of
from parc.runtime.compare.agreement import TOLERANCE
from parc.runtime.compare.simulate import compare
from tests.checked_plans import compiled

FOLDER = Path(__file__).parent
PLAN = """
model "./test_adding.py:Net"
input x float32 [B, 8]
sizes B=4
loss output
optimizer sgd lr 0.1
mesh dp=2, tp=2
shard x [B/dp, _]
column up over tp
row down over tp
"""


@torch.library.custom_op("adding::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """Return twice a tensor."""
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: twice(grad))


class Net(torch.nn.Module):
    """A loss that goes through an operator which parc has no row for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = torch.ops.adding.twice(self.up(x))
        return self.down(doubled).square().mean()


def test_an_operator_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = compiled(PLAN, FOLDER)
    assert gathered.built.without_rule == ("adding.twice.default",)
    monkeypatch.setitem(TABLE, "adding.twice.default", OpRow(pointwise("0"), elementwise=True))
    split = compile_plan(read_plan(Source("plan.parc", PLAN)), FOLDER)
    assert not split.built.without_rule and not static_faults(split.build)
    assert compare(case_of(split), 2).largest <= TOLERANCE
    assert len(split.built.reshards) < len(gathered.built.reshards)


class Halved(torch.optim.SGD):
    """An optimizer that halves what a step does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        before = [p.clone() for group in self.param_groups for p in group["params"]]
        super().step(closure)
        for old, new in zip(before, (p for group in self.param_groups for p in group["params"]), strict=True):
            new.copy_((old + new) / 2)


def test_an_optimizer_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "Halved", Halved, raising=False)
    row = OptimizerRow(
        torch_class="Halved", clauses=("momentum",), tensors=(), numbers={}, optional={"momentum_buffer": "momentum"}
    )
    text = PLAN.replace("optimizer sgd lr 0.1", "optimizer halved lr 0.1 momentum 0.9")
    with pytest.raises(PlanError, match="halved"):
        read_plan(Source("plan.parc", text))
    monkeypatch.setitem(OPTIMIZERS, "halved", row)
    built = compile_plan(
        read_plan(Source("plan.parc", PLAN.replace("sgd lr 0.1", "halved lr 0.1 momentum 0.9"))), FOLDER
    )
    assert not static_faults(built.build)
    assert compare(case_of(built), 2).largest <= TOLERANCE


COLOUR = '''"""``colour``: the colour of a plan."""

from dataclasses import dataclass

from parc.compiler.plan.directive import Directive, argument


@dataclass(frozen=True)
class Colour(Directive):
    """The colour of a plan. It changes nothing."""

    USAGE = "colour N"
    LIMITS = (("n", (lambda value: value < 8, "below 8")),)

    value: int = argument(lambda given: int(given.number("n", 0)))
'''


@pytest.fixture
def colour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add a file to the directives."""
    (tmp_path / "colour.py").write_text(COLOUR)
    monkeypatch.setattr(directives, "__path__", [*directives.__path__, str(tmp_path)])
    directives.verbs.cache_clear()
    yield
    directives.verbs.cache_clear()
    directives.directive.cache_clear()


def test_a_directive_is_one_file(colour: None) -> None:
    assert read_plan(Source("plan.parc", PLAN + "colour 3\n"))
    assert "### `colour`\n\n```text\ncolour N\n```\n\nThe colour of a plan." in directives.language_page()
    with pytest.raises(PlanError, match="`colour` is 9: it must be below 8"):
        read_plan(Source("plan.parc", PLAN + "colour 9\n"))


def test_a_pass_is_one_row() -> None:
    plan = read_plan(Source("plan.parc", PLAN))
    whole = compiled(PLAN, FOLDER)
    _, request = ask(plan, FOLDER, whole.recorded, whole.captured)
    counting = Pass("count", lambda roles: {role: len(programs) for role, programs in roles.items()}, "roles", "counts")
    values = run_passes((*ALL_PASSES, counting), values_of(whole.captured, request))
    assert values["counts"] == {role: len(programs) for role, programs in whole.built.roles.items()}
