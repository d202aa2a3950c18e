"""Totals: values that a program can add, as it makes them, to the sum of earlier microbatches, also after its sends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..layout.collectives import COLLECTIVES, MESSAGE, SUMS, WAIT
from ..layout.mesh import Mesh, Shape
from ..ops.rules import facts
from ..program.program import LAST, Function, Line, Program, Ref, Value, operator
from .products import Products

# ---- aliases


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


# ---- totals


LineChoice = Callable[[Function, Line], bool]
"""A choice of lines, each in its function."""


def adds(function: Function, line: Line) -> bool:
    """Return whether a line's results can be added to totals as they are made: they have storage of their own."""
    return not may_alias(line)


def adds_itself(function: Function, line: Line) -> bool:
    """Return whether a line can add its result to a total without making it. A cast that may round does so first."""
    if not facts(line.op).addable or not facts(line.op).casts:
        return facts(line.op).addable
    result = line.made[0].type.dtype
    return torch.promote_types(function.values()[line.uses[0]].type.dtype, result) == result


def addable(program: Program, chosen: LineChoice = adds) -> dict[str, frozenset[str]]:
    """Return, for each function, the gradients that may be added to a total as they are made. Such a value is made by a
    ``chosen`` line, here or in a called function. It is returned as a gradient and not sent, and nothing else reads it.
    In a last backward, what it returns elsewhere may be read once: to be summed."""
    read = set[tuple[str, str]]()
    mains = {main.name: program.main.returned("gradient").values() for main in program.mains}
    while True:
        able: dict[str, frozenset[str]] = {}
        for function in program.functions:
            returned = Counter(mains.get(function.name, [name for _, name in function.returns]))
            able[function.name] = frozenset(
                value.name for line in function.lines for value, inner in _made(program, line)
                if function.uses[value.name] == returned[value.name] == 1 and (function.name, value.name) not in read
                and (inner in able[line.op] if line.calls_function else chosen(function, line))
            )  # fmt: skip
        more = {  # what one caller reads is not added for the others
            (line.op, inner) for function in program.functions for line in function.lines if line.calls_function
            for value, inner in _made(program, line)
            if inner in able[line.op] and value.name not in able[function.name]
        }  # fmt: skip
        if not more:
            return able
        read |= more


def delayed(program: Program, chosen: LineChoice = adds) -> dict[str, frozenset[str]]:
    """Return those ``addable`` values that a machine may make after what a backward sends. Their lines are work, and
    make no result beside the total: else it would cost memory to wait."""
    return addable(program, lambda function, line: chosen(function, line) and facts(line.op).addable
                   and not facts(line.op).casts)  # fmt: skip


def _made(program: Program, line: Line) -> list[tuple[Value, str]]:
    """Return the values that a line makes. Each comes with its name inside the function that the line calls, or ""."""
    if not line.calls_function:
        return [(value, "") for value in line.made]
    return [(value, name) for value, (_, name) in zip(line.made, program.function(line.op).returns, strict=True)]


def lasting(function: Function, added: Collection[str]) -> set[str]:
    """Return the values that may be read after the function's last line. A line that makes a value of ``added`` may run
    that late: its operands last, and, if it calls a function, its other results, which the function may still read."""
    late = [line for line in function.lines if any(value.name in added for value in line.made)]
    back = {value.name for line in late if line.calls_function for value in line.made}
    return ({name for line in late for name in line.uses} | back) - set(added)


# ---- gradients that lie together


_ALIGNED = 64
"""The bytes of which every part begins at a multiple, as torch's own allocations do: products are slower elsewhere."""


@dataclass(frozen=True, slots=True)
class LyingGradient:
    """A gradient on one rank that lies in a buffer with others."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def aligns(self) -> bool:
        """True where what lies behind the gradient is aligned if the gradient is."""
        return math.prod(self.shape) * self.dtype.itemsize % _ALIGNED == 0


def made_in_place(op: str) -> bool:
    """Return whether a machine can make an operator's result in a given place: it is a product that can be added to a
    total."""
    return facts(op).addable and facts(op).precision == "product"


def gradients_together(
    program: Program,
    chosen: LineChoice,
    read: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
) -> list[list[LyingGradient]]:
    """Return the gradients of each message and dtype that lie one behind the other, in that order. ``chosen`` lines
    make them; ``read`` returns the dtype as which a machine reads one of the program."""
    able = addable(program, chosen)[program.main.name]
    together: dict[tuple[object, torch.dtype], list[LyingGradient]] = {}
    for message, name in _sent(program):
        if name in able:
            type_ = program.main.values()[name].type
            gradient = LyingGradient(name, type_.local(program.mesh), read(type_.dtype))
            together.setdefault((message, gradient.dtype), []).append(gradient)
    lying = map(_in_order, together.values())
    return [gradients for gradients in lying if len(gradients) > 1]


def buffers_within(program: Program, products: Products) -> dict[str, dict[str, int]]:
    """Return, for each function, the number of the buffer of each value that is made in one. The calls of a function
    are taken to be alike."""

    def in_place(function: Function, line: Line) -> bool:
        return made_in_place(line.op) and not products.apart(line, function, program.mesh)

    lying = {value.name: at for at, values in enumerate(gradients_together(program, in_place)) for value in values}
    within: dict[str, dict[str, int]] = {function.name: {} for function in program.functions}
    within.update((main.name, dict(lying)) for main in program.mains)
    for function in reversed(program.functions) if lying else ():  # callers first
        for line in (line for line in function.lines if line.calls_function):
            callee = program.function(line.op)
            for value, (_, name) in zip(line.results, callee.returns, strict=True):
                if value is not None and value.name in within[function.name]:
                    within[callee.name].setdefault(name, within[function.name][value.name])
    return within


def _in_order(gradients: Sequence[LyingGradient]) -> list[LyingGradient]:
    """Return the gradients that can lie one behind the other, in that order: at most the last does not align."""
    others = [gradient for gradient in gradients if not gradient.aligns]
    return [*(gradient for gradient in gradients if gradient.aligns), *others[:1]]


def _sent(program: Program) -> Iterator[tuple[object, str]]:
    """Yield the number of each message that sums gradients, with the name of each gradient in it. With several
    microbatches that is the name of the last one's, which is added to the others."""
    if (last := program.last) is None:
        return
    added = {line.made[0].name: line.uses[1] for line in last.lines if adds_up(last, line)}
    for line in last.lines:
        message = dict(line.kwargs).get(MESSAGE)
        if message is not None and line.op == SUMS[0]:
            (name,) = line.uses
            yield message, added.get(name, name)


# ---- lines that write their result over an operand


@cache
def form_over(op: str) -> Callable[..., torch.Tensor] | None:
    """Return torch's form of an operator that writes the result over the first operand, of the same shape and dtype:
    the operator in place, or the one that is given a place for its result. None if torch has neither."""
    row = facts(op)
    if not op.startswith("aten.") or not row.elementwise or row.storage == "view":
        return None
    target = operator(op)
    inside = getattr(getattr(torch.ops.aten, f"{target.overloadpacket.__name__}_", None), target._overloadname, None)
    if inside is not None and _taken(inside) == _taken(target):
        return inside  # type: ignore[no-any-return]
    for name in target.overloadpacket.overloads() if len(target._schema.returns) == 1 else ():
        overload = getattr(target.overloadpacket, name)
        places = [argument.name for argument in overload._schema.arguments if argument.is_out]
        # a generated form computes the result elsewhere and copies it
        if len(places) == 1 and _taken(overload) == _taken(target) and torch.Tag.generated not in overload.tags:
            return _into_first(overload, places[0])
    return None


def _taken(target: Any) -> list[tuple[str, str]]:
    """Return the names and types of an operator's arguments, without a place for its result."""
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments if not argument.is_out]


def _into_first(overload: Any, place: str) -> Callable[..., torch.Tensor]:
    """Return the call of an operator whose first operand is the place for its result."""

    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return overload(first, *args, **kwargs, **{place: first})  # type: ignore[no-any-return]

    return call


def spare_operands(function: Function, known: Aliases, delayed: frozenset[str]) -> Sequence[frozenset[str]]:
    """Return, for each line, the operands whose storage only its results need after it: lines may write over it.
    Parameters belong to the caller, except what a program takes to give it back as another. What ``delayed`` values
    are made of may be read after the last line. ``known`` has the function's aliases."""
    key = "spare", known, delayed
    if key not in function.derived:
        owned = {value.name for value in function.bound("gradient").values() if function.returned("gradient")}
        last: dict[str, float] = {name: at for at, line in enumerate(function.lines) for name in line.uses}
        kept = {value.name for value in function.parameters} - owned | lasting(function, delayed)
        last.update(dict.fromkeys(kept | {name for _, name in function.returns}, float("inf")))
        groups, spare = StorageGroups(last), list[frozenset[str]]()
        for index, line in enumerate(function.lines):
            roots = [groups.root(name) for name in line.uses]
            spare.append(frozenset(
                name for name, root in zip(line.uses, roots, strict=True)
                if groups.last[root] == index and roots.count(root) == 1
            ))  # fmt: skip
            for names in known.of(line):
                groups.join(names)
        function.derived[key] = spare
    stored: Sequence[frozenset[str]] = function.derived[key]
    return stored


def operand_over(line: Line, function: Function, spare: Collection[str], mesh: Mesh) -> int | None:
    """Return the position of the spare operand over which a line can write its one result; None if there is none."""
    (result, *more) = line.results
    if not spare or more or result is None:
        return None
    values = function.values()
    commutes = facts(line.op).computes in ("total", "multiple") and not line.kwargs
    for at, operand in enumerate(line.args[: 2 if commutes else 1]):
        if isinstance(operand, Ref) and operand.name in spare:
            type_ = values[operand.name].type
            if (type_.dtype, type_.local(mesh)) == (result.type.dtype, result.type.local(mesh)):
                return at
    return None
