"""Mutators: generic changes of one place of a program, whatever stands there. A place is a line, a row of what a main
function takes or returns, or a value. A mutator yields what it changed and a function that makes the
programs with it: most of them are never made, as a table judges a few of each stratum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch

from parc.compiler.layout.collectives import COLLECTIVES, MESSAGE, RINGS, WAIT
from parc.compiler.layout.placement import Placement, Split, TensorType
from parc.compiler.layout.stretches import nest
from parc.compiler.ops.rules import facts
from parc.compiler.program.actions import Action
from parc.compiler.program.binding import Binding, Kind
from parc.compiler.program.program import Function, Line, LocalSize, Program, Ref, Value, map_references
from tests.planted_edits import Programs, reading, stacked, through, with_argument, with_function, with_main
from tests.planted_types import carried

Change = tuple[str, Callable[[], Programs]]
"""The words for a change, and a function that makes the programs with it."""
Changes = Iterator[Change]


@dataclass(frozen=True)
class Mutant:
    """A build with one bug: its class, its place, what was done, and what makes the programs or actions with it."""

    kind: str
    place: str
    what: str
    make: Callable[[], Programs]
    actions: Sequence[Action] | None = None
    timelines: Mapping[str, Sequence[Action]] | None = None
    """The actions of several roles."""

    @property
    def programs(self) -> Programs:
        return self.make()


# ---- places


@dataclass(frozen=True)
class Site:
    """One line of one function of one program."""

    programs: Programs
    action: str
    function: Function
    index: int

    @property
    def line(self) -> Line:
        return self.function.lines[self.index]

    @property
    def result(self) -> Value:
        return self.line.made[0]

    @property
    def source(self) -> Ref:
        source = self.line.args[0]
        assert isinstance(source, Ref)
        return source

    @property
    def operand(self) -> TensorType:
        return self.function.values()[self.source.name].type

    @property
    def known(self) -> list[Value]:
        """The values that the line may read: parameters, and what lines before it make."""
        return [*self.function.parameters, *(v for line in self.function.lines[: self.index] for v in line.made)]

    def named(self, change: str) -> str:
        """Return a description of a change of the line."""
        return f"{change} {self.action} {self.function.name}: {self.result.name} = {self.line.op}{self.line.args}"

    def replaced(self, *lines: Line, read: str | None = None) -> Programs:
        """Return the programs with other lines here; ``read`` is the value that later lines read in place of the
        result."""
        old = self.line.results[0].name if self.line.results[0] is not None else ""
        function = reading(self.function, old, old if read is None else read, self.index + 1)
        body = (*function.lines[: self.index], *lines, *function.lines[self.index + 1 :])
        return with_function(self.programs, self.action, replace(function, lines=body))

    def put(self, place: int, item: Any) -> Programs:
        """Return the programs with another argument of the line."""
        return self.replaced(with_argument(self.line, place, item))

    def then(self, op: str, *args: Any, kwargs: Any = (), type_: TensorType | None = None) -> Programs:
        """Return the programs with one more line, whose result later lines read in place of this one's."""
        again = Value(f"{self.result.name}_again", type_ or self.result.type)
        return self.replaced(self.line, Line((again,), op, args, kwargs, self.line.origin), read=again.name)


def sites(programs: Programs, wanted: str | Callable[[Line], bool], *actions: str) -> Iterator[Site]:
    """Yield every wanted line, or every line of an operator: in all programs, or in those of some actions or names."""
    for action, program in programs.items():
        for function in program.functions if not actions or {action, program.action} & set(actions) else ():
            for index, line in enumerate(function.lines):
                if line.op == wanted if isinstance(wanted, str) else wanted(line):
                    yield Site(programs, action, function, index)


@dataclass(frozen=True)
class Row:
    """One return or parameter of a main function."""

    programs: Programs
    name: str
    function: Function
    field: str
    at: int

    @property
    def rows(self) -> tuple[Any, ...]:
        rows: tuple[Any, ...] = getattr(self.function, self.field)
        return rows

    @property
    def key(self) -> Binding:
        return _key(self.rows[self.at])

    @property
    def value(self) -> Value:
        row = self.rows[self.at]
        return row if isinstance(row, Value) else self.function.values()[row[1]]

    def put(self, *others: Any, **more: Any) -> Programs:
        """Return the programs with other rows in place of this one, and other changes of the function."""
        rows = (*self.rows[: self.at], *others, *self.rows[self.at + 1 :])
        return with_function(self.programs, self.name, _changed(self.function, **{self.field: rows}, **more))

    def exchanged(self, other: Row, *rows: Any) -> Programs:
        """Return the programs with two other rows in place of this one and a later one."""
        changed = list(self.rows)
        changed[self.at], changed[other.at] = rows
        return with_function(self.programs, self.name, _changed(self.function, **{self.field: tuple(changed)}))

    def later(self) -> list[Row]:
        """Return the later rows of this kind and type."""
        rows = (replace(self, at=at) for at in range(self.at + 1, len(self.rows)))
        return [row for row in rows if row.key.kind == self.key.kind and row.value.type == self.value.type]


def _changed(function: Function, **changes: Any) -> Function:
    return replace(function, **changes)


def _key(row: Any) -> Binding:
    key: Any = row.binding if isinstance(row, Value) else row[0]
    return key


def rows(programs: Programs) -> Iterator[Row]:
    """Yield all that main functions take and return."""
    for name, program in programs.items():
        for main in program.mains:
            for field in ("parameters", "returns"):
                yield from (Row(programs, name, main, field, at) for at in range(len(getattr(main, field))))


# ---- changes of lines

_ARITHMETIC = frozenset(f"aten.{op}" for op in (
    "mul.Tensor", "add.Tensor", "sub.Tensor", "div.Tensor", "mul.Scalar", "tanh.default", "gelu.default",
    "rsqrt.default",
))  # fmt: skip
_IN_ANY_ORDER = frozenset({"aten.mul.Tensor", "aten.add.Tensor", "aten.maximum.default"})
OTHER_OPERATOR = {
    "aten.silu.default": "aten.gelu.default", "aten.gelu.default": "aten.silu.default", "aten.add.Tensor":
    "aten.sub.Tensor", "aten.mul.Tensor": "aten.div.Tensor", "aten.tanh.default": "aten.sigmoid.default",
    "aten.neg.default": "aten.abs.default", "aten.rsqrt.default": "aten.reciprocal.default",
    "aten.sub.Tensor": "aten.add.Tensor",
}  # fmt: skip
"""Operators that take and give the same types as another, which computes something else."""


def is_collective(line: Line) -> bool:
    """Return whether a line meets other ranks, or only looks where the rank stands."""
    return line.op in COLLECTIVES and line.op != WAIT


def derived(what: str, make: Callable[[], Programs], good: Programs) -> Changes:
    """Yield a change with all later types left as declared, and with all later types derived anew from it."""
    yield what, make
    yield f"{what}, later types to match", lambda: carried(make(), good)


def left_out(site: Site) -> Changes:
    """Leave the line out: later lines read one of its operands, each in turn."""
    known, result = site.function.values(), site.line.results[0]
    for name in dict.fromkeys(site.line.uses):
        if result is None:
            return
        like = known[name].type.shape == result.type.shape and known[name].type.dtype == result.type.dtype
        what = f"read {name} instead of"
        if is_collective(site.line):
            yield from derived(what, partial(site.replaced, read=name), site.programs)
        elif like or site.line.op == WAIT:
            yield what, partial(site.replaced, read=name)


def again(site: Site) -> Changes:
    """Apply the line to its own result, and run it twice for nobody or for later lines."""
    line, others = site.line, [item for item in site.line.args if isinstance(item, Ref)]
    results = (replace(site.result, name=f"{site.result.name}_again"),)
    on_result = replace(line, results=results, args=(Ref(site.result.name), *line.args[1:]))
    anew = replace(line, results=results)

    def read(*lines: Line) -> Callable[[], Programs]:
        return lambda: site.replaced(line, *lines, read=results[0].name)

    if is_collective(line) or facts(line.op).carries:
        yield from derived("on the result of", read(on_result), site.programs)
        yield "for nobody", lambda: site.replaced(line, anew)
    elif line.op == WAIT:
        yield "anew", read(anew)
    elif line.op in _ARITHMETIC:
        yield "on the result of", read(on_result)
        for other in others[1:]:  # the second operand may be the factor
            yield f"{other} once more", read(replace(on_result, args=(Ref(site.result.name), other, *line.args[2:])))
            yield f"{other} twice", read(replace(on_result, args=(other, Ref(site.result.name), *line.args[2:])))


def other_operands(site: Site) -> Changes:
    """Read other values of the same type in the place of each operand: the first two and the last of the function; and
    one that is placed otherwise."""
    known, there = site.function.values(), site.known
    for place, item in enumerate(site.line.args):
        for name in dict.fromkeys(_references(item)):
            type_ = known[name].type
            others = [other.name for other in there if other.name != name and other.type == type_]
            alike = [other for other in there if (other.type.dtype, other.type.shape) == (type_.dtype, type_.shape)]
            elsewhere = [other.name for other in alike if other.type != type_]
            for other in dict.fromkeys([*others[:2], *others[-1:], *elsewhere[:1]]):
                changed = map_references(item, lambda old: Ref(other if old == name else old))  # noqa: B023
                yield f"{other} for {name} in", partial(site.put, place, changed)


def _references(item: Any) -> list[str]:
    found: list[str] = []
    map_references(item, found.append)
    return found


def swapped_operands(site: Site) -> Changes:
    """Let two operands of one type change places."""
    known, args = site.function.values(), list(enumerate(site.line.args))
    for (i, one), (j, other) in combinations([(at, item) for at, item in args if isinstance(item, Ref)], 2):
        if one != other and known[one.name].type == known[other.name].type and site.line.op not in _IN_ANY_ORDER:
            line = with_argument(with_argument(site.line, i, other), j, one)
            yield f"{one} and {other} in", partial(site.replaced, line)


def other_arguments(site: Site) -> Changes:
    """Change a number, a word, axes, or a message's number; leave out an operand that need not be there."""
    line, mesh = site.line, site.programs[site.action].mesh
    for place, item in enumerate(line.args):
        if is_collective(line) and place == 1:
            names = mesh.names
            others: list[Any] = [",".join(g) for n in range(1, len(names) + 1) for g in combinations(names, n)]
            others += [",".join(reversed(names))] * (len(names) > 1)
        else:
            others = list(_near(item)) + [None] * (line.op in RINGS and isinstance(item, Ref))
            others += [1.0] * (line.op in RINGS and item is None)
            if is_collective(line) and isinstance(item, int):
                others += range(max(len(site.operand.shape), 3))
        for other in dict.fromkeys(map(_hashable, others)):
            changed = list(other) if isinstance(other, tuple) else other
            if changed != item and is_collective(line):
                options = (*line.args[1:place], changed, *line.args[place + 1 :])
                yield from other_collective(site, line.op, options)
            elif changed != item and line.op == "aten.stack.default" and place == 0:
                stack = stacked(site.line, changed)
                yield f"{len(changed)} items of", partial(site.replaced, stack)
            elif changed != item:
                yield f"{changed} at {place} of", partial(site.put, place, changed)
    for one, other in combinations(range(1, len(line.args)), 2) if is_collective(line) else ():
        first, second = line.args[one], line.args[other]
        if first != second and type(first) is type(second):
            options = with_argument(with_argument(line, one, second), other, first).args[1:]
            yield from other_collective(site, line.op, options)
    for key, item in line.kwargs:
        for other in (item + 1, item - 1, None) if key == MESSAGE else ():
            if other is None or not _alone(site, item, other):
                kwargs = () if other is None else ((MESSAGE, other),)
                yield (
                    f"message {other} for {item} of",
                    partial(site.replaced, replace(line, kwargs=kwargs)),
                )


def _hashable(item: Any) -> Any:
    return tuple(item) if isinstance(item, list) else item


def _near(item: Any) -> Iterator[Any]:
    """Yield an argument with one of its numbers changed."""
    if isinstance(item, LocalSize):
        yield replace(item, size=item.size + 2 ** len(item.axes))
    elif isinstance(item, bool):
        yield not item
    elif isinstance(item, int):
        yield from (item + 1, item - 1, 2 * item, item // 2)
    elif isinstance(item, float):
        yield from (2 * item, 2 * item + 1, 0.5 * item, item + 0.5)
    elif isinstance(item, str):
        yield "activations" if item == "parameters" else "parameters" if item in _WORDS else f"{item}x"
    elif isinstance(item, list):
        for place, inner in enumerate(item):
            before, behind = item[:place], item[place + 1 :]
            if isinstance(inner, Ref):
                yield from ([*item, inner], [*before, *behind])
            yield from ([*before, changed, *behind] for changed in _near(inner))


_WORDS = ("optimizer", "parameters", "activations")


def _alone(site: Site, number: int, other: int) -> bool:
    """Return whether the change only moves a tensor to a neighbouring message of its kind, or renames a message of its
    own, which is no bug."""
    every = [dict(line.kwargs).get(MESSAGE) for line in site.function.lines]
    messages = [line for line in site.function.lines if dict(line.kwargs).get(MESSAGE) in (number, other)]
    kinds = {(line.op, line.args[1], line.made[0].type.dtype) for line in messages}
    at = messages.index(site.line)
    numbers = [dict(line.kwargs)[MESSAGE] for line in (*messages[:at], *messages[at + 1 :])]
    numbers.insert(at, other)
    last = number == max(found for found in every if found is not None)  # it may be left out, or begin another one
    renamed = len(messages) == 1 and other > number and last
    both = {number, other} if not last or other > number else {min(number, other)}
    return renamed or (len(kinds) == 1 and numbers == sorted(numbers) and set(numbers) >= both)


def other_operators(site: Site) -> Changes:
    """Compute by another operator: a collective of each other kind, or one that takes and gives the same types."""
    line = site.line
    if is_collective(line):
        axes = str(line.args[1]) or site.programs[site.action].mesh.names[-1]
        rank = len(site.operand.shape)
        alias = replace(line, op="aten.alias.default", args=(site.source,), kwargs=())
        yield "pass through", lambda: site.replaced(alias)
        for name in ("all_reduce", "all_gather", "reduce_scatter", "shard", "pad"):
            op, dims = f"parc.{name}", (sorted({0, rank - 1}) if rank else []) if name != "all_reduce" else [None]
            for dim in dims if op != line.op else ():
                yield from other_collective(site, op, (axes,) if dim is None else (axes.split(",")[0], dim, 1))
    others = [OTHER_OPERATOR[line.op]] if line.op in OTHER_OPERATOR else []
    others += [line.op.removesuffix("_int8")] if line.op.endswith("_int8") and is_collective(line) else []
    for op in others:
        yield f"{op} for", partial(site.replaced, replace(line, op=op))
    if line.op in RINGS:
        alone = replace(line, op=RINGS[line.op].attention, args=tuple(RINGS[line.op].inner(line.args)))
        yield "no hop:", lambda: site.replaced(alone)


def other_collective(site: Site, op: str, options: Sequence[Any]) -> Changes:
    """Yield another collective in place of this one: with the type that it makes, or with the type that was there."""
    mesh = site.programs[site.action].mesh
    try:
        type_ = COLLECTIVES[op].result(site.operand, mesh, options)
        type_.local(mesh)
    except (ValueError, KeyError, IndexError, TypeError, ZeroDivisionError):
        type_ = site.result.type
    others = site.line.results[1:] if op == site.line.op else ()  # a ring has several
    line = replace(site.line, results=(replace(site.result, type=type_), *others), op=op, args=(site.source, *options))
    yield from derived(f"{op}{tuple(options)} for", lambda: site.replaced(line), site.programs)


def exchanged_results(site: Site) -> Changes:
    """Exchange the names of two results of one type."""
    made = site.line.made
    for one, other in combinations(made, 2):
        if one.type == other.type:
            swap = {one.name: other, other.name: one}
            results = tuple(value and swap.get(value.name, value) for value in site.line.results)
            yield (
                f"{one.name} and {other.name} of",
                partial(site.replaced, replace(site.line, results=results)),
            )


def exchanged_lines(site: Site) -> Changes:
    """Exchange what two lines of one operator or function compute of, the next of them: all, or one operand; or what
    they make."""
    for at in range(site.index + 1, len(site.function.lines)):
        line, other = site.line, site.function.lines[at]
        if (
            other.op != line.op
            or [v.type for v in other.made] != [v.type for v in line.made]
            or other.args == line.args
        ):
            continue
        whole = {site.index: replace(line, args=other.args), at: replace(other, args=line.args)}
        if facts(line.op).reduces != "squares":  # their sum is the same in any order
            yield "all operands of the next and of", partial(_with, site, whole)
        for place, (one, two) in enumerate(zip(line.args, other.args, strict=False)):
            if line.calls_function and one != two:
                pair = {site.index: with_argument(line, place, two), at: with_argument(other, place, one)}
                yield f"operand {place} of the next and of", partial(_with, site, pair)
        results = {site.index: replace(line, results=other.results), at: replace(other, results=line.results)}
        later = {value.name for value in other.made}
        if line.calls_function and not any(later & set(between.uses) for between in site.function.lines[: at + 1]):
            yield "results of the next and of", partial(_with, site, results)
        return


def _with(site: Site, changed: Mapping[int, Line]) -> Programs:
    body = tuple(changed.get(at, line) for at, line in enumerate(site.function.lines))
    return with_function(site.programs, site.action, replace(site.function, lines=body))


def other_types(site: Site) -> Changes:
    """Take a result for another type: summed or not, split at another dim or in another order, with other counts."""
    mesh = site.programs[site.action].mesh
    for value in site.line.made if site.line.op != WAIT else ():
        for type_ in _types(value.type, site.programs[site.action]):
            results = tuple(v and (replace(v, type=type_) if v is value else v) for v in site.line.results)
            line = replace(site.line, results=results)
            yield f"{value.name} as {type_.text(mesh)} of", partial(site.replaced, line)


def _types(type_: TensorType, program: Program) -> Iterator[TensorType]:
    """Yield types that a value of one type may be taken for."""
    placement, mesh = type_.placement, program.mesh
    for axis, kind in placement.items():
        if isinstance(kind, Split):
            others = [Split(dim) for dim in range(len(type_.shape)) if dim != kind.dim]
            turned = -kind.outer if isinstance(kind.outer, int) and kind.outer < 0 else 1 if kind.outer != 1 else 2
            for other in (*others, Split(kind.dim, turned)):
                moved = replace(type_, placement=placement.replace({axis: other}))
                try:
                    moved.local(mesh)
                    assert nest(type_.shape[other.dim], [(other.outer, mesh.size(axis))])
                except (ValueError, AssertionError):
                    continue
                yield moved
    if type_.dtype.is_floating_point:
        if placement.partial:
            yield replace(type_, placement=placement.replace(dict.fromkeys(placement.partial, "I")))
        for axis in mesh.names:
            if placement[axis] == "I":
                yield replace(type_, placement=placement.replace({axis: "P"}))
    if type_.packed is not None:
        for more in (-1, 1):
            yield replace(type_, packed=(type_.packed[0] + more, type_.packed[1]))


# ---- values on their way

_SHORT = (torch.int8, torch.int32, torch.float32)
_SAME = (  # for small whole numbers
    ("aten.clamp.default", (0, 100)), ("aten.clamp.default", (-1000, 2**31)), ("aten.remainder.Scalar", (127,)),
    ("aten.bitwise_and.Scalar", (127,)), ("aten.abs.default", ()),
)  # fmt: skip
_FAR = (  # for what random data comes to
    ("aten.clamp.default", (-5e4, 5e4)), ("aten.hardtanh.default", (-3e4, 3e4)), ("aten.clip.default", (-5e4, 5e4)),
    ("aten.fmod.Scalar", (5e4,)), ("aten.fake_quantize_per_tensor_affine.default", (1e-9, 0, -(2**60), 2**60)),
)  # fmt: skip
_FAR_BY = (
    ("aten.minimum.default", 5e4), ("aten.fmax.default", -5e4), ("aten.max.other", -5e4), ("aten.fmod.Tensor", 5e4),
    ("aten.clamp_max.Tensor", 5e4), ("aten.logaddexp.default", -5e4),
)  # fmt: skip
_OTHERWISE: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("aten.flip.default", ([0],)), ("aten.logical_not.default", ()),
    ("aten.roll.default", ([1], [0])), ("aten.roll.default", ([1], [1])),
)  # fmt: skip


def changed_values(
    function: Function, value: Value, action: str, mesh: Any
) -> Iterator[tuple[str, Callable[[], Function]]]:
    """Yield makers of a function with a value changed as soon as it is there: a whole number or an activation of
    forward cut off where data does not come to, choices turned around, what a small program makes scaled or rounded."""
    dtype, name = value.type.dtype, value.name
    steps: list[list[tuple[str, tuple[Any, ...], torch.dtype]]] = []
    if dtype is torch.int64 and value.kind != "saved":
        steps += [[(op, args, dtype)] for op, args in _SAME]
        steps += [[("aten._to_copy.default", (), to) for to in (short, dtype)] for short in _SHORT]
    if dtype is torch.int64 and value.kind == "rng":
        steps += [[("aten.flip.default", ([0],), dtype)]]
    if dtype is torch.int64 and action == "F" and len(value.type.shape) == 2:
        steps += [[("aten.flip.default", ([1],), dtype)]]
    if dtype is torch.bool and len(value.type.shape) == 2:
        steps += [[(op, args, dtype)] for op, args in _OTHERWISE]
    if dtype.is_floating_point and action == "F" and value.binding is None:
        steps += [[(op, args, dtype)] for op, args in _FAR]
    if dtype.is_floating_point:
        factors = (2.0,) if action in ("F", "B") else (2.0, 0.999999)
        steps += [[("aten.mul.Scalar", (factor,), dtype)] for factor in factors]
        if value.type.shape == ():
            steps += [[("aten.mul.Scalar", (0.0,), dtype), ("aten.add.Scalar", (1.0,), dtype)]]
    for way in steps:
        yield f"{name} by {[step[:2] for step in way]}", partial(through, function, name, way)
    for op, number in _FAR_BY if dtype.is_floating_point and action == "F" and value.binding is None else ():
        bound = Value(f"{name}_bound", TensorType(dtype, (), Placement.of(mesh, {})))
        made = Line((bound,), "aten.full.default", ([], number), (("dtype", dtype),))
        way = [(op, (Ref(bound.name),), dtype)]
        yield f"{name} by {op} {number}", partial(_beginning, made, through, function, name, way)


def _beginning(line: Line, change: Callable[..., Function], *args: Any) -> Function:
    """Return a changed function with one more line before all others."""
    changed = change(*args)
    return replace(changed, lines=(line, *changed.lines))


# ---- changes of rows


def other_rows(row: Row) -> Changes:
    """Leave a return or parameter out, have it twice or under another name, or return another value of its type."""
    here, value = row.rows[row.at], row.value
    yield "is left out", row.put
    yield "is there twice", lambda: row.put(here, here)
    kinds: tuple[Kind, ...] = ("input", "saved", "parameter", "frozen", "received", "sent")
    keys = [
        Binding(row.key.kind, f"{row.key.name}x"),
        *(Binding(kind, value.name) for kind in kinds[: 2 + 4 * (row.field == "parameters")]),
    ]
    keys += [key for key in _other_keys(row) if key != row.key][:2]
    for key in keys:
        if str(key) != str(row.key):
            other = replace(value, binding=key) if row.field == "parameters" else (key, value.name)
            yield f"is {key}", partial(row.put, other)
    for later in row.later()[:2]:
        theirs = row.rows[later.at]
        if row.field == "returns":
            one, two = (row.key, theirs[1]), (later.key, here[1])
            yield (
                f"is the same as {later.key}",
                partial(row.exchanged, later, one, theirs),
            )
        else:
            one, two = replace(here, binding=theirs.binding), replace(theirs, binding=here.binding)
        yield f"and {later.key} are exchanged", partial(row.exchanged, later, one, two)
        if row.key.kind in ("sent", "received"):
            yield (
                f"and {later.key} change places",
                partial(row.exchanged, later, theirs, here),
            )


def _other_keys(row: Row) -> list[Binding]:
    """Return what other programs return or take under keys of this kind."""
    programs = [program for name, program in row.programs.items() if name != row.name]
    return [key for program in programs for key, _ in program.main.returns if key.kind == row.key.kind]


def other_returns(row: Row) -> Changes:
    """Return other values of the same type: a parameter, and the first and last that lines make; scaled, or summed over
    ranks; and another value too."""
    function, value = row.function, row.value
    alike = [other for other in function.values().values() if other.name != value.name and other.type == value.type]
    taken = [other for other in alike if other in function.parameters]
    for other in dict.fromkeys(o.name for o in (*taken[:3], *alike[:2], *alike[-2:])):
        yield f"is {other}", partial(row.put, (row.key, other))
    kept = {name for _, name in function.returns}
    loose = [other for other in function.values().values() if other.name not in kept and other.binding is None]
    for other_value in loose[:2] + loose[-1:] if row.at == 0 else ():
        more = Binding("saved", other_value.name), other_value.name
        yield f"and {other_value.name} too", partial(row.put, row.rows[0], more)
    if value.type.dtype.is_floating_point:
        mesh = row.programs[row.name].mesh
        among = [("parc.all_reduce_among", ("pp", [0, 1]))] if "pp" in mesh.names else []
        met = [("parc.all_reduce", (axis,)) for axis in (*mesh.names, ",".join(mesh.names))]
        for op, args in (("aten.mul.Scalar", (2.0,)), ("aten.mul.Scalar", (0.0,)), *among, *met):
            line = Line((Value("more", value.type),), op, (Ref(value.name), *args))
            lines = (*function.lines, line)
            yield from derived(f"by {op}{args}", partial(row.put, (row.key, "more"), lines=lines), row.programs)


def other_parameters(row: Row) -> Changes:
    """Take a parameter for another type: in one program, with all that follows from it, or in all programs."""
    value, programs = row.value, row.programs
    others = [*_types(value.type, programs[row.name])]
    if not value.type.dtype.is_floating_point:
        whole = (axis for axis, kind in value.type.placement.items() if kind == "I")
        others += [replace(value.type, placement=value.type.placement.replace({axis: "P"})) for axis in whole]
    others += [replace(value.type, dtype=torch.float32 if value.type.dtype is torch.float64 else torch.float64)]
    if value.type.shape:
        others += [replace(value.type, shape=(2 * value.type.shape[0], *value.type.shape[1:]))]
        others += [replace(value.type, placement=Placement.whole(programs[row.name].mesh))]
    for type_ in others:
        if type_ != value.type:
            what = f"as {type_.text(programs[row.name].mesh)}"
            make = partial(row.put, replace(value, type=type_))
            yield from derived(what, make, programs)
            if row.key.kind in ("parameter", "input"):
                yield f"{what} in all programs", partial(taken_as, programs, value.binding, type_)


def taken_as(programs: Programs, binding: Binding | None, type_: TensorType) -> Programs:
    """Return programs that all take a value as another type, with the types that follow from it."""
    changed = programs
    for action, program in programs.items():
        known = program.main.parameters
        parameters = tuple(replace(v, type=type_) if v.binding == binding else v for v in known)
        changed = with_main(changed, action, parameters=parameters)
    return carried(changed, programs)


LINES: Mapping[str, Callable[[Site], Changes]] = {
    "leave out": left_out, "run again": again, "read another value": other_operands, "swap operands": swapped_operands,
    "change an argument": other_arguments, "take another operator": other_operators,
    "exchange results": exchanged_results, "exchange lines": exchanged_lines, "retype": other_types,
}  # fmt: skip
ROWS: Mapping[str, tuple[str, Callable[[Row], Changes]]] = {
    "have a row otherwise": ("parameters returns", other_rows), "return another value": ("returns", other_returns),
    "take for another type": ("parameters", other_parameters),
}  # fmt: skip


def subject(line: Line) -> str:
    """Return what a line is to a table: an await, a collective, a call, or an operator."""
    if line.op == WAIT:
        return "await"
    return "collective" if is_collective(line) else "call" if line.calls_function else "line"


def _in_place(programs: Programs, action: str, change: Callable[[], Function]) -> Programs:
    return with_function(programs, action, change())


def mutants(
    programs: Programs, where: Callable[[str, Function], bool] = lambda name, function: True
) -> Iterator[Mutant]:
    """Yield all mutants of programs; the place of each is its action with an operator, or with a kind of rows. Lines
    and values are changed in the functions that ``where`` chooses, by the names of programs."""
    for site in sites(programs, lambda line: bool(line.made)):
        for name, change in LINES.items():
            for what, make in change(site) if where(site.action, site.function) else ():
                place = f"{site.action} {site.line.op if not site.line.calls_function else 'a call'}"
                yield Mutant(f"{name}: {subject(site.line)}", place, site.named(what), make)
    for action, program in programs.items():
        for function in program.functions:
            for value in function.values().values() if where(action, function) else ():
                for what, change_value in changed_values(function, value, program.action, program.mesh):
                    make = partial(_in_place, programs, action, change_value)
                    kind = "scale a value" if "mul.Scalar" in what else "change a value on its way"
                    yield Mutant(kind, f"{action} {what.split(' by ')[1]}", f"{action} {what}", make)
    for row in rows(programs):
        for name, (fields, change_row) in ROWS.items():
            for what, make in change_row(row) if row.field in fields.split() else ():
                named = f"{row.name} {row.function.name} {row.field}: {row.key} {what}"
                yield Mutant(name, f"{row.name} {row.field} {row.key.kind}", named, make)
