"""Aliases: the values of a program that may share storage. Machines write over no value that another name may still
read, and estimates of memory count on the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch

from ..layout.collectives import COLLECTIVES, MESSAGE
from ..ops.rules import facts
from .program import Function, Line, Program, operator


def may_alias(line: Line) -> bool:
    """Return whether a result of a line may share storage with an operand; of a line that calls a function, `aliases`
    knows more."""
    if line.calls_function or line.op in COLLECTIVES:
        return True
    known = line.op.startswith(("aten.", "parc."))  # who only reads a build may not have a person's own operators
    return facts(line.op).storage != "fresh" and (not known or _may_pass_on(operator(line.op)))


@cache
def _may_pass_on(target: Any) -> bool:
    """Return whether an operator may return an operand: not every one that does says so in its schema."""
    return torch.Tag.pointwise not in target.tags or any(v.alias_info is not None for v in target._schema.returns)


class StorageGroups:
    """Groups of names that may share storage, each with the last line that reads it, given that of each name."""

    def __init__(self, last: Mapping[str, float] | None = None) -> None:
        self.parent: dict[str, str] = {}
        self.last = dict(last or {})

    def root(self, name: str) -> str:
        """Return the name of a value's group."""
        while (parent := self.parent.get(name, name)) != name:
            name = parent
        return name

    def join(self, names: Iterable[str]) -> None:
        """Make one group of those of all these names."""
        first, *others = dict.fromkeys(map(self.root, names))
        self.last[first] = max(self.last.get(name, 0) for name in (first, *others))
        self.parent.update(dict.fromkeys(others, first))


@dataclass(frozen=True, slots=True, eq=False)
class Joins:
    """The groups of names of a function that may share storage because of a line, by the first value that it makes."""

    by_result: Mapping[str, Sequence[Sequence[str]]]

    def of(self, line: Line) -> Sequence[Sequence[str]]:
        """Return the groups of names that a line joins."""
        return self.by_result[line.made[0].name]


def aliases(program: Program) -> dict[str, Joins]:
    """Return what the lines of each function join. Lines that call a function join what shares storage in it."""
    joins: dict[str, Joins] = {}
    seen: dict[str, tuple[str, ...]] = {}
    for function in program.functions:  # each comes after those that it calls
        called = [line.op for line in function.lines if line.calls_function]
        key = "aliases", tuple(seen[op] for op in called)
        if key not in function.derived:
            made = {line.made[0].name: list(_joined(program, line, seen)) for line in function.lines}
            groups = StorageGroups()
            for names in chain.from_iterable(made.values()):
                groups.join(names)
            ends = [*(value.name for value in function.parameters), *(name for _, name in function.returns)]
            function.derived[key] = Joins(made), tuple(map(groups.root, ends))
        joins[function.name], seen[function.name] = function.derived[key]
    return joins


def _joined(program: Program, line: Line, seen: Mapping[str, Sequence[str]]) -> Iterable[Sequence[str]]:
    """Return the groups of names that a line joins. ``seen`` has, for functions, the group of each parameter and of
    each value that is returned."""
    if not line.calls_function:
        return [[*(value.name for value in line.made), *line.uses]] if line.uses and may_alias(line) else []
    outside = [*(item.name for item in line.args), *(value and value.name for value in line.results)]
    groups: dict[str, list[str]] = {}
    for inside, name in zip(seen[line.op], outside, strict=True):
        groups.setdefault(inside, []).extend([name] if name else [])
    return [names for names in groups.values() if len(names) > 1]


def own_in_main(program: Program, function: Function) -> frozenset[str]:
    """Return the values that a main function returns or sends as a message, in storage that no parameter, no other such
    value and no line behind the message needs: messages may write over them."""
    groups = StorageGroups()
    joins = aliases(program)[function.name]
    for line in function.lines:
        for names in joins.of(line) if MESSAGE not in dict(line.kwargs) else ():
            groups.join(names)
    sent, read = set[str](), set[str]()
    for line in reversed(function.lines):
        if MESSAGE in dict(line.kwargs):
            sent.update(name for name in line.uses if groups.root(name) not in read)
        read.update(map(groups.root, line.uses))
    names = [*sent, *(name for _, name in function.returns)]
    leaving = Counter(map(groups.root, names))
    given = {groups.root(value.name) for value in function.parameters}
    return frozenset(name for name in names if leaving[groups.root(name)] == 1 and groups.root(name) not in given)
