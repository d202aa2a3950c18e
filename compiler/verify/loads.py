"""The checker of LOADS: a step returns the loads of all layers, each once, and biases move by them alone.

A load that is cut off at some number shows in no test of few tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ..layout.collectives import WAIT
from ..ops.rules import facts
from ..program.actions import LOADS
from ..program.faults import Fault
from ..program.loads import LOAD
from ..program.program import Line, Program, Ref

_Parts = tuple[tuple[int, tuple[str, ...]], ...]
"""The parts of a value along its only dim: the size of each, and the layers whose loads it is the sum of."""
_SAME = (
    "parc.all_reduce", "parc.all_reduce_among", "parc.reduce_scatter", "parc.all_gather", WAIT,
)  # fmt: skip
"""Operators that keep what a value is as a whole. Types say how much of it a rank has, and what is yet to be summed."""


def check_loads(programs: Mapping[str, Program], reference: Program) -> Iterator[Fault]:
    """Find loads that are not all tokens of a step, and other operators where a bias moves."""
    if LOADS not in programs:
        return
    main = programs[LOADS].main
    parts: dict[str, _Parts] = {
        value.name: ((value.type.shape[0], (value.binding.name,)),)
        for value in main.parameters if value.binding is not None and value.kind == "load"
    }  # fmt: skip
    rows: dict[str, list[_Parts]] = {}
    for line in main.lines:
        (result,) = line.made
        made = _made(line, parts, rows)
        if made is not None:
            parts[result.name] = made
        elif line.op == "aten.stack.default" and all(name in parts for name in line.uses()):
            rows[result.name] = [parts[name] for name in line.uses()]
        elif not _moves_bias(line, parts):
            yield Fault("types", f"{LOADS} {result.name}", f"{line.op} is no step from loads to a sum, or to a bias")
    values = reference.main.values()
    wanted = tuple((values[n].type.shape[0], (key,)) for key, n in reference.main.returned("load").items())
    for key, name in main.returns:
        if key == LOAD and parts.get(name) != wanted:
            yield Fault("types", f"{LOADS} {key}", "is not proved to be the loads of all layers, each once, in order")


def _moves_bias(line: Line, parts: Mapping[str, _Parts]) -> bool:
    """Return whether a line makes the loads of one layer float64, or computes a bias from these: their mean, casts, and
    arithmetic that cuts nothing off."""
    loads, row = [parts[name] for name in line.uses() if name in parts], facts(line.op)
    if loads:
        one = all(len(found) == 1 and len(found[0][1]) == 1 for found in loads)
        return one and row.casts and dict(line.kwargs) == {"dtype": torch.float64}
    return bool(row.computes) or row.casts or line.op == "aten.mean.default"


def _made(line: Line, parts: Mapping[str, _Parts], rows: Mapping[str, list[_Parts]]) -> _Parts | None:
    """Return the parts of a line's result, or None if it does not add up loads, join them, or take some out."""
    source = line.args[0] if line.args else None
    name = source.name if isinstance(source, Ref) else ""
    if facts(line.op).makes_zeros(line.args):
        return ((line.made[0].type.shape[0], ()),)
    if line.op == "aten.cat.default" and line.args[1:] in ((), (0,)) and all(n in parts for n in line.uses()):
        return tuple(part for n in line.uses() for part in parts[n])
    if line.op == "aten.sum.dim_IntList" and name in rows and line.args[1] == [0]:
        sizes = {tuple(size for size, _ in row) for row in rows[name]}
        columns = zip(*rows[name], strict=True) if len(sizes) == 1 else ()
        return tuple((column[0][0], tuple(layer for _, own in column for layer in own)) for column in columns)
    if name not in parts:
        return None
    if line.op == "aten.slice.Tensor" and line.args[1] == 0 and line.args[4:] in ((), (1,)):
        return _between(parts[name], *line.args[2:4])
    return parts[name] if line.op in _SAME else None


def _between(parts: _Parts, start: int, end: int) -> _Parts | None:
    """Return the parts from one entry to another; None if these cut a part."""
    at, found, ends = 0, list[tuple[int, tuple[str, ...]]](), {0}
    for size, layers in parts:
        if start <= at and at + size <= end:
            found.append((size, layers))
        at += size
        ends.add(at)
    return tuple(found) if {start, end} <= ends else None
