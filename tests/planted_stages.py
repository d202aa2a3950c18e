"""Planted bugs of pipelines: in what stages hand one another, save, and sum among themselves."""

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

Files = dict[str, Program]
"""Programs by the names of their files."""


def file_of(program: Program) -> str:
    """``stage0.F``."""
    return f"{program.role}.{program.action}"


# ---- bugs: each yields what it did, and the programs

Bugs = Iterator[tuple[str, Files]]


def changed_main(programs: Files, name: str, **changes: object) -> Files:
    """Programs of which one has another main function."""
    program = programs[name]
    main = replace(program.main, **changes)  # type: ignore[arg-type]
    return {**programs, name: replace(program, functions=(*program.functions[:-1], main))}


def _each(programs: Files, field: str, kind: Kind) -> Iterator[tuple[str, Any, Callable[..., Files]]]:
    """Every return or parameter of a kind: its file, itself, and what makes programs in which others stand for it."""

    def put(name: str, before: Sequence[Any], behind: Sequence[Any], *others: Any) -> Files:
        return changed_main(programs, name, **{field: (*before, *others, *behind)})

    for name, program in programs.items():
        rows = getattr(program.main, field)
        for at, row in enumerate(rows):
            if _key(row).kind == kind:
                yield name, row, partial(put, name, rows[:at], rows[at + 1 :])


def _key(row: Any) -> Binding:
    """That of a return, or what a parameter is bound to."""
    key: Any = row.binding if isinstance(row, Value) else row[0]
    return key


def _moved(programs: Files, field: str, kind: Kind) -> Bugs:
    """A return or parameter of a kind is left out, or changes places with the next of its kind."""
    for name, row, put in _each(programs, field, kind):
        yield f"{name} leaves out {_key(row)}", put()
    for name, program in programs.items():
        rows = getattr(program.main, field)
        for one, two in pairwise([at for at, row in enumerate(rows) if _key(row).kind == kind]):
            changed = list(rows)
            changed[one], changed[two] = rows[two], rows[one]
            yield f"{name} swaps {_key(rows[one])}", changed_main(programs, name, **{field: tuple(changed)})


def sent(programs: Files) -> Bugs:
    """What is sent is left out, goes in another order, under another name, or is another value of the same type."""
    yield from _moved(programs, "returns", "sent")
    for name, (key, value), put in _each(programs, "returns", "sent"):
        yield f"{name} renames {key}", put((Binding("sent", "other"), value))
        yield f"{name} sends {key} twice", put((key, value), (key, value))
        values = programs[name].main.values()
        alike = [other for other, found in values.items() if other != value and found.type == values[value].type]
        for other in alike[:3]:
            yield f"{name}: {key} is {other}", put((key, other))


def received(programs: Files) -> Bugs:
    """What is received is left out, or has another type, name or place."""
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


def saved(programs: Files) -> Bugs:
    """What B reads of F is not there, or is that of another stage."""
    for name, (key, _), put in _each(programs, "returns", "saved"):
        yield f"{name} leaves out {key}", put()
    for name, value, put in _each(programs, "parameters", "saved"):
        for other in programs.values():
            foreign = [key for key, _ in other.main.returns if key.kind == "saved" and other.action == "F"]
            if other.role != programs[name].role and foreign:
                yield f"{name} reads {foreign[0]} of {other.role}", put(replace(value, binding=foreign[0]))


def places(programs: Files) -> Bugs:
    """Programs lie on other roles, or are others' programs."""
    for name, program in programs.items():
        rest = {key: other for key, other in programs.items() if key != name}
        yield f"{name} is not there", rest
        for other in programs.values():
            if other.action == program.action and other.role != program.role:
                yield f"{name} says it is {other.role}", {**rest, file_of(other): replace(program, role=other.role)}
                swapped = {name: replace(other, role=program.role), file_of(other): replace(program, role=other.role)}
                yield f"{name} and {file_of(other)} swapped", {**programs, **swapped}
        for role in ("stage4", "stage9", "pp0", "pp2", "stage0x"):
            if role != program.role:
                yield f"{name} says it is {role}", {**rest, f"{role}.{program.action}": replace(program, role=role)}


def _reading(lines: Sequence[Line], old: str, new: str) -> tuple[Line, ...]:
    def swap(item: object) -> object:
        if isinstance(item, list | tuple):
            return type(item)(swap(part) for part in item)
        return Ref(new) if item == Ref(old) else item

    return tuple(replace(line, args=tuple(swap(item) for item in line.args)) for line in lines)


def sums(programs: Files) -> Bugs:
    """A sum among roles is left out, done twice, over others, of another value, or scaled."""
    for name, program in programs.items():
        main = program.main
        for at, line in enumerate(main.lines):
            if line.op != "parc.all_reduce_among":
                continue
            (result,) = line.results
            operand = line.args[0]
            assert result is not None and isinstance(operand, Ref)
            before, behind = main.lines[:at], main.lines[at + 1 :]
            returns = tuple((key, operand.name if value == result.name else value) for key, value in main.returns)
            rest = (*before, *_reading(behind, result.name, operand.name))
            yield f"{name} leaves out {result.name}", changed_main(programs, name, lines=rest, returns=returns)
            for ranks in ([0], [1], []):
                other = replace(line, args=(operand, line.args[1], ranks))
                yield (
                    f"{name} {result.name} over {ranks}",
                    changed_main(programs, name, lines=(*before, other, *behind)),
                )
            for axis in ("dp",):
                other = replace(line, args=(operand, axis, line.args[2]))
                yield f"{name} {result.name} over {axis}", changed_main(programs, name, lines=(*before, other, *behind))
            for what, op, args in (
                ("again", line.op, (Ref(result.name), *line.args[1:])),
                ("doubled", "aten.add.Tensor", (Ref(result.name), Ref(result.name))),
                ("halved", "aten.mul.Scalar", (Ref(result.name), 0.5)),
            ):
                made = Value("again", result.type)
                after = (Line((made,), op, args), *_reading(behind, result.name, "again"))
                ends = tuple((key, "again" if value == result.name else value) for key, value in main.returns)
                yield (
                    f"{name} {result.name} {what}",
                    changed_main(programs, name, lines=(*before, line, *after), returns=ends),
                )
        among = [at for at, line in enumerate(main.lines) if line.op == "parc.all_reduce_among"]
        for one, two in pairwise(among):
            rows = list(main.lines)
            rows[one], rows[two] = rows[two], rows[one]
            yield f"{name} swaps two sums", changed_main(programs, name, lines=tuple(rows))


def constants(programs: Files) -> Bugs:
    """A role that makes no part of a sum adds something."""
    for name, program in programs.items():
        for at, line in enumerate(program.main.lines):
            if program.action == "REDUCE" and line.op == "aten.full.default":
                other = replace(line, args=(line.args[0], 1.0))
                lines = (*program.main.lines[:at], other, *program.main.lines[at + 1 :])
                yield f"{name} adds one as {line.results[0]}", changed_main(programs, name, lines=lines)
        made = Value(
            "nothing", next(v.type for p in programs.values() for v in p.main.parameters if v.binding == SCALE)
        )
        nothing = Line((made,), "aten.full.default", ([], 0.0), (("dtype", made.type.dtype),))
        total = dict(program.main.returns).get(LOSS)
        for at, line in enumerate(program.main.lines if program.action == "REDUCE" else ()):
            if line.results[0] is not None and line.results[0].name == total:
                zero = replace(line, args=(Ref("nothing"), *line.args[1:]))
                lines = (nothing, *program.main.lines[:at], zero, *program.main.lines[at + 1 :])
                if program.role == "pp1":
                    yield f"{name} has no loss", changed_main(programs, name, lines=lines)


def norms(programs: Files) -> Bugs:
    """A gradient counts twice in the norm, or never, or before it is summed."""
    for name, program in programs.items():
        main = program.main
        squares = [line for line in main.lines if line.op == "parc.square_sum.default"]
        for at, line in enumerate(main.lines):
            if line.op != "aten.stack.default" or not isinstance(line.args[0], list):
                continue
            for item in line.args[0]:
                for what, items in (
                    ("twice", [*line.args[0], item]),
                    ("never", [x for x in line.args[0] if x != item]),
                ):
                    result = line.results[0]
                    assert result is not None
                    if not items:
                        continue
                    longer = replace(result, type=replace(result.type, shape=(len(items),)))
                    other = replace(line, results=(longer,), args=(items,))
                    lines = (*main.lines[:at], other, *main.lines[at + 1 :])
                    yield f"{name} counts {item} {what}", changed_main(programs, name, lines=lines)
        gradients = main.returned("gradient").values() if program.action == "REDUCE" else ()
        counted = {next(iter(line.uses())) for line in squares}
        for missing in [value for value in gradients if value not in counted]:
            line = next(line for line in squares)
            at = main.lines.index(line)
            made = replace(line.results[0], name="again")  # type: ignore[type-var]
            extra = replace(line, results=(made,), args=(Ref(missing),))
            total = next(i for i, other in enumerate(main.lines) if other.op == "aten.stack.default")
            stack = main.lines[total]
            assert isinstance(stack.args[0], list) and stack.results[0] is not None
            longer = replace(stack.results[0], type=replace(stack.results[0].type, shape=(len(stack.args[0]) + 1,)))
            stacked = replace(stack, results=(longer,), args=([*stack.args[0], Ref("again")],))
            lines = (*main.lines[:at], extra, *main.lines[at:total], stacked, *main.lines[total + 1 :])
            yield f"{name} counts {missing} too", changed_main(programs, name, lines=lines)


def gradients(programs: Files) -> Bugs:
    """A stage returns no gradient of what it trains, or scales a gradient that it received or made again."""
    scale = next(value for program in programs.values() if program.action == "B" for value in program.main.parameters
                 if value.binding == SCALE)  # fmt: skip
    for name, program in programs.items():
        main, values = program.main, program.main.values()
        if program.action != "B":
            continue
        given = main.parameters if scale in main.parameters else (*main.parameters, scale)
        for at, (key, value) in enumerate(main.returns):
            if key.kind == "sent":
                continue
            before, behind = main.returns[:at], main.returns[at + 1 :]
            yield f"{name} leaves out {key}", changed_main(programs, name, returns=(*before, *behind))
            again = Line((Value("again", values[value].type),), "aten.mul.Tensor", (Ref(value), Ref(scale.name)))
            changes = {"lines": (*main.lines, again), "returns": (*before, (key, "again"), *behind)}
            yield f"{name} scales {key} again", changed_main(programs, name, parameters=given, **changes)
        for taken in (value for value in main.parameters if value.kind == "received"):
            again = Line((Value("again", taken.type),), "aten.mul.Tensor", (Ref(taken.name), Ref(scale.name)))
            lines = (again, *_reading(main.lines, taken.name, "again"))
            yield f"{name} scales {taken.binding}", changed_main(programs, name, parameters=given, lines=lines)


def meetings(programs: Files) -> Bugs:
    """F or B meets the ranks of other stages, or those of its own along the wrong axis."""
    for name, program in programs.items():
        main, values = program.main, program.main.values()
        if program.action == "REDUCE":
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
                yield (
                    f"{name} {op} {args} of {key}",
                    changed_main(programs, name, lines=(*main.lines, line), returns=ends),
                )


BUGS: Mapping[str, Callable[[Files], Bugs]] = {
    bug.__name__: bug for bug in (sent, received, saved, places, sums, constants, norms, gradients, meetings)
}
