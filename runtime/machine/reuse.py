"""The last uses of values, and the storage of such values that a line may write its result over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ...compiler.layout.collectives import COLLECTIVES, MESSAGE, WAIT
from ...compiler.layout.mesh import Mesh
from ...compiler.ops.rules import facts
from ...compiler.program.overwriting import form_over, operand_over
from ...compiler.program.program import Function, Line, Program, operator
from ...compiler.program.totals import lasting
from .kernels import ADD_PRODUCT
from .ways import code_for


def made_by(lines: Iterable[Line]) -> list[str]:
    """Yield the names of lines' results."""
    return [value.name for line in lines for value in line.results if value is not None]


def summed(lines: Iterable[Line]) -> set[str]:
    """Return the names of values that may arrive later: collectives' results, and what lines wait for."""
    lines = list(lines)
    given = {name for line in lines if line.op == WAIT for name in line.uses}
    return given.union(made_by(line for line in lines if line.op in COLLECTIVES))


def last_uses(function: Function, groups: Sequence[Sequence[Line]]) -> list[tuple[str, ...]]:
    """Return, for each group of a function's lines, the names that nobody reads after it."""
    last = {name: at for at, lines in enumerate(groups) for line in lines for name in (*line.uses, *made_by([line]))}
    returned = {name for _, name in function.returns}
    dead: list[list[str]] = [[] for _ in groups]
    for name, at in last.items():
        if name not in returned:
            dead[at].append(name)
    return list(map(tuple, dead))


@dataclass(frozen=True, slots=True)
class Lives:
    """The lives of a function's values, line by line: the operands whose storage only the line's results need after it,
    those that must have arrived before it, and the names that nobody reads after it."""

    spare: Sequence[frozenset[str]]
    awaited: Sequence[tuple[str, ...]]
    dead: Sequence[tuple[str, ...]]


def lives(function: Function, added: frozenset[str], reuse: bool) -> Lives:
    """Return the lives of a function's values, some of which are ``added`` to totals. Without ``reuse`` no storage is
    spare."""
    key = "lives", added, reuse
    if key not in function.derived:
        # what a program takes to give it back as another is its own
        owned = [value.name for value in function.bound("gradient").values() if function.returned("gradient")]
        late, sums = lasting(function, added), summed(function.lines)
        spare = spare_operands(function, owned, late) if reuse else [frozenset[str]()] * len(function.lines)
        awaited = [tuple(sums.intersection(line.uses)) for line in function.lines]
        function.derived[key] = Lives(spare, awaited, last_uses(function, [(line,) for line in function.lines]))
    stored: Lives = function.derived[key]
    return stored


def spare_operands(function: Function, owned: Collection[str], late: Collection[str] = ()) -> list[frozenset[str]]:
    """Return, for each line, the operands whose storage only its results need after it. Parameters belong to the
    caller, except those ``owned``. Values that are ``late`` may be read after the last line."""
    last: dict[str, float] = {}
    for index, line in enumerate(function.lines):
        last.update(dict.fromkeys((*made_by([line]), *line.uses), index))
    kept = {value.name for value in function.parameters} - set(owned) | set(late)
    last.update(dict.fromkeys(kept | {name for _, name in function.returns}, float("inf")))
    group, spare = _Groups(last), []
    for index, line in enumerate(function.lines):
        roots = [group.root(name) for name in line.uses]
        spare.append(frozenset(
            name for name, root in zip(line.uses, roots, strict=True)
            if group.last[root] == index and roots.count(root) == 1
        ))  # fmt: skip
        if may_alias(line):
            group.join([*made_by([line]), *line.uses])
    return spare


def own_in_main(program: Program) -> frozenset[str]:
    """Return the values of the main function that messages may write over; for backward, of that of the last
    microbatch."""
    own: dict[str, frozenset[int]] = {}
    for function in program.functions:
        names = _own_results(function, own)
        own[function.name] = frozenset(at for at, (_, name) in enumerate(function.returns) if name in names)
    return _own_results(program.mains[0], own)


def _own_results(function: Function, own: Mapping[str, frozenset[int]]) -> frozenset[str]:
    """Return the values that a function returns, or sends as a message, in storage that no parameter and no other such
    value shares. ``own`` has the places of such results of the functions that it calls."""
    key = "own results", frozenset((line.op, own[line.op]) for line in function.lines if line.calls_function)
    if key not in function.derived:
        function.derived[key] = _found_own(function, own)
    stored: frozenset[str] = function.derived[key]
    return stored


def _found_own(function: Function, own: Mapping[str, frozenset[int]]) -> frozenset[str]:
    group = _Groups({})
    for line in function.lines:
        if MESSAGE in dict(line.kwargs):
            continue
        made = [value for value in line.results if value is not None]
        if line.calls_function:
            made = [value for at, value in enumerate(line.results) if value is not None and at not in own[line.op]]
        if made and may_alias(line):
            group.join([*(value.name for value in made), *line.uses])
    sent, read = set[str](), set[str]()  # what is read behind a message may not be written over by it
    for line in reversed(function.lines):
        if MESSAGE in dict(line.kwargs):
            sent.update(name for name in line.uses if group.root(name) not in read)
        read.update(map(group.root, line.uses))
    names = [*sent, *(name for _, name in function.returns)]
    leaving = Counter(map(group.root, names))
    given = {group.root(value.name) for value in function.parameters}
    return frozenset(name for name in names if leaving[group.root(name)] == 1 and group.root(name) not in given)


def in_place(line: Line, function: Function, spare: Collection[str], mesh: Mesh) -> tuple[Any, list[Any]] | None:
    """Return the operator that writes a line's result over a spare operand, and its arguments with that operand first;
    None if there is none."""
    form = code_for("over").get(line.op) or form_over(line.op)
    at = operand_over(line, function, spare, mesh) if form is not None else None
    return None if at is None else (form, [line.args[at], *line.args[:at], *line.args[at + 1 :]])


def may_alias(line: Line) -> bool:
    """Return whether a result may share an operand's storage."""
    if line.calls_function or line.op in COLLECTIVES:
        return True
    if facts(line.op).storage == "fresh" or line.op == ADD_PRODUCT:
        return False
    return _may_pass_on(operator(line.op))


@cache
def _may_pass_on(target: Any) -> bool:
    """Return whether an operator may return an operand: not every one that does says so in its schema."""
    return torch.Tag.pointwise not in target.tags or any(v.alias_info is not None for v in target._schema.returns)


class _Groups:
    """Groups of names that may share storage, each with the last line that reads it."""

    def __init__(self, last: Mapping[str, float]) -> None:
        self.parent: dict[str, str] = {}
        self.last = dict(last)

    def root(self, name: str) -> str:
        while (parent := self.parent.get(name, name)) != name:
            name = parent
        return name

    def join(self, names: Iterable[str]) -> None:
        roots = [self.root(name) for name in names]
        self.last[roots[0]] = max(self.last.get(root, 0) for root in roots)
        self.parent.update((root, roots[0]) for root in roots)
