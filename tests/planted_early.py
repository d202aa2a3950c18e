"""Planted bugs of sums that backward starts: of a part of a gradient, of another one, twice, never, or unawaited."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parc.compiler.analysis.lifetimes import accumulates
from parc.compiler.layout.collectives import MESSAGE, WAIT
from parc.compiler.program.actions import BACKWARD, REDUCE
from parc.compiler.program.program import Function, Line, Ref
from tests.planted_builds import GoodBuild
from tests.planted_sites import Mutant, Programs, reading, sites, with_argument, with_function, with_main


def _with_line(programs: Programs, function: Function, at: int, *lines: Line) -> Programs:
    changed = replace(function, lines=(*function.lines[:at], *lines, *function.lines[at + 1 :]))
    return with_function(programs, BACKWARD, changed)


def wrong_totals(build: GoodBuild) -> Iterator[Mutant]:
    """Sum one microbatch's gradient alone, or that of earlier ones, or another gradient, or add one twice."""
    programs = build.case.programs
    last = programs[BACKWARD].last
    assert last is not None
    kind = "reduce before the gradient is complete"
    totals = [(at, line) for at, line in enumerate(last.lines) if accumulates(last, line)]
    for at, line in totals:
        before, own = line.uses
        total = line.made[0]
        for name in (before, own):
            function = reading(last, total.name, name, at + 1)
            shorter = replace(function, lines=(*function.lines[:at], *function.lines[at + 1 :]))
            yield Mutant(kind, f"{name} for {total.name}", with_function(programs, BACKWARD, shorter))
        for place, name in ((0, own), (1, before)):
            yield Mutant(kind, f"{name} twice", _with_line(programs, last, at, with_argument(line, place, Ref(name))))
        again = replace(
            line, results=(replace(total, name=f"{total.name}_again"),), args=(Ref(total.name), line.args[1])
        )
        twice = reading(last, total.name, again.made[0].name, at + 1)
        yield Mutant(kind, f"{own} added twice", _with_line(programs, twice, at, line, again))
        for _, other in totals:
            if other is not line and other.made[0].type == total.type:
                changed = replace(line, args=(line.args[0], other.args[1]))
                yield Mutant("give a gradient to another", f"{other.args[1]} for {own}",
                             _with_line(programs, last, at, changed))  # fmt: skip
                break


def wrong_sums(build: GoodBuild) -> Iterator[Mutant]:
    """Return a sum for another, leave one out, do other work beside the sums, or read a sum on its way."""
    programs = build.case.programs
    program = programs[BACKWARD]
    last, usual = program.last, dict(program.main.returns)
    assert last is not None
    values = last.values()
    ends = [(at, key, name) for at, (key, name) in enumerate(last.returns)
            if key.kind == "gradient" and name != usual[key]]  # fmt: skip
    for at, key, name in ends:
        for other, _, swapped in ends:
            if other > at and values[swapped].type == values[name].type:
                returns = list(last.returns)
                returns[at] = key, swapped
                yield Mutant("wrong owner", f"{swapped} as {key}",
                             with_function(programs, BACKWARD, replace(last, returns=tuple(returns))))  # fmt: skip
                break
        returns = [*last.returns]
        returns[at] = key, usual[key]
        yield Mutant("drop a collective", f"{usual[key]} as {key}",
                     with_function(programs, BACKWARD, replace(last, returns=tuple(returns))))  # fmt: skip
    for site in sites({BACKWARD: program}, lambda line: MESSAGE in dict(line.kwargs), BACKWARD):
        if site.function.name == last.name:
            yield Mutant("drop a collective", site.named("drop"), {**programs, **site.replaced(read=site.source.name)})
    calls = [(at, line) for at, line in enumerate(last.lines) if line.calls_function]
    for at, line in calls:
        for place, item in enumerate(line.args):
            like = values[item.name]
            others = [value.name for value in last.parameters if value.type == like.type and value != like]
            if others:
                changed = with_argument(line, place, Ref(others[0]))
                yield Mutant("compute with another unit's weight", f"{others[0]} for {item.name}",
                             _with_line(programs, last, at, changed))  # fmt: skip
    for site in sites({REDUCE: programs[REDUCE]}, WAIT):
        yield Mutant("drop an await", site.named("drop"), {**programs, **site.replaced(read=site.source.name)})
    main = programs[REDUCE].main
    for value in main.bound("gradient").values():
        partial = dict(program.main.returns).get(value.binding) if value.binding is not None else None
        if partial is not None and program.main.values()[partial].type != value.type:
            parameters = tuple(
                replace(v, type=program.main.values()[partial].type) if v is value else v for v in main.parameters
            )
            yield Mutant("take a partial sum as whole", value.name, with_main(programs, REDUCE, parameters=parameters))


EARLY = (wrong_totals, wrong_sums)
