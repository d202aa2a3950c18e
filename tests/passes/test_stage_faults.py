"""Bugs planted in pipelines: any wrong message, sum among stages or action out of turn is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

import pytest

from parc.checking.checks import check_build, check_schedule, static_faults
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.actions import parse_schedule, schedule_text
from parc.compiler.program.binding import Binding
from parc.compiler.program.roles import group, join_roles, roles_of
from parc.compiler.verify.stages import check_stages
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source
from tests.planted_builds import ROOT, TIED, reread
from tests.planted_schedules import wrong_at
from tests.planted_sites import Programs, with_main
from tests.planted_stages import BUGS as STAGES
from tests.planted_stages import file_of
from tests.planted_sums import SUMS

BUGS = {**STAGES, **SUMS}
_PLAN = f"""\
{TIED}
mesh dp=2, pp=2
shard x, wanted [B/dp, _]
stage before {{cuts}} over pp
schedule {{schedule}}
"""
_PLANS = {
    "two stages": _PLAN.format(layers=2, cuts="layers.1", schedule="1f1b microbatches 2"),
    "four stages on two ranks": _PLAN.format(
        layers=4, cuts="layers.1, layers.2, layers.3", schedule="interleaved microbatches 2 chunks 2"
    ),
    "four stages side by side": _PLAN.format(
        layers=4, cuts="layers.1, layers.2, layers.3", schedule='table "side_by_side.txt" microbatches 2 chunks 2'
    ),
    "a stage that reads a parameter without a gradient": _PLAN.format(
        layers=1, cuts="b", schedule="gpipe microbatches 2"
    ).replace('Tied" (layers=1)', 'Looked"'),
}


@dataclass(frozen=True)
class Good:
    """A build that every check accepts."""

    compiled: Compiled
    texts: Mapping[str, str]
    programs: Programs


@cache
def good(name: str) -> Good:
    """Return one of the builds."""
    compiled = compile_plan(read_plan(Source("stages.parc", _PLANS[name])), ROOT / "tests")
    programs = {file_of(p): p for role in compiled.build.roles.values() for p in role.programs.values()}
    return Good(compiled, compiled.build.texts, programs)


def refusals(build: Good, programs: Programs | None = None, schedule: str | None = None) -> list[str]:
    """Return the reasons for which changed programs or actions are refused, after they are read back from their
    texts."""
    compiled = build.compiled
    programs = build.programs if programs is None else programs
    try:
        found = group(reread(programs, build.programs).values(), compiled.timelines)
        actions = parse_schedule(build.texts["schedule.txt"] if schedule is None else schedule)
        roles = roles_of(found, {name: actions.get(name, ()) for name in found})
        if schedule is not None:
            return list(map(str, check_schedule(roles, compiled.plan.microbatches)))
        faults = static_faults(replace(compiled.build, programs=join_roles(found), roles=roles))
    except ValueError as error:
        return [str(error)]
    return [str(fault) for fault in faults]


@pytest.mark.parametrize("name", _PLANS)
def test_good_builds_are_accepted(name: str) -> None:
    """So no bug below is refused for another reason, and accepted builds train as the unsharded model."""
    assert refusals(good(name)) == []
    assert not check_build(good(name).compiled).faults


def test_a_module_of_which_passes_leave_nothing_is_a_place_to_cut() -> None:
    """It may even be a stage of its own, which hands on what it receives."""
    cuts = "same over pp\nstage after out(same)"
    text = _PLAN.format(layers=1, cuts=cuts, schedule="gpipe microbatches 2").replace('Tied" (layers=1)', 'Looked"')
    compiled = compile_plan(read_plan(Source("stages.parc", text.replace("pp=2", "pp=3"))), ROOT / "tests")
    assert not check_build(compiled).faults


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("name", _PLANS)
def test_planted_bugs_of_stages_are_refused(name: str, bug: str) -> None:
    """The checks of texts alone refuse every bug: nothing runs."""
    build, accepted, number = good(name), [], 0
    for what, programs in BUGS[bug](build.programs):
        number += 1
        if not refusals(build, programs):
            accepted.append(what)
    assert number >= 1
    assert not accepted


@pytest.mark.parametrize("name", _PLANS)
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
    plan = _PLANS["two stages"].replace("microbatches 2", "microbatches 2 accumulate bf16")
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
    plan = _PLAN.format(layers=1, cuts="b", schedule="gpipe microbatches 2").replace('Tied" (layers=1)', 'Net" ()')
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
