"""Rings as checks read them: gathers of keys and values, attention, and sums of their gradients in parts.

That is what the line of a ring means, so every check of a build knows rings without a word about them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..layout.collectives import RINGS, SEQUENCE, local_outer
from ..layout.mesh import Mesh
from ..layout.placement import Split, TensorType
from .program import Line, Program, Ref, Value
from .rewriter import Rewriter


class RingFault(ValueError):
    """The error of a line that is no ring."""


def without_rings(program: Program) -> Program:
    """Return a program with the lines that its rings stand for.

    Raises:
        RingFault: a ring's keys are not split along the sequence over its axis.
    """
    if not any(line.op in RINGS for function in program.functions for line in function.lines):
        return program
    functions = []
    for function in program.functions:
        rewriter = Rewriter(program.mesh, function)
        for line in (line for line in function.lines if line.op in RINGS):
            _expand(line, rewriter)
        functions.append(rewriter.function())
    return replace(program, functions=tuple(functions))


def _expand(line: Line, rewriter: Rewriter) -> None:
    """Put the lines that a ring stands for in its place."""
    row, mesh, origin = RINGS[line.op], rewriter.mesh, line.origin
    if len(line.args) < row.keys + 3 or not isinstance(line.args[1], str) or line.kwargs:
        raise RingFault(f"{line.op} takes a value, axes, and what attention takes")
    axes, args, values = line.args[1], row.inner(line.args), rewriter.source.values()
    rewriter.insert_before(line)
    for at, what in ((row.keys, "keys"), (row.keys + 1, "values")):
        if not isinstance(args[at], Ref) or args[at].name not in values:
            raise RingFault(f"{line.op} reads no {what}")
        type_ = values[args[at].name].type
        gathered, name = _changed(type_, axes, "I", line), f"{line.made[0].name}_whole_{what}"
        operands = args[at], axes, SEQUENCE, _outer(type_, axes, mesh)
        args[at] = Ref(rewriter.emit("parc.all_gather", operands, gathered, origin, name).name)
    if not row.carries_gradients:
        rewriter.replace(line, Line(line.results, row.attention, tuple(args), (), origin))
        return
    if len(line.results) != 3:
        raise RingFault(f"{line.op} makes three gradients")
    partial: dict[Value, Value] = {}
    for result in filter(None, line.results[1:]):
        name = rewriter.names.fresh(f"{result.name}_in_parts")
        partial[result] = Value(name, _changed(result.type, axes, "P", line))
    results = (line.results[0], *(result and partial[result] for result in line.results[1:]))
    sums = (Line((result,), "parc.reduce_scatter", (Ref(part.name), axes, SEQUENCE, _outer(result.type, axes, mesh)),
                 (), origin) for result, part in partial.items())  # fmt: skip
    rewriter.replace(line, Line(results, row.attention, tuple(args), (), origin), *sums)


def _changed(type_: TensorType, axes: str, kind: str, line: Line) -> TensorType:
    """Return a type that is whole, or to be summed, over the axes of a ring."""
    changes: Mapping[str, object] = dict.fromkeys(axes.split(","), kind)
    if any(not isinstance(at := type_.placement[axis], Split) or at.dim != SEQUENCE for axis in changes):
        raise RingFault(f"{line.op} over `{axes}`: its keys, values and their gradients are not split over it")
    return replace(type_, placement=type_.placement.replace(changes))  # type: ignore[arg-type]


def _outer(type_: TensorType, axes: str, mesh: Mesh) -> object:
    return local_outer(type_.placement, mesh, axes.split(",")[0])
