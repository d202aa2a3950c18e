"""Planted bugs of evaluations: those of a step's forward, and programs that train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from parc.checking.checks import case_of
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.actions import ACTIONS
from parc.compiler.program.binding import Binding
from parc.compiler.program.program import Line, Ref, Value
from parc.compiling.compiled import Compiled
from parc.grammar.source import Source
from tests.captured_once import compile_once
from tests.planted_builds import BUILDS, CONTEXT_BUILDS, EXPERT_BUILDS, MOODY_BUILD, PLANS, ROOT, GoodBuild, judge
from tests.planted_context import CLASSES as CONTEXTS
from tests.planted_conversions import CONVERSIONS, doubled, dropped, regrouped, retyped
from tests.planted_experts import CLASSES as EXPERTS
from tests.planted_integers import bounded, shortened
from tests.planted_pipelines import PIPELINES, good, refusals
from tests.planted_rows import Row
from tests.planted_sites import Mutant, with_main
from tests.planted_slips import SLIPS
from tests.planted_stages import BUGS
from tests.planted_stored import STORED
from tests.planted_sums import SUMS


@cache
def _compiled(name: str) -> tuple[Compiled, Compiled]:
    folder, text = PLANS[name]
    step = compile_once(read_plan(Source("planted.parc", f"{text}eval\n")), ROOT / folder)
    assert step.evaluated is not None
    return step, step.evaluated


def evaluated_build(name: str) -> GoodBuild:
    """Return what evaluates the model of a build."""
    _, evaluation = _compiled(name)
    return GoodBuild(name, case_of(evaluation), evaluation.build)


def training(build: GoodBuild) -> Iterator[Mutant]:
    """Take a program of the step, save for a backward that there is not, or read a parameter as one that is trained."""
    kind, programs = "evaluate as in training", build.case.programs
    step, _ = _compiled(build.name)
    for action, program in case_of(step).programs.items():
        if action in programs and program.text() != programs[action].text():
            yield Mutant(kind, f"{action} of the step", {**programs, action: program})
    main = programs["F"].main
    for at, value in enumerate(main.parameters):
        if value.kind == "frozen" and value.binding is not None:
            trained = replace(value, binding=Binding("parameter", value.binding.name))
            parameters = (*main.parameters[:at], trained, *main.parameters[at + 1 :])
            yield Mutant(kind, f"F trains {value.name}", with_main(programs, "F", parameters=parameters))
    for line in main.lines:
        for value in line.made:
            returns = (*main.returns, (Binding("saved", value.name), value.name))
            yield Mutant(kind, f"F saves {value.name}", with_main(programs, "F", returns=returns))


def returning(build: GoodBuild) -> Iterator[Mutant]:
    """Leave out a tensor of the model's output, or return it under another name, scaled, or another one for it."""
    kind, programs = "return another output", build.case.programs
    main, values = programs["F"].main, programs["F"].main.values()
    for at, (key, name) in enumerate(main.returns):
        if key.kind != "output":
            continue
        before, behind = main.returns[:at], main.returns[at + 1 :]
        scaled = Line((Value("scaled", values[name].type),), "aten.mul.Scalar", (Ref(name), 2.0))
        alike = [other for other, value in values.items() if other != name and value.type == values[name].type]
        changes: dict[str, dict[str, Any]] = {
            "left out": {"returns": (*before, *behind)},
            "renamed": {"returns": (*before, (Binding("output", "other"), name), *behind)},
            "scaled": {"returns": (*before, (key, "scaled"), *behind), "lines": (*main.lines, scaled)},
            **{f"is {other}": {"returns": (*before, (key, other), *behind)} for other in alike[-3:]},
        }
        for what, changed in changes.items():
            yield Mutant(kind, f"{key} {what}", with_main(programs, "F", **changed))


_CLASSES = (*CONVERSIONS, *SLIPS, *STORED, shortened, bounded, training, returning)
EVALUATED: Mapping[str, Sequence[Callable[[GoodBuild], Iterator[Mutant]]]] = {
    **dict.fromkeys((MOODY_BUILD, *BUILDS), _CLASSES),
    **dict.fromkeys(EXPERT_BUILDS, (*EXPERTS, training, returning)),
    **dict.fromkeys(CONTEXT_BUILDS, (*CONTEXTS, training, returning)),
}
"""The builds, with the makers of mutants of what evaluates their models."""


def evaluation_rows(names: Sequence[str] = tuple(EVALUATED), share: int = 1) -> dict[str, Row]:
    """Judge all mutants of some builds' evaluations, or one of ``share`` of each maker's."""
    rows: dict[str, Row] = {}
    for name in names:
        build = evaluated_build(name)
        for make in EVALUATED[name]:
            for at, mutant in enumerate(make(build)):
                if at % share == 0:
                    verdict = judge(build, mutant.programs, mutant.actions)
                    rows.setdefault(mutant.kind, Row()).note(f"{name}: {mutant.what}", verdict.check, verdict.by_types)
    return rows


def pipeline_rows(names: Sequence[str] = tuple(PIPELINES), share: int = 1) -> dict[str, Row]:
    """Judge all mutants of some pipelines' evaluations, or a share, by the texts of their programs alone."""
    rows: dict[str, Row] = {}
    for name in names:
        build = good(name, evaluates=True)
        made = [(bug, mutant) for bug, make in {**BUGS, **SUMS}.items() for mutant in make(build.programs)]
        case = replace(case_of(build.compiled), programs=build.programs)
        of_files = GoodBuild(name, case, build.compiled.build)
        for make in (dropped, doubled, retyped, regrouped):
            made += [(mutant.kind, (mutant.what, mutant.programs)) for mutant in make(of_files)]
        written = {
            name: program for name, program in build.programs.items() if ACTIONS[program.action].serves("evaluation")
        }
        of_written = [row for row in made if any(row[1][1].get(name) != program for name, program in written.items())]
        for kind, (what, programs) in of_written[::share]:
            reasons = refusals(build, programs)
            rows.setdefault(kind, Row()).note(f"{name}: {what}", "types" if reasons else "", bool(reasons))
    return rows


def refused(rows: dict[str, Row]) -> tuple[int, int]:
    """Count mutants, and those of them that are refused before anything runs."""
    mutants = sum(row.mutants for row in rows.values())
    return mutants, mutants - sum(row.first["numbers"] + row.first[""] for row in rows.values())
