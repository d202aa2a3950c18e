"""Bugs planted in pipelines: any wrong message, sum among stages or action out of turn is refused."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from parc.checking.checks import check_build
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.actions import parse_schedule, schedule_text
from parc.compiler.program.binding import Binding
from parc.compiler.verify.communication import check_stages
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source
from tests.draws import wide
from tests.planted_bugs import STAGES
from tests.planted_builds import ROOT
from tests.planted_edits import with_main
from tests.planted_pipelines import PIPELINE, PIPELINES, good, refusals
from tests.planted_schedules import wrong_at

FOUR = [name for name in PIPELINES if name.startswith("four")]


@pytest.mark.parametrize("name", PIPELINES)
def test_good_builds_are_accepted(name: str) -> None:
    """So no bug below is refused for another reason, and accepted builds train as the unsharded model."""
    assert refusals(good(name)) == []
    assert not check_build(good(name).compiled).faults


def test_a_module_of_which_passes_leave_nothing_is_a_place_to_cut() -> None:
    """It may even be a stage of its own, which hands on what it receives."""
    cuts = "same over pp\nstage after out(same)"
    text = PIPELINE.format(layers=1, cuts=cuts, schedule="gpipe microbatches 2").replace('Tied" (layers=1)', 'Looked"')
    compiled = compile_plan(read_plan(Source("stages.parc", text.replace("pp=2", "pp=3"))), ROOT / "tests")
    assert not check_build(compiled).faults


@pytest.mark.parametrize(
    ("name", "most", "share"), [(name, 1, 3) for name in PIPELINES] + [wide(name, 4, 1) for name in FOUR]
)
def test_planted_bugs_of_stages_are_refused(name: str, most: int, share: int) -> None:
    """The checks of texts alone refuse every bug: nothing runs."""
    rows = STAGES.rows([name], most, share)
    assert sum(row.mutants for row in rows.values()) > 40
    assert not [what for row in rows.values() for what in row.accepted]


@pytest.mark.parametrize("name", PIPELINES)
def test_actions_out_of_turn_are_refused(name: str) -> None:
    """An action is left out, twice there, another, on the other role, or before one that has to come first."""
    build, draw = good(name), Random(0)
    timelines = parse_schedule(build.texts["schedule.txt"])
    for role, actions in timelines.items():
        for at, action in enumerate(actions):
            for what, changed in wrong_at(timelines, role, at, draw):
                assert refusals(build, schedule=schedule_text(changed)), (what, action, changed)
    exchanged = dict(zip(timelines, reversed(timelines.values()), strict=True))
    assert refusals(build, schedule=schedule_text(exchanged))


def test_a_tied_gradient_of_two_stages_may_be_added_up_in_bfloat16() -> None:
    plan = PIPELINES["two stages"].replace("microbatches 2", "microbatches 2 accumulate bf16")
    compiled = compile_plan(read_plan(Source("stages.parc", plan)), ROOT / "tests")
    assert "all_reduce_among" in compiled.build.roles["pp1"].programs["REDUCE"].text()
    assert not check_build(compiled).faults


_DRAWN = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        drawn = torch.rand(4)
        return self.b(torch.tanh(self.a(x)) * drawn) * drawn.cumsum(0)


def square(output, wanted):
    return ((output - wanted) ** 2).mean()
"""


def test_a_key_is_made_in_every_stage_that_draws_of_it(tmp_path: Path) -> None:
    """Half of the numbers are drawn in one stage, all of them in the other, and no message brings the key."""
    (tmp_path / "planted_models.py").write_text(_DRAWN)
    plan = PIPELINE.format(layers=1, cuts="b", schedule="gpipe microbatches 2").replace('Tied" (layers=1)', 'Net" ()')
    plan = plan.replace("dp=2, pp=2", "pp=2, tp=2").replace("shard x, wanted [B/dp, _]", "column a over tp")
    compiled = compile_plan(read_plan(Source("stages.parc", plan)), tmp_path)
    work = [role.programs[f"{stage}F"] for stage, role in enumerate(compiled.build.roles.values())]
    assert ["parc.stream_key" in program.text() for program in work] == [True, True]
    assert not check_build(compiled).faults
    made = {name: dict(role.programs) for name, role in compiled.build.roles.items()}
    key = next(v for line in work[0].main.lines for v in line.results if v and "stream_key" in line.op)
    returns = (*work[0].main.returns, (Binding("sent", key.name), key.name))
    made["pp0"] |= with_main(made["pp0"], "0F", returns=returns)
    faults = [str(fault) for fault in check_stages(made, compiled.mesh, "pp")]
    assert any("is a random stream's key" in fault for fault in faults), faults
