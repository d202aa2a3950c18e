"""Planted bugs of pipelines: in the values that stages hand one another, save, and sum among themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from parc.compiler.layout.placement import Placement
from parc.compiler.program.binding import LOSS, SCALE, Binding, Kind
from parc.compiler.program.program import Line, Program, Ref, Value
from tests.planted_sites import (
    Mutants,
    Programs,
    reading,
    sites,
    stacked,
    with_argument,
    with_lines,
    with_main,
)

AMONG, STACK = "parc.all_reduce_among", "aten.stack.default"


def file_of(program: Program) -> str:
    """Return a program's file name: ``stage0.F``."""
    return f"{program.role}.{program.action}"


# ---- bugs: each yields what it did, and the programs


def _each(programs: Programs, field: str, kind: Kind) -> Iterator[tuple[str, Any, Callable[..., Programs]]]:
    """Yield every return or parameter of a kind: its file, itself, and a function that makes programs with others in
    its place."""

    def put(name: str, before: Sequence[Any], behind: Sequence[Any], *others: Any) -> Programs:
        return with_main(programs, name, **{field: (*before, *others, *behind)})

    for name, program in programs.items():
        rows = getattr(program.main, field)
        for at, row in enumerate(rows):
            if _key(row).kind == kind:
                yield name, row, partial(put, name, rows[:at], rows[at + 1 :])


def _key(row: Any) -> Binding:
    """Return the binding of a return or of a parameter."""
    key: Any = row.binding if isinstance(row, Value) else row[0]
    return key


def _moved(programs: Programs, field: str, kind: Kind) -> Mutants:
    """Leave out a return or parameter of a kind, or let it change places with the next of its kind."""
    for name, row, put in _each(programs, field, kind):
        yield f"{name} leaves out {_key(row)}", put()
    for name, program in programs.items():
        rows = getattr(program.main, field)
        for one, two in pairwise([at for at, row in enumerate(rows) if _key(row).kind == kind]):
            changed = list(rows)
            changed[one], changed[two] = rows[two], rows[one]
            yield f"{name} swaps {_key(rows[one])}", with_main(programs, name, **{field: tuple(changed)})


def sent(programs: Programs) -> Mutants:
    """Leave out a value that is sent, change the order or its name, or send another value of the same type."""
    yield from _moved(programs, "returns", "sent")
    for name, (key, value), put in _each(programs, "returns", "sent"):
        yield f"{name} renames {key}", put((Binding("sent", "other"), value))
        yield f"{name} sends {key} twice", put((key, value), (key, value))
        values = programs[name].main.values()
        alike = [other for other, found in values.items() if other != value and found.type == values[value].type]
        for other in alike[:3]:
            yield f"{name}: {key} is {other}", put((key, other))


def received(programs: Programs) -> Mutants:
    """Leave out a value that is received, or change its type, name or place."""
    yield from _moved(programs, "parameters", "received")
    for name, value, put in _each(programs, "parameters", "received"):
        type_, mesh = value.type, programs[name].mesh
        others = {
            "f64": replace(value, type=replace(type_, dtype=torch.float64)),
            "longer": replace(value, type=replace(type_, shape=(2 * type_.shape[0], *type_.shape[1:]))),
            "whole": replace(value, type=replace(type_, placement=Placement.whole(mesh))),
            "partial": replace(value, type=replace(type_, placement=Placement.of(mesh, {"dp": "P"}))),
            "renamed": replace(value, binding=Binding("received", "other")),
            "an input": replace(value, binding=Binding("input", "x")),
            "saved": replace(value, binding=Binding("saved", value.name)),
        }
        for what, other in others.items():
            yield f"{name} {value.binding} {what}", put(other)


def saved(programs: Programs) -> Mutants:
    """Leave out a value that F saves for B, or have B read that of another stage."""
    for name, (key, _), put in _each(programs, "returns", "saved"):
        yield f"{name} leaves out {key}", put()
    for name, value, put in _each(programs, "parameters", "saved"):
        for other in programs.values():
            keys = [key for key, _ in other.main.returns if other.action == "F"]
            foreign = [key for key in keys if key.kind == "saved" and key != value.binding]
            if other.role != programs[name].role and foreign:
                yield f"{name} reads {foreign[0]} of {other.role}", put(replace(value, binding=foreign[0]))


def places(programs: Programs) -> Mutants:
    """Put programs on other roles, or take others' programs."""
    for name, program in programs.items():
        rest = {key: other for key, other in programs.items() if key != name}
        yield f"{name} is not there", rest
        for other in programs.values():
            if other.action == program.action and other.role != program.role:
                yield f"{name} says it is {other.role}", {**rest, file_of(other): replace(program, role=other.role)}
                if other.functions == program.functions:  # as the idle ones of an evaluation
                    continue
                swapped = {name: replace(other, role=program.role), file_of(other): replace(program, role=other.role)}
                yield f"{name} and {file_of(other)} swapped", {**programs, **swapped}
        for role in ("stage4", "stage9", "pp0", "pp2", "stage0x"):
            if role != program.role:
                yield f"{name} says it is {role}", {**rest, f"{role}.{program.action}": replace(program, role=role)}


def sums(programs: Programs) -> Mutants:
    """Leave out a sum among roles, do it twice, over others, of another value, or scaled."""
    for site in sites(programs, AMONG):
        name, line, made = f"{site.action} {site.result.name}", site.line, Ref(site.result.name)
        yield f"{name} is left out", site.replaced(read=site.source.name)
        for ranks in ([0], [1], []):
            yield f"{name} over {ranks}", site.replaced(with_argument(line, 2, ranks))
        yield f"{name} over dp", site.replaced(with_argument(line, 1, "dp"))
        for what, op, args in (
            ("again", line.op, (made, *line.args[1:])),
            ("doubled", "aten.add.Tensor", (made, made)),
            ("halved", "aten.mul.Scalar", (made, 0.5)),
        ):
            again = Line((Value("again", site.result.type),), op, args)
            yield f"{name} {what}", site.replaced(line, again, read="again")
    for one, two in pairwise(sites(programs, AMONG)):
        if one.action == two.action:
            swapped = {one.index: two.line, two.index: one.line}
            yield f"{one.action} swaps two sums", with_lines(programs, one.action, swapped)


def constants(programs: Programs) -> Mutants:
    """Let a role that makes no part of a sum add something."""
    for site in sites(programs, "aten.full.default", "LOSS", "REDUCE"):
        yield f"{site.action} adds one as {site.result}", site.replaced(with_argument(site.line, 1, 1.0))
    scale = next(v for p in programs.values() for v in p.main.parameters if v.binding == SCALE)
    nothing = Line((Value("nothing", scale.type),), "aten.full.default", ([], 0.0), (("dtype", scale.type.dtype),))
    total = dict(programs["pp1.LOSS"].main.returns).get(LOSS)
    for site in sites(programs, lambda line: any(value.name == total for value in line.made), "pp1.LOSS"):
        yield f"{site.action} has no loss", site.replaced(nothing, with_argument(site.line, 0, Ref("nothing")))


def norms(programs: Programs) -> Mutants:
    """Count a gradient twice in the norm, or never, or before it is summed."""
    for site in sites(programs, lambda line: line.op == STACK and isinstance(line.args[0], list)):
        items = site.line.args[0]
        for item in items:
            for what, changed in (("twice", [*items, item]), ("never", [other for other in items if other != item])):
                if changed:
                    yield f"{site.action} counts {item} {what}", site.replaced(stacked(site, changed))
    for name, program in programs.items():
        main = program.main
        squares = [line for line in main.lines if line.op == "parc.square_sum.default"]
        gradients = main.returned("gradient").values() if program.action == "REDUCE" else ()
        counted = {line.uses[0] for line in squares}
        for missing in [value for value in gradients if value not in counted]:
            extra = replace(squares[0], results=(replace(squares[0].made[0], name="again"),), args=(Ref(missing),))
            site = next(sites(programs, STACK, name))
            more = site.replaced(extra, stacked(site, [*site.line.args[0], Ref("again")]))
            yield f"{name} counts {missing} too", more


def gradients(programs: Programs) -> Mutants:
    """Return no gradient of a trained parameter from a stage, or scale one that it received or made again."""
    scale = next((value for program in programs.values() if program.action == "B" for value in program.main.parameters
                  if value.binding == SCALE), None)  # fmt: skip
    for name, program in programs.items():
        main, values = program.main, program.main.values()
        if program.action != "B" or scale is None:  # an evaluation scales no gradient
            continue
        given = main.parameters if scale in main.parameters else (*main.parameters, scale)
        for at, (key, value) in enumerate(main.returns):
            if key.kind == "sent":
                continue
            before, behind = main.returns[:at], main.returns[at + 1 :]
            yield f"{name} leaves out {key}", with_main(programs, name, returns=(*before, *behind))
            again = Line((Value("again", values[value].type),), "aten.mul.Tensor", (Ref(value), Ref(scale.name)))
            changes = {"lines": (*main.lines, again), "returns": (*before, (key, "again"), *behind)}
            yield f"{name} scales {key} again", with_main(programs, name, parameters=given, **changes)
        for taken in (value for value in main.parameters if value.kind == "received"):
            again = Line((Value("again", taken.type),), "aten.mul.Tensor", (Ref(taken.name), Ref(scale.name)))
            lines = (again, *reading(main, taken.name, "again").lines)
            yield f"{name} scales {taken.binding}", with_main(programs, name, parameters=given, lines=lines)


def meetings(programs: Programs) -> Mutants:
    """Let F or B meet the ranks of other stages, or those of its own along the wrong axis."""
    for name, program in programs.items():
        main, values = program.main, program.main.values()
        if program.action in ("LOSS", "REDUCE"):
            continue
        for key, value in main.returns:
            type_ = values[value].type
            if not type_.dtype.is_floating_point:
                continue
            for op, args in (
                ("parc.all_reduce_among", ("pp", [0, 1])),
                ("parc.all_reduce", ("pp",)),
                ("parc.all_reduce", ("dp",)),
            ):
                made = Value("met", type_)
                line = Line((made,), op, (Ref(value), *args))
                ends = tuple((k, "met" if k == key else v) for k, v in main.returns)
                met = with_main(programs, name, lines=(*main.lines, line), returns=ends)
                yield f"{name} {op} {args} of {key}", met


BUGS: Mapping[str, Callable[[Programs], Mutants]] = {
    bug.__name__: bug for bug in (sent, received, saved, places, sums, constants, norms, gradients, meetings)
}
