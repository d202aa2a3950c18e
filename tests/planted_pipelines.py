"""Good pipelines to plant bugs in, and the reasons why the checks of texts refuse them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from parc.checking.checks import check_schedule, static_faults
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.actions import parse_schedule
from parc.compiler.program.roles import group, join_roles, roles_of
from parc.compiling.compiled import Compiled
from parc.grammar.source import Source
from tests.captured_once import compile_once
from tests.planted_builds import ROOT, TIED, reread
from tests.planted_sites import Programs
from tests.planted_stages import file_of

PIPELINE = f"""\
{TIED}
mesh dp=2, pp=2
shard x, wanted [B/dp, _]
stage before {{cuts}} over pp
schedule {{schedule}}
"""
PIPELINES = {
    "two stages": PIPELINE.format(layers=2, cuts="layers.1", schedule="1f1b microbatches 2"),
    "four stages on two ranks": PIPELINE.format(
        layers=4, cuts="layers.1, layers.2, layers.3", schedule="interleaved microbatches 2 chunks 2"
    ),
    "four stages side by side": PIPELINE.format(
        layers=4, cuts="layers.1, layers.2, layers.3", schedule='table "side_by_side.txt" microbatches 2 chunks 2'
    ),
    "a stage that reads a parameter without a gradient": PIPELINE.format(
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
def good(name: str, evaluates: bool = False) -> Good:
    """Return one of the builds, or what evaluates its model."""
    lines = PIPELINES[name] + "eval\n" * evaluates
    compiled = compile_once(read_plan(Source("stages.parc", lines)), ROOT / "tests")
    if compiled.evaluated is not None:
        compiled = compiled.evaluated
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
            return list(map(str, check_schedule(roles, compiled.plan.microbatches, compiled.build.purpose)))
        faults = static_faults(replace(compiled.build, programs=join_roles(found), roles=roles))
    except ValueError as error:
        return [str(error)]
    return [str(fault) for fault in faults]
