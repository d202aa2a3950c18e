"""Planted bugs of compressed gradients: roundings of which nothing is kept, and differences that are another's, stale,
or kept twice. In float64, where rounding is nothing, numbers see none of them. They are planted where backward starts
the sums, and in REDUCE, where checks read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from parc.compiler.layout.collectives import WAIT
from parc.compiler.program.actions import BACKWARD, REDUCE
from parc.compiler.program.plain import EarlyFault, in_reduce
from parc.compiler.program.program import Function, Line, Ref, Value
from parc.compiler.program.step_values import residual_of
from parc.compiler.program.text import ProgramError
from parc.compiler.verify.compressed import check_compressed
from parc.compiler.verify.lines import check_program
from parc.compiler.verify.sums import check_reduce
from tests.planted_builds import COMPRESSED_BUILDS, GoodBuild, good_build, reread
from tests.planted_rows import Row
from tests.planted_sites import Mutant, Programs, reading, with_argument, with_function

_ROUND = "parc.round_int8"


@dataclass(frozen=True)
class Sums:
    """The function of a build in which gradients are compressed: the last backward, or REDUCE."""

    programs: Programs
    action: str
    main: Function

    @classmethod
    def of(cls, build: GoodBuild) -> Sums:
        programs = build.case.programs
        last = programs[BACKWARD].last
        action, main = (REDUCE, programs[REDUCE].main) if last is None else (BACKWARD, last)
        return cls(programs, action, main)

    @property
    def residuals(self) -> dict[str, Value]:
        """The residuals of the last step, by the names of the values."""
        return {value.name: value for value in self.main.parameters if residual_of(value.binding)}

    def mutant(self, kind: str, what: str, **changes: Any) -> Mutant:
        changed = with_function(self.programs, self.action, replace(self.main, **changes))
        return Mutant(kind, f"{self.action}: {what}", changed)

    def with_lines(self, kind: str, what: str, at: int, *lines: Line) -> Mutant:
        """Return a mutant with other lines in the place of one."""
        return self.mutant(kind, what, lines=(*self.main.lines[:at], *lines, *self.main.lines[at + 1 :]))

    def reading(self, kind: str, what: str, old: str, new: str, start: int) -> Mutant:
        """Return a mutant that reads another value from a line on."""
        function = reading(self.main, old, new, start)
        return self.mutant(kind, what, lines=function.lines, returns=function.returns)

    def returning(self, kind: str, what: str, at: int, name: str) -> Mutant:
        returns = (*self.main.returns[:at], (self.main.returns[at][0], name), *self.main.returns[at + 1 :])
        return self.mutant(kind, what, returns=returns)


def _names(line: Line) -> list[str]:
    return [item.name for item in line.args if isinstance(item, Ref)]


def lost(sums: Sums) -> Iterator[Mutant]:
    """Return the old residual, no residual, or leave it out of the gradient."""
    kind, main = "keep nothing of a rounding", sums.main
    read = {value.binding: name for name, value in sums.residuals.items()}
    for at, (key, _) in enumerate(main.returns):
        if residual_of(key):
            yield sums.returning(kind, f"{key} is returned as it was", at, read[key])
            returns = (*main.returns[:at], *main.returns[at + 1 :])
            yield sums.mutant(kind, f"{key} is not returned", returns=returns)
    for at, line in enumerate(main.lines):
        names = _names(line)
        if line.op == "aten.add.Tensor" and len(names) == 2 and names[1] in sums.residuals:
            yield sums.reading(kind, f"{names[1]} is not added", line.made[0].name, names[0], at + 1)


def exchanged_residuals(sums: Sums) -> Iterator[Mutant]:
    """Add or return what is left of another gradient."""
    kind, main, values = "keep another's rounding", sums.main, sums.main.values()
    for at, line in enumerate(main.lines):
        for place, item in enumerate(line.args):
            if isinstance(item, Ref) and item.name in sums.residuals:
                own = values[item.name]
                others = [one for one in sums.residuals.values() if one.name != own.name and one.type == own.type]
                for other in others[:2]:
                    changed = with_argument(line, place, Ref(other.name))
                    yield sums.with_lines(kind, f"{line.made[0].name} adds {other.name}", at, changed)
    returned = [(at, key, values[name]) for at, (key, name) in enumerate(main.returns) if residual_of(key)]
    for at, key, value in returned:
        for _, instead, wrong in [row for row in returned if row[0] > at and row[2].type == value.type][:1]:
            yield sums.returning(kind, f"{instead} is returned as {key}", at, wrong.name)


def unrounded(sums: Sums) -> Iterator[Mutant]:
    """Send what was not rounded and keep the difference too; or keep the difference from something else."""
    kind = "keep more or less than a rounding takes"
    for at, line in enumerate(sums.main.lines):
        if line.op == "aten.sub.Tensor":
            for place, name in enumerate(line.uses):
                changed = with_argument(line, place, Ref(line.uses[1 - place]))
                yield sums.with_lines(kind, f"{line.made[0].name} without {name}", at, changed)
        if line.op == "parc.reduce_scatter_int8":
            source = next(made for made in sums.main.lines if made.made[0].name in line.uses)
            plain = replace(line, op=line.op.removesuffix("_int8"))
            yield sums.with_lines("send what is rounded unpacked", f"{line.made[0].name} by {plain.op}", at, plain)
            changed = with_argument(line, 0, source.args[0])
            yield sums.with_lines(kind, f"{line.made[0].name} of what is not rounded", at, changed)


def twice(sums: Sums) -> Iterator[Mutant]:
    """Keep what one rounding takes twice, or one of two alone."""
    kind, kept = "keep more or less than a rounding takes", set[str]()
    for at, line in enumerate(sums.main.lines):
        names, made = _names(line), line.made[0].name
        if line.op == "aten.sub.Tensor" or (line.op == "parc.pad" and names[0] in kept):
            kept.add(made)
        if line.op == "aten.add.Tensor" and len(names) == 2 and kept.issuperset(names):
            for place in range(2):
                changed = with_argument(line, place, Ref(names[1 - place]))
                yield sums.with_lines(kind, f"{names[1 - place]} twice", at, changed)
                yield sums.reading(kind, f"{names[place]} alone", made, names[place], at + 1)


def unasked(sums: Sums) -> Iterator[Mutant]:
    """Round a gradient, after it is summed, of which nothing is kept."""
    main, values = sums.main, sums.main.values()
    for key, name in main.returns:
        place = next((at for at, line in enumerate(main.lines) if line.made[0].name == name), -1)
        if key.kind == "gradient" and place >= 0 and values[name].type.shape and main.lines[place].kwargs == ():
            made = Value(f"{name}_again", values[name].type)
            again = Line((made,), _ROUND, (Ref(name), "", 0, 1), (), main.lines[place].origin)
            lines = (*main.lines[: place + 1], again, *main.lines[place + 1 :])
            later = reading(replace(main, lines=lines), name, made.name, place + 2)
            what = f"{key} is rounded once more"
            yield sums.mutant("round what nothing asks for", what, lines=later.lines, returns=later.returns)


def inside(sums: Sums) -> Iterator[Mutant]:
    """Round what ranks of a node sum."""
    main, values, cast = sums.main, sums.main.values(), "aten._to_copy.default"
    for at, line in enumerate(main.lines):
        if line.op != "parc.reduce_scatter" or line.args[1] != "dp_1":
            continue
        wait = next(one for one in main.lines if one.op == WAIT and one.uses == (line.made[0].name,))
        source, result = values[line.uses[0]], wait.made[0]
        sent = Value(f"{result.name}_sent", replace(source.type, dtype=torch.float16))
        half = Value(f"{result.name}_half", replace(result.type, dtype=torch.float16))
        narrow = (
            Line((sent,), cast, (Ref(source.name),), (("dtype", torch.float16),), line.origin),
            replace(line, results=(half,), args=(Ref(sent.name), *line.args[1:]), kwargs=()),
            Line((result,), cast, (Ref(half.name),), (("dtype", result.type.dtype),), line.origin),
        )
        rounded = Value(f"{result.name}_rounded", source.type)
        packed = (
            Line((rounded,), _ROUND, line.args, (), line.origin),
            replace(line, op=f"{line.op}_int8", results=(result,), args=(Ref(rounded.name), *line.args[1:]), kwargs=()),
        )
        for what, lines in (("float16", narrow), ("int8", packed)):
            rest = [one for one in main.lines[at + 1 :] if one is not wait]
            changed = (*main.lines[:at], *lines, *rest)
            yield sums.mutant("round inside a node", f"{result.name} in {what}", lines=changed)


COMPRESSED = (lost, exchanged_residuals, unrounded, twice, unasked, inside)


def faults_of(build: GoodBuild, programs: Programs) -> Sequence[str]:
    """Return the checks of the texts alone that refuse programs, the first one first."""
    try:
        read = in_reduce(reread(programs, build.case.programs))
    except (EarlyFault, ProgramError):
        return ["types"]
    faults = [
        *check_program(read[REDUCE]),
        *check_reduce(read, build.build.reference, build.build.microbatches),
        *check_compressed(read, build.build.rounding.sent),
    ]
    return [fault.check for fault in faults]


def compressed_rows(early: bool = False) -> dict[str, Row]:
    """Judge all of these by the texts of builds alone, with the sums in REDUCE or where backward starts them."""
    rows = dict[str, Row]()
    for name in COMPRESSED_BUILDS:
        build = good_build(name, early)
        for mutant in (mutant for make in COMPRESSED for mutant in make(Sums.of(build))):
            faults = faults_of(build, mutant.programs)
            rows.setdefault(mutant.kind, Row()).note(mutant.what, faults[0] if faults else "", bool(faults))
    return rows
