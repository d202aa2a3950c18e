"""Planted bugs of compressed gradients: roundings of which nothing is kept, and differences that are another's, stale,
or kept twice. In float64, where rounding is nothing, numbers see none of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parc.compiler.program.actions import REDUCE
from parc.compiler.program.program import Function, Line, Ref, Value
from parc.compiler.program.residual import residual_of
from parc.compiler.verify.compressed import check_compressed
from parc.compiler.verify.reduce import check_reduce
from tests.planted_builds import COMPRESSED_BUILD, GoodBuild, good_build, reread
from tests.planted_rows import Row
from tests.planted_sites import Mutant, reading, with_argument, with_lines, with_main

_ROUND = "parc.round_int8"


def lost(build: GoodBuild) -> Iterator[Mutant]:
    """Return the old residual, or leave it out of the gradient."""
    programs = build.case.programs
    main = programs[REDUCE].main
    read = {value.binding: value.name for value in main.parameters if residual_of(value.binding)}
    for at, (key, _) in enumerate(main.returns):
        if residual_of(key):
            returns = (*main.returns[:at], (key, read[key]), *main.returns[at + 1 :])
            changed = with_main(programs, REDUCE, returns=returns)
            yield Mutant("keep nothing of a rounding", f"{key} is returned as it was", changed)
    for at, line in enumerate(main.lines):
        names = [item.name for item in line.args if isinstance(item, Ref)]
        if line.op == "aten.add.Tensor" and len(names) == 2 and names[1] in read.values():
            function = reading(main, line.made[0].name, names[0], at + 1)
            changed = with_main(programs, REDUCE, lines=function.lines, returns=function.returns)
            yield Mutant("keep nothing of a rounding", f"{names[1]} is not added", changed)


def exchanged_residuals(build: GoodBuild) -> Iterator[Mutant]:
    """Add or return what is left of another gradient."""
    programs = build.case.programs
    main, values = programs[REDUCE].main, programs[REDUCE].main.values()
    kept = [value for value in main.parameters if residual_of(value.binding)]
    for at, line in enumerate(main.lines):
        for place, item in enumerate(line.args):
            if isinstance(item, Ref) and (own := values[item.name]) in kept:
                for other in [one for one in kept if one.name != own.name and one.type == own.type][:2]:
                    changed = with_lines(programs, REDUCE, {at: with_argument(line, place, Ref(other.name))})
                    yield Mutant("keep another's rounding", f"{line.made[0].name} adds {other.name}", changed)
    returned = [(at, key, values[name]) for at, (key, name) in enumerate(main.returns) if residual_of(key)]
    for at, key, value in returned:
        for _, other_key, wrong in [row for row in returned if row[0] > at and row[2].type == value.type][:1]:
            returns = (*main.returns[:at], (key, wrong.name), *main.returns[at + 1 :])
            changed = with_main(programs, REDUCE, returns=returns)
            yield Mutant("keep another's rounding", f"{other_key} is returned as {key}", changed)


def unrounded(build: GoodBuild) -> Iterator[Mutant]:
    """Send what was not rounded and keep the difference too; or keep the difference from something else."""
    programs = build.case.programs
    main = programs[REDUCE].main
    for at, line in enumerate(main.lines):
        if line.op == "aten.sub.Tensor":
            for place, name in enumerate(line.uses):
                other = Ref(line.uses[1 - place])
                yield Mutant("keep more or less than a rounding takes", f"{line.made[0].name} without {name}",
                             with_lines(programs, REDUCE, {at: with_argument(line, place, other)}))  # fmt: skip
        if line.op == "parc.reduce_scatter_int8":
            source = next(made for made in main.lines if made.made[0].name in line.uses)
            changed = with_argument(line, 0, source.args[0])
            plain = replace(line, op=line.op.removesuffix("_int8"))
            yield Mutant("send what is rounded unpacked", f"{line.made[0].name} by {plain.op}",
                         with_lines(programs, REDUCE, {at: plain}))  # fmt: skip
            yield Mutant("keep more or less than a rounding takes", f"{line.made[0].name} of what is not rounded",
                         with_lines(programs, REDUCE, {at: changed}))  # fmt: skip


def twice(build: GoodBuild) -> Iterator[Mutant]:
    """Keep what one rounding takes twice, or one of two alone."""
    programs = build.case.programs
    main = programs[REDUCE].main
    for at, line in enumerate(main.lines):
        names = [item.name for item in line.args if isinstance(item, Ref)]
        if line.op == "aten.add.Tensor" and len(names) == 2 and names[0].startswith("left"):
            for place in range(2):
                changed = with_argument(line, place, Ref(names[1 - place]))
                yield Mutant("keep more or less than a rounding takes", f"{names[1 - place]} twice",
                             with_lines(programs, REDUCE, {at: changed}))  # fmt: skip
                function = reading(main, line.made[0].name, names[place], at + 1)
                yield Mutant("keep more or less than a rounding takes", f"{names[place]} alone",
                             with_main(programs, REDUCE, lines=function.lines, returns=function.returns))  # fmt: skip


def unasked(build: GoodBuild) -> Iterator[Mutant]:
    """Round a gradient, after it is summed, of which nothing is kept."""
    programs = build.case.programs
    main: Function = programs[REDUCE].main
    if not any(residual_of(key) for key, _ in main.returns):
        return
    values = main.values()
    for key, name in main.returns:
        if key.kind == "gradient" and values[name].type.shape:
            value, place = values[name], next(at for at, line in enumerate(main.lines) if line.made[0].name == name)
            made = Value(f"{name}_again", value.type)
            lines = list(main.lines)
            lines.insert(place + 1, Line((made,), _ROUND, (Ref(name), "", 0, 1), (), lines[place].origin))
            later = reading(replace(main, lines=tuple(lines)), name, made.name, place + 2)
            yield Mutant("round what nothing asks for", f"{key} is rounded once more",
                         with_main(programs, REDUCE, lines=later.lines, returns=later.returns))  # fmt: skip


COMPRESSED = (lost, exchanged_residuals, unrounded, twice, unasked)


def compressed_rows() -> dict[str, Row]:
    """Judge all of these by the texts of one build alone."""
    build, rows = good_build(COMPRESSED_BUILD), dict[str, Row]()
    for mutant in (mutant for make in COMPRESSED for mutant in make(build)):
        read = reread(mutant.programs, build.case.programs)
        faults = [
            *check_reduce(read, build.build.reference, build.build.microbatches),
            *check_compressed(read, build.build.rounding.sent),
        ]
        rows.setdefault(mutant.kind, Row()).note(mutant.what, faults[0].check if faults else "", bool(faults))
    return rows
