"""The last uses of values, and the storage of such values that a line may write its result over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...compiler.layout.collectives import COLLECTIVES, MESSAGE, WAIT
from ...compiler.layout.mesh import Mesh
from ...compiler.ops.rules import facts
from ...compiler.program.program import Function, Line, Program, Ref, operator
from .kernels import ADD_PRODUCT, KERNELS
from .ways import code_for


def made_by(lines: Iterable[Line]) -> list[str]:
    """Yield the names of lines' results."""
    return [value.name for line in lines for value in line.results if value is not None]


def summed(lines: Iterable[Line]) -> set[str]:
    """Return the names of values that may arrive later: collectives' results, and what lines wait for."""
    lines = list(lines)
    given = {name for line in lines if line.op == WAIT for name in line.uses()}
    return given.union(made_by(line for line in lines if line.op in COLLECTIVES))


def last_uses(function: Function, groups: Sequence[Sequence[Line]]) -> list[tuple[str, ...]]:
    """Return, for each group of a function's lines, the names that nobody reads after it."""
    last = {name: at for at, lines in enumerate(groups) for line in lines for name in (*line.uses(), *made_by([line]))}
    returned = {name for _, name in function.returns}
    dead: list[list[str]] = [[] for _ in groups]
    for name, at in last.items():
        if name not in returned:
            dead[at].append(name)
    return list(map(tuple, dead))


def spare_operands(function: Function, owned: Collection[str], late: Collection[str] = ()) -> list[frozenset[str]]:
    """Return, for each line, the operands whose storage only its results need after it. Parameters belong to the
    caller, except those ``owned``. Values that are ``late`` may be read after the last line."""
    last: dict[str, float] = {}
    for index, line in enumerate(function.lines):
        last.update(dict.fromkeys((*made_by([line]), *line.uses()), index))
    kept = {value.name for value in function.parameters} - set(owned) | set(late)
    last.update(dict.fromkeys(kept | {name for _, name in function.returns}, float("inf")))
    group, spare = _Groups(last), []
    for index, line in enumerate(function.lines):
        roots = [group.root(name) for name in line.uses()]
        spare.append(frozenset(
            name for name, root in zip(line.uses(), roots, strict=True)
            if group.last[root] == index and roots.count(root) == 1
        ))  # fmt: skip
        if may_alias(line):
            group.join([*made_by([line]), *line.uses()])
    return spare


def own_in_main(program: Program) -> frozenset[str]:
    """Return the values of the main function that messages may write over; for backward, of that of the last
    microbatch."""
    own: dict[str, Collection[int]] = {}
    for function in program.functions:
        names = _own_results(function, own)
        own[function.name] = {at for at, (_, name) in enumerate(function.returns) if name in names}
    return _own_results(program.mains[0], own)


def _own_results(function: Function, own: Mapping[str, Collection[int]]) -> frozenset[str]:
    """Return the values that a function returns, or sends as a message, in storage that no parameter and no other such
    value shares. ``own`` has the places of such results of the functions that it calls."""
    group = _Groups({})
    for line in function.lines:
        if MESSAGE in dict(line.kwargs):
            continue
        made = [value for value in line.results if value is not None]
        if line.calls_function:
            made = [value for at, value in enumerate(line.results) if value is not None and at not in own[line.op]]
        if made and may_alias(line):
            group.join([*(value.name for value in made), *line.uses()])
    sent, read = set[str](), set[str]()  # what is read behind a message may not be written over by it
    for line in reversed(function.lines):
        if MESSAGE in dict(line.kwargs):
            sent.update(name for name in line.uses() if group.root(name) not in read)
        read.update(map(group.root, line.uses()))
    names = [*sent, *(name for _, name in function.returns)]
    leaving = Counter(map(group.root, names))
    given = {group.root(value.name) for value in function.parameters}
    return frozenset(name for name in names if leaving[group.root(name)] == 1 and group.root(name) not in given)


def in_place(line: Line, function: Function, spare: Collection[str], mesh: Mesh) -> tuple[Any, list[Any]] | None:
    """Return the operator that writes a line's result over a spare operand, and its arguments with that operand first;
    None if there is none."""
    (result, *more) = line.results
    if not spare or more or result is None or (overload := _writing_over(line.op)) is None:
        return None
    values = function.values()
    args = list(line.args)
    commutes = facts(line.op).computes in ("total", "multiple") and not line.kwargs
    for index in range(2 if commutes else 1):
        operand = args[index]
        if isinstance(operand, Ref) and operand.name in spare:
            operand_type = values[operand.name].type
            if (operand_type.dtype, operand_type.local(mesh)) == (result.type.dtype, result.type.local(mesh)):
                return overload, [operand, *(arg for at, arg in enumerate(args) if at != index)]
    return None


def _writing_over(op: str) -> Any:
    """Return the operator that writes an operator's result over its first operand, or None."""
    if op in code_for("over"):
        return code_for("over")[op]
    target = None if op in KERNELS else operator(op)
    if target is None or target.namespace != "aten" or torch.Tag.pointwise not in target.tags:
        return None
    packet = getattr(torch.ops.aten, f"{target.overloadpacket.__name__}_", None)
    overload = getattr(packet, target._overloadname, None)
    return overload if overload is not None and _takes_the_same(overload, target) else None


def _takes_the_same(overload: Any, target: Any) -> bool:
    first, second = ([(a.name, str(a.type)) for a in op._schema.arguments] for op in (overload, target))
    return bool(first == second)


def may_alias(line: Line) -> bool:
    """Return whether a result may share an operand's storage."""
    if line.calls_function or line.op in COLLECTIVES:
        return True
    if facts(line.op).storage == "fresh" or line.op == ADD_PRODUCT:
        return False
    target = operator(line.op)  # not every operator that passes an operand on says so in its schema
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
