"""Good pipelines whose backwards are in two phases, bugs of I and W, and two judges: parc's checks of texts, and the
certificate."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations

from parc.checking.checks import case_of, check_schedule, static_faults
from parc.compiler.program.actions import parse_schedule, schedule_text
from parc.compiler.program.binding import Binding
from parc.compiler.program.program import Function, Line, Ref, Value
from parc.compiler.program.roles import Role, group, join_roles, roles_of
from parc.runtime.compare.agreement import TOLERANCE
from parc.runtime.compare.simulate import compare
from tests.certified_judge import refused_in
from tests.planted_builds import reread
from tests.planted_edits import Programs, with_argument, with_function, with_main
from tests.planted_mutators import Mutant, mutants
from tests.planted_pipelines import Good, places, texts_with
from tests.planted_schedules import wrong_at

SPLIT = ("B", "I", "W")


# ---- bugs: each yields what it did, and the programs

Changed = Iterator[tuple[str, Programs]]


def _deferred(build: Good) -> Changed:
    """Hand other values on from I to W: one of the same type, none, one of another name, or one too many."""
    for name, program in build.programs.items():
        if program.action not in ("I", "W"):
            continue
        main, types = program.main, program.main.values()
        rows = [(key, value) for key, value in main.returns if key.kind == "deferred"]
        for (key, value), (other, theirs) in combinations(rows, 2):
            if types[value].type == types[theirs].type:
                swap = {key: theirs, other: value}
                returns = tuple((k, swap.get(k, v)) for k, v in main.returns)
                yield f"{name} exchanges {key} and {other}", with_main(build.programs, name, returns=returns)
        for key, value in rows:
            alike = [v.name for v in types.values() if v.type == types[value].type and v.name != value]
            for other_name in alike[:2] + alike[-2:]:
                returns = tuple((k, other_name if k == key else v) for k, v in main.returns)
                yield f"{name} hands {other_name} on as {key}", with_main(build.programs, name, returns=returns)
            kept = tuple(row for row in main.returns if row[0] != key)
            yield f"{name} does not hand {key} on", with_main(build.programs, name, returns=kept)
            renamed = tuple((Binding("deferred", f"{k.name}x") if k == key else k, v) for k, v in main.returns)
            yield f"{name} hands {key} on under another name", with_main(build.programs, name, returns=renamed)
        parameters = [value for value in main.parameters if value.kind == "deferred"]
        for one, other_value in combinations(parameters, 2):
            if one.type == other_value.type:
                swapped = {one.name: replace(one, binding=other_value.binding),
                           other_value.name: replace(other_value, binding=one.binding)}  # fmt: skip
                rows_of = tuple(swapped.get(value.name, value) for value in main.parameters)
                yield (f"{name} takes {one.binding} for {other_value.binding}",
                       with_main(build.programs, name, parameters=rows_of))  # fmt: skip


def _halves(build: Good) -> Changed:
    """Call other halves: those of two blocks in another order, or another half; hand on what another call made."""
    for name, program in build.programs.items():
        main = program.main
        calls = [(at, line) for at, line in enumerate(main.lines) if line.calls_function]
        if program.action not in ("I", "W"):
            continue
        for (i, one), (j, two) in combinations(calls, 2):
            if one.op == two.op:
                lines = list(main.lines)
                lines[i], lines[j] = replace(one, args=two.args), replace(two, args=one.args)
                yield f"{name} calls {one.op} for another block", with_main(build.programs, name, lines=tuple(lines))
                results = list(main.lines)
                results[i], results[j] = replace(one, results=two.results), replace(two, results=one.results)
                yield f"{name} exchanges results of {one.op}", with_main(build.programs, name, lines=tuple(results))
                for place, (a, b) in enumerate(zip(one.args, two.args, strict=True)):
                    if a != b:
                        mixed = list(main.lines)
                        mixed[i], mixed[j] = with_argument(one, place, b), with_argument(two, place, a)
                        yield (f"{name} mixes argument {place} of {one.op}",
                               with_main(build.programs, name, lines=tuple(mixed)))  # fmt: skip


def _lasts(build: Good) -> Changed:
    """Put the last main function into a program that is not the last work of the stage, or leave it out."""
    for name, program in build.programs.items():
        if program.last is None:
            continue
        alone = {**build.programs, name: program.with_mains(program.main)}
        yield f"{name} has no last function", alone
        stage = program.role
        for action in SPLIT:
            other = build.programs.get(f"{stage}.{action}")
            if other is None or action == program.action:
                continue
            last = replace(other.main, name=f"{other.main.name}_last")
            yield f"{stage}.{action} has a last function too", {
                **build.programs, f"{stage}.{action}": other.with_mains(last, other.main)}  # fmt: skip
            yield f"{stage}.{action} has the last function", {
                **alone, f"{stage}.{action}": other.with_mains(last, other.main)}  # fmt: skip
        usual = {value.name for line in program.main.lines for value in line.made}
        added = [line for line in program.last.lines if not usual & {value.name for value in line.made}]
        for line in added:
            if len(line.made) == 1 and line.uses and line.made[0].type.dtype.is_floating_point:
                more, at = Value(f"{line.made[0].name}_more", line.made[0].type), program.last.lines.index(line)
                factor = replace(line, op="aten.mul.Scalar", args=(Ref(more.name), 1.5), kwargs=())
                scaled = (*program.last.lines[:at], replace(line, results=(more,)), factor,
                          *program.last.lines[at + 1 :])  # fmt: skip
                yield f"{name} scales {line.made[0].name} in its last function", with_function(
                    build.programs, name, replace(program.last, lines=scaled))  # fmt: skip


def _others(build: Good) -> Changed:
    """Let one of I, W and B compute something else: it is scaled, or another stage's."""
    for name, program in build.programs.items():
        if program.action not in SPLIT:
            continue
        for function in program.functions:
            types = function.values()
            for key, value in function.returns:
                if not types[value].type.dtype.is_floating_point:
                    continue
                more = Value("more", types[value].type)
                line = Line((more,), "aten.mul.Scalar", (Ref(value), 1.5))
                returns = tuple((k, "more" if k == key else v) for k, v in function.returns)
                changed = replace(function, lines=(*function.lines, line), returns=returns)
                yield f"{name} scales {key} of {function.name}", with_function(build.programs, name, changed)
    for one, other in permutations([n for n, p in build.programs.items() if p.action in ("I", "W")], 2):
        a, b = build.programs[one], build.programs[other]
        if a.action == b.action:
            yield f"{one} runs the lines of {other}", {**build.programs, one: replace(b, role=a.role)}
    for name, program in build.programs.items():
        if program.action == "W":
            whole = build.programs.get(f"{program.role}.B")
            empty = replace(program.main, lines=(), returns=())
            yield f"{name} does nothing", {**build.programs, name: program.with_mains(empty)}
            if whole is not None:
                yield f"{name} is B", {**build.programs, name: replace(whole, action="W")}


def _left_out(build: Good) -> Changed:
    """Leave out I, W, or B, or a gradient of one of them."""
    for name, program in build.programs.items():
        if program.action not in SPLIT:
            continue
        yield f"{name} is not there", {key: other for key, other in build.programs.items() if key != name}
        for key, _ in program.main.returns:
            for mains in (program.mains, program.mains[-1:], program.mains[:1]):
                changed = build.programs
                for main in mains:
                    kept = tuple(row for row in main.returns if row[0] != key)
                    changed = with_function(changed, name, replace(main, returns=kept))
                yield f"{name} returns no {key} in {len(mains)} functions", changed


def of_phases(build: Good) -> Iterator[Mutant]:
    """Yield mutants that only programs of phases have."""
    for kind, bug in (
        ("hand other values on", _deferred), ("call other halves", _halves), ("sum elsewhere", _lasts),
        ("compute other gradients in one phase", _others), ("leave a phase out", _left_out),
        ("put a program elsewhere", places),
    ):  # fmt: skip
        for what, programs in bug(build):
            if kind != "put a program elsewhere" or any(f".{phase}" in what for phase in SPLIT):
                yield Mutant(kind, f"{kind} {what.split()[0]}", what, partial(dict, programs))


def in_phases(build: Good) -> Iterator[Mutant]:
    """Yield mutants of programs of backwards, generic ones and those of phases, and of the schedule."""

    def inside(name: str, function: Function) -> bool:
        return build.programs[name].action in ("I", "W") or (
            build.programs[name].action == "B" and f"{build.programs[name].role}.I" in build.programs
        )

    for mutant in mutants(build.programs, inside):
        if mutant.place.split()[0].rpartition(".")[2] in SPLIT:
            yield mutant
    yield from of_phases(build)
    draw, timelines = random.Random(0), parse_schedule(build.texts["schedule.txt"])
    for role, actions in timelines.items():
        for at, action in enumerate(actions):
            if action.kind[-1] not in SPLIT:
                continue
            for what, changed in wrong_at(timelines, role, at, draw):
                yield Mutant("change the schedule", f"{what} {action.kind}", f"{what} {action}",
                             partial(dict, build.programs), timelines=changed)  # fmt: skip


# ---- judges


def roles_with(build: Good, mutant: Mutant) -> dict[str, Role]:
    """Return the roles of a mutant, read back from their texts.

    Raises:
        ValueError: its texts are not those of roles.
    """
    timelines = mutant.timelines or build.compiled.timelines
    programs = reread(mutant.programs, build.programs)
    return roles_of(group(programs.values(), timelines), timelines)


def by_checks(build: Good, mutant: Mutant) -> str:
    """Return which of parc's own checks of texts refuses a mutant; "" if none does."""
    compiled = build.compiled
    try:
        roles = roles_with(build, mutant)
        if mutant.timelines is not None:
            faults = check_schedule(roles, compiled.plan.microbatches, compiled.build.purpose)
        else:
            joined = join_roles({name: role.programs for name, role in roles.items()})
            faults = static_faults(replace(compiled.build, programs=joined, roles=roles))
    except ValueError:
        return "parse"
    return faults[0].check if faults else ""


def by_certificate(build: Good, mutant: Mutant) -> str:
    """Return "certificate" if the certificate refuses the texts of a mutant, else ""."""
    texts = texts_with(build, mutant.programs)
    if mutant.timelines is not None:
        texts["schedule.txt"] = schedule_text(mutant.timelines)
    return "certificate" if refused_in(build.compiled.build, texts) else ""


def by_numbers(build: Good, mutant: Mutant) -> str:
    """Return "numbers" if the step of a mutant, in one process in float64, is not the model's, else ""."""
    try:
        agreement = compare(replace(case_of(build.compiled), roles=roles_with(build, mutant)), 2)
    except Exception:
        return "numbers"
    return "" if agreement.largest <= TOLERANCE else "numbers"
