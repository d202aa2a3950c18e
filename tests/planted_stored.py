"""Planted bugs of stored parameters: weights made of another parameter, gathered for another block, too early or too
late, and gradients stored before they are complete."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parc.compiler.analysis.dataflow import converts, stored_sources, weight_sources
from parc.compiler.layout.collectives import COLLECTIVES, WAIT
from parc.compiler.program.actions import BACKWARD, FORWARD, REDUCE, STEP, UNSHARD
from parc.compiler.program.program import Program, Ref, Value
from tests.planted_builds import GoodBuild
from tests.planted_sites import Mutant, Programs, Site, reading, sites, with_argument, with_lines, with_main


def _like(value: Value, others: list[Value]) -> list[Value]:
    """Return the other values of the same type."""
    return [other for other in others if other.name != value.name and other.type == value.type]


def _stored(program: Program, programs: Programs) -> list[Value]:
    """Return the values of a main function that are stored parameters, or made of them by conversions."""
    values, known = program.main.values(), stored_sources(program, weight_sources(programs))
    return [value for name, value in values.items() if name in known]


def exchanged(build: GoodBuild) -> Iterator[Mutant]:
    """Gather, cast or read another parameter of the same type: in UNSHARD, forward or backward."""
    programs = build.case.programs
    for action in (UNSHARD, FORWARD, BACKWARD):
        if action not in programs:
            continue
        main, stored = programs[action].main, _stored(programs[action], programs)
        values = {value.name: value for value in stored}
        for at, line in enumerate(main.lines):
            for place, item in enumerate(line.args):
                if not isinstance(item, Ref) or item.name not in values:
                    continue
                for other in _like(values[item.name], stored)[:2]:
                    changed = with_argument(line, place, Ref(other.name))
                    what = f"{action} {line.op} reads {other.name} for {item.name}"
                    kind = "gather of the wrong unit" if converts(line) else "compute with another unit's weight"
                    yield Mutant(kind, what, with_lines(programs, action, {at: changed}))


def renamed(build: GoodBuild) -> Iterator[Mutant]:
    """Return a weight of UNSHARD, or a gradient of B or REDUCE, under another's name; or one for both."""
    programs = build.case.programs
    for action, kind in ((UNSHARD, "weight"), (BACKWARD, "gradient"), (REDUCE, "gradient")):
        if action not in programs:
            continue
        main, values = programs[action].main, programs[action].main.values()
        returned = [(at, key, values[name]) for at, (key, name) in enumerate(main.returns) if key.kind == kind]
        for at, key, value in returned:
            for other_at, other_key, other in [row for row in returned if row[2].type == value.type and row[0] > at][
                :2
            ]:
                twice, swapped = list(main.returns), list(main.returns)
                twice[at] = swapped[at] = key, other.name
                swapped[other_at] = other_key, value.name
                who = "wrong owner" if kind == "gradient" else "gather of the wrong unit"
                yield Mutant(who, f"{action} exchanges {key} and {other_key}",
                             with_main(programs, action, returns=tuple(swapped)))  # fmt: skip
                yield Mutant("a shard updated twice" if kind == "gradient" else who,
                             f"{action} gives {other_key} for {key} too",
                             with_main(programs, action, returns=tuple(twice)))  # fmt: skip


def early(build: GoodBuild) -> Iterator[Mutant]:
    """Reduce a gradient before all of its parts are added."""
    main = build.case.programs[BACKWARD].main
    for at, line in enumerate(main.lines):
        if line.calls_function or not line.op.startswith("aten.add"):
            continue
        total = line.made[0]
        for name in line.uses:
            function = reading(main, total.name, name, at + 1)
            lines = (*function.lines[:at], *function.lines[at + 1 :])
            changed = replace(function, lines=lines)
            programs = with_main(build.case.programs, BACKWARD, lines=changed.lines, returns=changed.returns)
            yield Mutant("reduce before the gradient is complete", f"B leaves out a part of {total.name}", programs)


def stale(build: GoodBuild) -> Iterator[Mutant]:
    """Gather after the update, after forward has begun, or twice."""
    actions = list(build.case.actions)
    gathers = [action for action in actions if action.kind == UNSHARD]
    for gather in gathers:
        rest = [action for action in actions if action != gather]
        kinds = [action.kind for action in rest]
        ends = {"after the first forward": kinds.index(FORWARD) + 1, "at the end": len(rest)}
        ends |= {"before the update": kinds.index(STEP)} if STEP in kinds else {}
        for when, at in ends.items():
            yield Mutant("stale gather", f"UNSHARD {when}", build.case.programs, [*rest[:at], gather, *rest[at:]])
        yield Mutant("stale gather", "no UNSHARD", build.case.programs, rest)
        yield Mutant("stale gather", "UNSHARD twice", build.case.programs, [gather, *actions])


def unawaited(build: GoodBuild) -> Iterator[Mutant]:
    """Read what is on its way, await it twice, or give it another message's number."""
    programs = build.case.programs
    for site in sites(programs, WAIT):
        yield Mutant("drop an await", site.named("drop"), site.replaced(read=site.source.name))
        again = replace(site.result, name=f"{site.result.name}_again")
        twice = replace(site.line, results=(again,))
        yield Mutant("drop an await", site.named("twice"), site.replaced(site.line, twice, read=again.name))
    for site in sites(programs, lambda line: bool(line.kwargs) and line.op in COLLECTIVES):
        number = dict(site.line.kwargs)["message"]
        for other in (number + 1, number - 1, None):
            kwargs = () if other is None else (("message", other),)
            if other is None or not _alone(site, number, other):
                kind = "number a message wrongly"
                yield Mutant(
                    kind, site.named(f"{other} for {number}"), site.replaced(replace(site.line, kwargs=kwargs))
                )


def _alone(site: Site, number: int, other: int) -> bool:
    """Return whether the change only moves a tensor to a neighbouring message of its kind, which is no bug."""
    every = [dict(line.kwargs).get("message") for line in site.function.lines]
    lines = [line for line in site.function.lines if dict(line.kwargs).get("message") in (number, other)]
    kinds = {(line.op, line.args[1], line.made[0].type.dtype) for line in lines}
    at = lines.index(site.line)
    numbers = [dict(line.kwargs)["message"] for line in (*lines[:at], *lines[at + 1 :])]
    numbers.insert(at, other)
    last = number == max(found for found in every if found is not None)  # it may be left out, or begin another one
    both = {number, other} if not last or other > number else {min(number, other)}
    return len(kinds) == 1 and numbers == sorted(numbers) and set(numbers) >= both


STORED = (exchanged, renamed, early, stale, unawaited)
