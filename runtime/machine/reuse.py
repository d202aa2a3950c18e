"""Liveness of a function's values, and the operands whose storage a line may write its result over."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from ...compiler.analysis.lifetimes import Aliases, form_over, operand_over, spare_operands
from ...compiler.layout.collectives import COLLECTIVES, WAIT
from ...compiler.layout.mesh import Mesh
from ...compiler.program.program import Function, Line, remembered
from .registry import code_for


def made_by(lines: Iterable[Line]) -> list[str]:
    """Return the names of the values that lines make."""
    return [value.name for line in lines for value in line.made]


def in_flight(lines: Iterable[Line]) -> set[str]:
    """Return the names of values that may still be in flight after these lines: results of collectives, and values that
    a line waits for."""
    lines = list(lines)
    awaited = {name for line in lines if line.op == WAIT for name in line.uses}
    return awaited.union(made_by(line for line in lines if line.op in COLLECTIVES))


def last_uses(function: Function, groups: Sequence[Sequence[Line]]) -> list[tuple[str, ...]]:
    """Return, for each group of a function's lines, the names that nobody reads after it."""
    last = {name: at for at, lines in enumerate(groups) for line in lines for name in (*line.uses, *made_by([line]))}
    returned = {name for _, name in function.returns}
    dead: list[list[str]] = [[] for _ in groups]
    for name, at in last.items():
        if name not in returned:
            dead[at].append(name)
    return list(map(tuple, dead))


class LineLiveness(NamedTuple):
    """The liveness of values at a line: the operands whose storage the line may write over, those that must have
    arrived before it, and the names that nobody reads after it."""

    spare: frozenset[str]
    awaited: tuple[str, ...]
    dead: tuple[str, ...]


@remembered
def liveness(function: Function, aliases: Aliases, reuse: bool) -> Sequence[LineLiveness]:
    """Return the liveness at each line of a function. Without ``reuse`` no storage is spare."""
    sums = in_flight(function.lines)
    spare = spare_operands(function, aliases) if reuse else [frozenset[str]()] * len(function.lines)
    awaited = [tuple(sums.intersection(line.uses)) for line in function.lines]
    dead = last_uses(function, [(line,) for line in function.lines])
    return tuple(map(LineLiveness, spare, awaited, dead))


def in_place(line: Line, function: Function, spare: Collection[str], mesh: Mesh) -> tuple[Any, list[Any]] | None:
    """Return the operator that writes a line's result over a spare operand, and its arguments with that operand first;
    None if there is none."""
    form = code_for("over").get(line.op) or form_over(line.op)
    at = operand_over(line, function, spare, mesh) if form is not None else None
    return None if at is None else (form, [line.args[at], *line.args[:at], *line.args[at + 1 :]])
