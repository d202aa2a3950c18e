"""Lifetimes of values: which share storage, which gradients are accumulated as they are made or lie in one bucket, and
which operands a line may write over. The machine, fusion and the memory estimate all ask here.

A *total* is the gradient that earlier microbatches have accumulated.
"""

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
from ..program.program import LAST, Function, Line, Program, Ref, Value, operator, remembered
from .products import Products

# ---- aliases


def may_alias(line: Line) -> bool:
    """Return whether a line's result may alias an operand. `aliases` knows more of a line that calls a function."""
    if line.calls_function or line.op in COLLECTIVES:
        return True
    ours = line.op.startswith(("aten.", "parc."))  # who only reads a build may not have a person's own operators
    return facts(line.op).storage != "fresh" and (not ours or _may_return_operand(operator(line.op)))


@cache
def _may_return_operand(target: Any) -> bool:
    """Return whether an operator may return an operand: not every one that does says so in its schema."""
    return torch.Tag.pointwise not in target.tags or any(v.alias_info is not None for v in target._schema.returns)


class StorageGroups:
    """Groups of values that may share storage, each with the last line that reads one of them."""

    def __init__(self, last: Mapping[str, float] | None = None) -> None:
        self.parent: dict[str, str] = {}
        self.last = dict(last or {})

    def root(self, name: str) -> str:
        """Return the value by which a value's group is known."""
        while (parent := self.parent.get(name, name)) != name:
            name = parent
        return name

    def join(self, names: Iterable[str]) -> None:
        """Merge the groups of all these values."""
        first, *others = dict.fromkeys(map(self.root, names))
        self.last[first] = max(self.last.get(name, 0) for name in (first, *others))
        self.parent.update(dict.fromkeys(others, first))


def accumulates(function: Function, line: Line) -> bool:
    """Return whether a line of a last backward adds a microbatch's gradient to its total."""
    if not function.name.endswith(LAST) or line.op != "aten.add.Tensor" or not isinstance(line.args[0], Ref):
        return False
    return function.values()[line.args[0].name].kind == "gradient"


@dataclass(frozen=True, slots=True, eq=False)
class Aliases:
    """The aliases among a function's values. ``root`` is the first of the values that surely lie in the same storage.
    ``joined`` are the groups of values that may share storage because of a line, by the line's first result."""

    root: Mapping[str, str]
    joined: Mapping[str, Sequence[Sequence[str]]]

    def of(self, line: Line) -> Sequence[Sequence[str]]:
        """Return the groups of values that may share storage because of a line."""
        return self.joined[line.made[0].name]


_Ends = tuple[tuple[str, ...], tuple[str, ...]]
"""For each parameter of a function, and then each value that it returns: its root, and its group of values that may
share storage."""


def aliases(program: Program) -> dict[str, Aliases]:
    """Return the aliases of each function of a program, which take in those of the functions that it calls."""
    known: dict[str, Aliases] = {}
    ends: dict[str, _Ends] = {}
    for function in program.functions:  # each comes after those that it calls
        called = tuple(ends[line.op] for line in function.lines if line.calls_function)
        known[function.name], ends[function.name] = _function_aliases(function, program.mesh, called)
    return known


@remembered
def _function_aliases(function: Function, mesh: Mesh, called: tuple[_Ends, ...]) -> tuple[Aliases, _Ends]:
    """Return the aliases of a function and its ends, from those of the functions that its lines call, in order."""
    ends = iter(called)
    root = {value.name: value.name for value in function.parameters}
    joined, groups = dict[str, list[list[str]]](), StorageGroups()
    for line in function.lines:
        results = [value.name for value in line.made]
        if line.calls_function:
            sure, possible = (list(_call_aliases(line, inner)) for inner in next(ends))
        else:
            shares = bool(line.uses) and _is_view(function, mesh, line, root)
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


def _call_aliases(line: Line, ends: Sequence[str]) -> Iterable[list[str]]:
    """Return the groups of a call's operands and results that share storage: those with the same end inside."""
    groups: dict[str, list[str]] = {}
    names = [*(item.name for item in line.args), *(value.name if value else "" for value in line.results)]
    for end, name in zip(ends, names, strict=True):
        groups.setdefault(end, []).extend([name] if name else [])
    return filter(None, groups.values())


def _is_view(function: Function, mesh: Mesh, line: Line, root: Mapping[str, str]) -> bool:
    """Return whether a line's results surely lie in the storage of its first operand. An expanded value has no view of
    another shape: it is copied."""
    if facts(line.op).storage != "view":
        return line.op == WAIT or accumulates(function, line)
    source, first = (function.values()[name].type for name in (line.uses[0], root[line.uses[0]]))
    return facts(line.op).moves != "shape" or source.local_bytes(mesh) <= first.local_bytes(mesh)


def reducible_in_place(program: Program, function: Function) -> frozenset[str]:
    """Return the values of a main function that an all-reduce may write over: the function returns them or starts a
    message with them, and no parameter, no other such value and no line after the message needs their storage."""
    groups, function_aliases = StorageGroups(), aliases(program)[function.name]
    for line in function.lines:
        for names in function_aliases.of(line) if MESSAGE not in dict(line.kwargs) else ():
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


# ---- gradients that are accumulated as they are made


LineChoice = Callable[[Function, Line], bool]
"""A choice of lines, each in its function."""


def adds(function: Function, line: Line) -> bool:
    """Return whether a line's results can be added to totals as they are made: they alias no operand."""
    return not may_alias(line)


def adds_itself(function: Function, line: Line) -> bool:
    """Return whether a line's kernel can accumulate into a total, without a temporary for its result. A cast that may
    round needs one."""
    if not facts(line.op).addable or not facts(line.op).casts:
        return facts(line.op).addable
    result = line.made[0].type.dtype
    return torch.promote_types(function.values()[line.uses[0]].type.dtype, result) == result


def addable(program: Program, chosen: LineChoice = adds) -> dict[str, frozenset[str]]:
    """Return, for each function, the gradients that may be added to a total as they are made. A ``chosen`` line makes
    such a value, here or in a called function; it is returned as a gradient and nothing else reads it. In a last
    backward, one line may read what backward returns: the line that starts its reduction."""
    read = set[tuple[str, str]]()
    mains = {main.name: program.main.returned("gradient").values() for main in program.mains}
    while True:
        able: dict[str, frozenset[str]] = {}
        for function in program.functions:
            returned = Counter(mains.get(function.name, [name for _, name in function.returns]))
            able[function.name] = frozenset(
                value.name for line in function.lines for value, inner in _results_inside(program, line)
                if function.uses[value.name] == returned[value.name] == 1 and (function.name, value.name) not in read
                and (inner in able[line.op] if line.calls_function else chosen(function, line))
            )  # fmt: skip
        more = {  # what one caller reads is not added for the others
            (line.op, inner) for function in program.functions for line in function.lines if line.calls_function
            for value, inner in _results_inside(program, line)
            if inner in able[line.op] and value.name not in able[function.name]
        }  # fmt: skip
        if not more:
            return able
        read |= more


def _results_inside(program: Program, line: Line) -> list[tuple[Value, str]]:
    """Return a line's results, each with its name inside the function that the line calls, or ""."""
    if not line.calls_function:
        return [(value, "") for value in line.made]
    return [(value, name) for value, (_, name) in zip(line.made, program.function(line.op).returns, strict=True)]


# ---- gradient buckets: the gradients of one message, allocated contiguously


_ALIGNED = 64
"""The bytes at a multiple of which every gradient begins, as torch's own allocations do: products are slower
elsewhere."""


@dataclass(frozen=True, slots=True)
class BucketGradient:
    """One rank's gradient in a bucket."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def aligns(self) -> bool:
        """True where the next gradient in the bucket is aligned if this one is."""
        return math.prod(self.shape) * self.dtype.itemsize % _ALIGNED == 0


def made_in_place(op: str) -> bool:
    """Return whether a machine can write an operator's result into a bucket: it is a product that can be added to a
    total."""
    return facts(op).addable and facts(op).precision == "product"


def gradient_buckets(
    program: Program,
    chosen: LineChoice,
    read_as: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
) -> list[list[BucketGradient]]:
    """Return the buckets of a last backward, one for each message and dtype with several gradients that ``chosen``
    lines make. ``read_as`` returns the dtype as which a machine reads one of the program."""
    able = addable(program, chosen)[program.main.name]
    buckets: dict[tuple[object, torch.dtype], list[BucketGradient]] = {}
    for message, name in _reduced_gradients(program):
        if name in able:
            type_ = program.main.values()[name].type
            gradient = BucketGradient(name, type_.local(program.mesh), read_as(type_.dtype))
            buckets.setdefault((message, gradient.dtype), []).append(gradient)
    return [bucket for bucket in map(_contiguous, buckets.values()) if len(bucket) > 1]


def bucket_numbers(program: Program, products: Products) -> dict[str, dict[str, int]]:
    """Return, for each function, the number of the bucket of each value that is written into one. All calls of a
    function are taken to be alike."""

    def in_place(function: Function, line: Line) -> bool:
        return made_in_place(line.op) and not products.apart(line, function, program.mesh)

    of_main = {value.name: at for at, bucket in enumerate(gradient_buckets(program, in_place)) for value in bucket}
    numbers: dict[str, dict[str, int]] = {function.name: {} for function in program.functions}
    numbers.update((main.name, dict(of_main)) for main in program.mains)
    for function in reversed(program.functions) if of_main else ():  # callers first
        for line in (line for line in function.lines if line.calls_function):
            callee = program.function(line.op)
            for value, (_, name) in zip(line.results, callee.returns, strict=True):
                if value is not None and value.name in numbers[function.name]:
                    numbers[callee.name].setdefault(name, numbers[function.name][value.name])
    return numbers


def _contiguous(gradients: Sequence[BucketGradient]) -> list[BucketGradient]:
    """Return the gradients that can be contiguous, in their order: only the last may leave what follows unaligned."""
    others = [gradient for gradient in gradients if not gradient.aligns]
    return [*(gradient for gradient in gradients if gradient.aligns), *others[:1]]


def _reduced_gradients(program: Program) -> Iterator[tuple[object, str]]:
    """Yield the gradients that a last backward all-reduces, each with the number of its message. With several
    microbatches it is the last one's gradient, before that is added to the total."""
    if (last := program.last) is None:
        return
    added = {line.made[0].name: line.uses[1] for line in last.lines if accumulates(last, line)}
    for line in last.lines:
        message = dict(line.kwargs).get(MESSAGE)
        if message is not None and line.op == SUMS[0]:
            (name,) = line.uses
            yield message, added.get(name, name)


# ---- lines that write over an operand


@cache
def form_over(op: str) -> Callable[..., torch.Tensor] | None:
    """Return torch's form of an operator that writes the result over the first operand, of the same shape and dtype:
    the in-place overload (``add_``) or the one with an ``out`` argument. None if torch has neither."""
    row = facts(op)
    if not op.startswith("aten.") or not row.elementwise or row.storage == "view":
        return None
    target = operator(op)
    inside = getattr(getattr(torch.ops.aten, f"{target.overloadpacket.__name__}_", None), target._overloadname, None)
    if inside is not None and _input_arguments(inside) == _input_arguments(target):
        return inside  # type: ignore[no-any-return]
    for name in target.overloadpacket.overloads() if len(target._schema.returns) == 1 else ():
        overload = getattr(target.overloadpacket, name)
        places = [argument.name for argument in overload._schema.arguments if argument.is_out]
        # a generated form computes the result elsewhere and copies it
        if (
            len(places) == 1
            and _input_arguments(overload) == _input_arguments(target)
            and torch.Tag.generated not in overload.tags
        ):
            return _into_first(overload, places[0])
    return None


def _input_arguments(target: Any) -> list[tuple[str, str]]:
    """Return the names and types of an operator's arguments, but not of those for its results."""
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments if not argument.is_out]


def _into_first(overload: Any, place: str) -> Callable[..., torch.Tensor]:
    """Return the call of an overload in which the first operand is also the ``out`` argument, named ``place``."""

    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return overload(first, *args, **kwargs, **{place: first})  # type: ignore[no-any-return]

    return call


@remembered
def spare_operands(function: Function, function_aliases: Aliases) -> Sequence[frozenset[str]]:
    """Return, for each line, the operands that die there: the line may write over their storage, which only its results
    need after it. Parameters belong to the caller, but for totals that the function returns anew."""
    owned = {value.name for value in function.bound("gradient").values() if function.returned("gradient")}
    last: dict[str, float] = {name: at for at, line in enumerate(function.lines) for name in line.uses}
    kept = {value.name for value in function.parameters} - owned
    last.update(dict.fromkeys(kept | {name for _, name in function.returns}, float("inf")))
    groups, spare = StorageGroups(last), list[frozenset[str]]()
    for index, line in enumerate(function.lines):
        roots = [groups.root(name) for name in line.uses]
        spare.append(frozenset(
            name for name, root in zip(line.uses, roots, strict=True)
            if groups.last[root] == index and roots.count(root) == 1
        ))  # fmt: skip
        for names in function_aliases.of(line):
            groups.join(names)
    return spare


def operand_over(line: Line, function: Function, spare: Collection[str], mesh: Mesh) -> int | None:
    """Return the position of the spare operand that a line can write its single result over, or None."""
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
