"""Aliases: the values of a program that surely share storage, which an estimate of memory counts once, and those that
may: machines write over no value that another name may still read, and estimates count on the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..layout.collectives import COLLECTIVES, MESSAGE, WAIT
from ..ops.rules import facts
from .program import LAST, Function, Line, Program, Ref, operator


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


def adds_up(function: Function, line: Line) -> bool:
    """Return whether a line of a last backward adds a microbatch's gradient to the total of earlier ones."""
    if not function.name.endswith(LAST) or line.op != "aten.add.Tensor" or not isinstance(line.args[0], Ref):
        return False
    return function.values()[line.args[0].name].kind == "gradient"


@dataclass(frozen=True, slots=True, eq=False)
class Aliases:
    """The aliases among a function's values. ``root`` has the first of those that surely lie in one storage, which is
    the value itself where it has its own. ``joined`` has the groups of names that may share storage because of a line,
    by the first value that it makes."""

    root: Mapping[str, str]
    joined: Mapping[str, Sequence[Sequence[str]]]

    def of(self, line: Line) -> Sequence[Sequence[str]]:
        """Return the groups of names that may share storage because of a line."""
        return self.joined[line.made[0].name]


_Ends = tuple[tuple[str, ...], tuple[str, ...]]
"""For each parameter of a function and then each value that it returns: the first value that surely lies in its
storage, and the name of the group of those that may."""


def aliases(program: Program) -> dict[str, Aliases]:
    """Return the aliases of each function. What shares storage in a called function does so where it is called."""
    known: dict[str, Aliases] = {}
    ends: dict[str, _Ends] = {}
    for function in program.functions:  # each comes after those that it calls
        key = "aliases", program.mesh, tuple(ends[line.op] for line in function.lines if line.calls_function)
        if key not in function.derived:
            function.derived[key] = _followed(program, function, ends)
        known[function.name], ends[function.name] = function.derived[key]
    return known


def _followed(program: Program, function: Function, ends: Mapping[str, _Ends]) -> tuple[Aliases, _Ends]:
    """Return the aliases of a function and its ends, given the ``ends`` of those that it calls."""
    root = {value.name: value.name for value in function.parameters}
    joined, groups = dict[str, list[list[str]]](), StorageGroups()
    for line in function.lines:
        results = [value.name for value in line.made]
        if line.calls_function:
            sure, possible = (list(_where_called(line, there)) for there in ends[line.op])
        else:
            shares = bool(line.uses) and _shares(program, function, line, root)
            sure = [[line.uses[0], *results]] if shares else [[name] for name in results]
            possible = [[*results, *line.uses]] if line.uses and may_alias(line) else []
        for first, *others in sure:
            root.setdefault(first, first)
            root.update(dict.fromkeys(others, root[first]))
        joined[results[0]] = [names for names in possible if len(names) > 1]
        for names in joined[results[0]]:
            groups.join(names)
    names = [*(value.name for value in function.parameters), *(name for _, name in function.returns)]
    return Aliases(root, joined), (tuple(root[name] for name in names), tuple(map(groups.root, names)))


def _where_called(line: Line, ends: Sequence[str]) -> Iterable[list[str]]:
    """Return the groups of a call's operands and results that share storage, given the ``ends`` of the function."""
    groups: dict[str, list[str]] = {}
    names = [*(item.name for item in line.args), *(value.name if value else "" for value in line.results)]
    for end, name in zip(ends, names, strict=True):
        groups.setdefault(end, []).extend([name] if name else [])
    return filter(None, groups.values())


def _shares(program: Program, function: Function, line: Line, root: Mapping[str, str]) -> bool:
    """Return whether a line's results surely lie in the storage of its first operand. A value of repeated entries has
    no view of another shape: it is copied."""
    if facts(line.op).storage != "view":
        return line.op == WAIT or adds_up(function, line)
    source, first = (function.values()[name].type for name in (line.uses[0], root[line.uses[0]]))
    return facts(line.op).moves != "shape" or source.local_bytes(program.mesh) <= first.local_bytes(program.mesh)


def own_in_main(program: Program, function: Function) -> frozenset[str]:
    """Return the values that a main function returns or sends as a message, in storage that no parameter, no other such
    value and no line behind the message needs: messages may write over them."""
    groups = StorageGroups()
    known = aliases(program)[function.name]
    for line in function.lines:
        for names in known.of(line) if MESSAGE not in dict(line.kwargs) else ():
            groups.join(names)
    sent, read = set[str](), set[str]()
    for line in reversed(function.lines):
        if MESSAGE in dict(line.kwargs):
            sent.update(name for name in line.uses if groups.root(name) not in read)
        read.update(map(groups.root, line.uses))
    names = [*sent, *(name for _, name in function.returns)]
    leaving = Counter(map(groups.root, names))
    parameters = {groups.root(value.name) for value in function.parameters}
    return frozenset(name for name in names if leaving[groups.root(name)] == 1 and groups.root(name) not in parameters)
