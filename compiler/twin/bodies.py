"""Bodies of functions without names and numbers, and these numbers apart, so that two sizes of a model can be compared.

A function may read a value of every layer, such as the logits of all routers. A family is such values, one of each
layer, and the function's lines repeat once for each member. If each repetition from the third on is the one before it,
one member further, then the first two stand for all: the short form, the same for any number of layers.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, TypeVar

import torch

from ..layout.collectives import COLLECTIVES, MESSAGE, local_outer
from ..layout.mesh import Mesh
from ..layout.packed_rows import EXCHANGE
from ..ops.precision import base_name
from ..program.program import Function, Line, LocalSize, Ref, Value, default_numbers, operator, remembered

# ---- the short form


FamilySlots = tuple[tuple[int, int], ...]
"""The place of each operand or result in the short form, where a family has one place, and its number in its family."""
_REPEATED = slice(None), slice(1, None), slice(-1)
"""The members of a family that repetitions may read: the first or the last may stand alone, as a sum that starts with
its first term has one addition less."""


@dataclass(frozen=True, slots=True)
class ShortForm:
    """Lines of which the first two repetitions are left. A family of operands is its first member there, a family of
    results the value of the first repetition."""

    lines: tuple[Line, ...]
    operands: FamilySlots
    results: FamilySlots
    returned: tuple[str, ...]
    """The value of each result that is left."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names in the short form: of values that are left out, and of the last repetition's, which the second stands
    for."""
    families: tuple[tuple[str, ...], ...] = ()
    """The families of operands that repetitions read, and those of results."""
    order: str = ""
    """The order in which repetitions read their families and give their results; "" where nothing repeats."""


def short_form(function: Function, families: Sequence[Sequence[str]]) -> ShortForm:
    """Return the short form of a function for families of its operands, all of one size and in the order of layers; all
    of its lines where they do not repeat."""
    lines = function.lines
    uses = {name: [at for at, line in enumerate(lines) if name in line.uses] for of in families for name in of}
    for of in ([family[part] for family in families] for part in _REPEATED if families and all(uses.values())):
        firsts = [uses[name][0] for name in of[0]]
        steps = {later - before for before, later in pairwise(firsts)}
        step = steps.pop() if len(steps) == 1 else 0
        for begin in range(min(firsts), max(min(firsts) - abs(step), -1), -1):
            repeats = _Repeats(lines, begin, step, of)
            if repeats.hold(uses) and (short := repeats.short_form(function)) is not None:
                return short
    operands, results = (tuple((at, 0) for at, _ in enumerate(of)) for of in (function.parameters, function.returns))
    return ShortForm(lines, operands, results, tuple(name for _, name in function.returns))


class _Repeats:
    """Lines from ``begin`` on that may repeat once for each member of the families: the repetition of a member begins
    ``step`` lines after that of the member before. The last member comes first where ``step`` is negative."""

    def __init__(self, lines: Sequence[Line], begin: int, step: int, families: Sequence[Sequence[str]]) -> None:
        self.lines, self.begin, self.period, self.families = lines, begin, abs(step), families
        self.count = len(families[0])
        self.end = begin + self.count * self.period
        self.members = {name: (of[0], number) for of in families for number, name in enumerate(of)}
        self.order = "down" if step < 0 else "up"
        self.turns: dict[str, tuple[int, Hashable]] = {
            name: (number if step > 0 else self.count - 1 - number, head)
            for name, (head, number) in self.members.items()
        }
        """The repetition that reads a member of a family, with the family; and the one that makes a value, with the
        value's place in it."""
        for index, line in enumerate(lines[begin : self.end]):
            self.turns |= {value.name: (index // self.period, (index % self.period, at))
                           for at, value in enumerate(line.results) if value is not None}  # fmt: skip
        self.named = {turn: name for name, turn in self.turns.items()}

    def hold(self, uses: Mapping[str, Sequence[int]]) -> bool:
        """Return whether each repetition reads its own members alone, each from the third on is as the one before it,
        and lines after all of them read values of the first and the last alone."""
        reads = ((name, at) for name in self.members for at in uses[name])
        if self.end > len(self.lines) or any((at - self.begin) // self.period != self.turns[n][0] for n, at in reads):
            return False
        ends = all(self._at_an_end(name) for line in self.lines[self.end :] for name in line.uses)
        earlier = {name: self.named.get((turn - 1, place), "") for name, (turn, place) in self.turns.items()}
        return ends and all(
            _shifted(self.lines[at], earlier) == self.lines[at - self.period]
            for at in range(self.begin + 2 * self.period, self.end)
        )

    def _at_an_end(self, name: str) -> bool:
        """Return whether a value is not of a repetition between the first and the last."""
        return name not in self.turns or (name not in self.members and self.turns[name][0] in (0, self.count - 1))

    def short_form(self, function: Function) -> ShortForm | None:
        """Return the short form; None where a result that is no family is of a repetition between the first and the
        last."""
        last = {name: self.named[1, place] for name, (turn, place) in self.turns.items()
                if turn == self.count - 1 and name not in self.members}  # fmt: skip
        heads = {name: head for name, (head, _) in self.members.items()}
        families, orders = [*map(tuple, self.families)], [self.order]
        places, returned = list[tuple[int, int]](), list[str]()
        for _, same in groupby((name for _, name in function.returns), lambda name: self.turns.get(name, (0, name))[1]):
            names = tuple(same)
            turns = [self.turns[name][0] for name in names if name in self.turns]
            if turns in ([*range(self.count)], [*reversed(range(self.count))]):
                places += [(len(returned), number) for number in range(self.count)]
                orders.append(f"{len(returned)} {'up' if turns[0] == 0 else 'down'}")
                returned.append(heads.get(names[turns[0]], names[turns[0]]))
                families.append(names)
            elif all(map(self._at_an_end, names)):
                places += [(len(returned) + number, 0) for number in range(len(names))]
                returned += [last.get(name, name) for name in names]
            else:
                return None
        left = [*self.lines[: self.begin + 2 * self.period], *(line.renamed(last) for line in self.lines[self.end :])]
        hidden = {name: f"{place} of repetition {turn}" for name, (turn, place) in self.turns.items()
                  if heads.get(name) != name and (name in heads or 0 < turn < self.count - 1)}  # fmt: skip
        operands = [value.name for value in function.parameters]
        kept = {name: slot for slot, name in enumerate(name for name in operands if heads.get(name, name) == name)}
        slots = (self.members.get(name, (name, 0)) for name in operands)
        return ShortForm(
            tuple(line.renamed(heads) for line in left), tuple((kept[head], number) for head, number in slots),
            tuple(places), tuple(returned), {**hidden, **last}, tuple(families), ", ".join(orders),
        )  # fmt: skip


def _shifted(line: Line, names: Mapping[str, str]) -> Line:
    """Return the line with other names for what it reads and makes."""
    results = tuple(value and replace(value, name=names[value.name]) for value in line.results)
    return replace(line.renamed(names), results=results)


# ---- bodies


_K = TypeVar("_K")
Scalar = int | float
NumberPair = tuple[Scalar, Scalar]
"""A number of the build, and the one in its place in the twin."""

_SIZE = re.compile(r"(?<![A-Za-z_\d])\d+")
_DIMS = ("dim", "dims", "dim0", "dim1", "dim2", "axis")
_LITERAL = 4
"""The largest number that a derivative may have in both builds though the model does not have it, such as 2."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of one line by their place in it, and the sizes of all dims of its operands and results."""

    op: str
    origin: str
    written: tuple[tuple[str, Scalar, bool], ...]
    """Triples of an argument, a number in it, and whether the number may be a size."""
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Body:
    """Lines in the form that they have at all sizes and in every repetition, with their numbers apart."""

    rows: tuple[str, ...]
    numbers: tuple[Numbers, ...]
    names: Mapping[str, str]
    """The name of each value in the rows."""
    form: ShortForm
    """The lines, with the places of operands and results in the rows."""


def function_body(
    function: Function, mesh: Mesh, names: Mapping[str, str] | None = None, families: Sequence[Sequence[str]] = ()
) -> Body:
    """Return a function's body. Parameters have the ``names``, or are numbered; a family in ``families`` is parameters,
    one of each layer, of which the twin may have fewer."""
    return _body(function, mesh, tuple((names or {}).items()), tuple(map(tuple, families)))


@remembered
def _body(
    function: Function, mesh: Mesh, named: tuple[tuple[str, str], ...], families: tuple[tuple[str, ...], ...]
) -> Body:
    names = dict(named)
    form, values = short_form(function, families), function.values()
    slots = zip(function.parameters, form.operands, strict=True)
    kept = [value.name for value, (_, number) in slots if number == 0]
    known = {name: names.get(name, f"x{slot}") for slot, name in enumerate(kept)}
    rows = [*([form.order] if form.order else []), *(f"{known[name]}: {sizeless(values[name], mesh)}" for name in kept)]
    numbers = []
    for index, line in enumerate(form.lines):
        known.update((result.name, f"{index}.{at}") for at, result in enumerate(line.results) if result is not None)
        written: list[tuple[str, Scalar, bool]] = []
        kinds = _argument_kinds(line.op)
        arguments = [(str(at), "", item) for at, item in enumerate(line.args)]
        # the message that a sum travels in is no number
        arguments += [(key, f"{key}=", item) for key, item in line.kwargs if key != MESSAGE]
        args = [label + _argument_text(item, known, written, *kinds.get(place, (place, "")))
                for place, label, item in arguments]  # fmt: skip
        types = "; ".join("-" if v is None else sizeless(v, mesh) for v in line.results)
        rows.append(f"{line.op}({', '.join(args)}): {types}")
        beside = (*(values[name] for name in line.uses), *line.made)
        origin = f"{star(line.origin.module)} {line.origin.source}"
        dims = (*(size for v in beside for size in v.type.shape), *_split_places(line, beside, mesh))
        numbers.append(Numbers(line.op, origin, tuple(written), dims))
    end = f"return {', '.join(known[name] for name in form.returned)}"
    known |= {name: known.get(other, other) for name, other in form.names.items()}
    return Body((*rows, end), tuple(numbers), known, form)


def _split_places(line: Line, read: Iterable[Value], mesh: Mesh) -> Iterator[int]:
    """Yield the places of splits in the dims of an exchange's operand and result, as a rank counts them. Types hold
    them too, and ``verify.lines`` proves that both agree."""
    if line.op in (EXCHANGE, "parc.all_to_all"):
        placements = [value.type.placement for value in read]
        places = (local_outer(one, mesh, axis) for one in placements for axis in one.split_axes())
        yield from (place for place in places if isinstance(place, int))


def star(text: str) -> str:
    """Return a name with a star for each number."""
    return re.sub(r"\d+", "*", text)


def sizeless(value: Value, mesh: Mesh) -> str:
    """Return a value's type without its sizes."""
    return _SIZE.sub("#", value.type.text(mesh))


@lru_cache(maxsize=1024)
def _argument_kinds(op: str) -> dict[str, tuple[str, str]]:
    """Return each argument's name and kind, by its position and by its name. The kind is ``size``, ``dim`` for a dim's
    index (which follows no size), or "" for a value to compute with."""
    if op in (EXCHANGE, "parc.all_to_all"):  # rows are split between experts, of which a twin may have fewer
        return {str(at): (str(at), kind) for at, kind in enumerate(("", "", "dim", "size", "dim", "size"))}
    if op in COLLECTIVES or "." not in op:
        return {str(at): (str(at), "dim") for at in range(4)}
    arguments = {}
    for at, argument in enumerate(operator(op)._schema.arguments):
        whole = "int" in str(argument.type).lower() and argument.name != "index"
        kind = "dim" if argument.name in _DIMS else "size" if whole else ""
        arguments[str(at)] = arguments[argument.name] = argument.name, kind
    return arguments


def _argument_text(
    item: Any, names: Mapping[str, str], written: list[tuple[str, Scalar, bool]], place: str, kind: str
) -> str:
    """Return an argument without its numbers, which are added to ``written``."""
    if isinstance(item, Ref):
        return names[item.name]
    if isinstance(item, LocalSize):
        written.append((place, item.size, True))
        return "/".join(["#", *item.axes])
    if isinstance(item, (list, tuple)):
        return f"[{', '.join(_argument_text(inner, names, written, place, kind) for inner in item)}]"
    if isinstance(item, (bool, str, torch.dtype)) or item is None or kind == "dim":
        return repr(item)
    written.append((place, item, kind == "size"))
    return "#" if isinstance(item, int) else "#.#"


@dataclass(frozen=True)
class Pairs:
    """The numbers of two equal bodies in pairs, a build's and its twin's."""

    written: tuple[tuple[str, str, NumberPair], ...] = ()
    """The operator, the argument and the pair for each number that is not the size of a dim of its own line."""
    at: Mapping[str, Set[NumberPair]] = field(default_factory=dict)
    """The pairs by their place in the model's code."""
    every: Set[NumberPair] = frozenset()
    """All of these, and the sizes of dims."""
    arguments: Mapping[tuple[str, str, str], Set[NumberPair]] = field(default_factory=dict)
    """The pairs by operator, origin and argument; an argument that is left out has its default."""

    @classmethod
    def of(cls, ours: Sequence[Numbers], theirs: Sequence[Numbers]) -> Pairs:
        """Return the pairs of two equal bodies."""
        written, sizes = [], set[NumberPair]()
        at: dict[str, set[NumberPair]] = defaultdict(set)
        arguments: dict[tuple[str, str, str], set[NumberPair]] = defaultdict(set)
        for mine, other in zip(ours, theirs, strict=True):
            dims = set(zip(mine.dims, other.dims, strict=True))
            sizes |= dims
            present = {place for place, _, _ in mine.written}
            for place, default in default_numbers(mine.op).items():
                if place not in present:
                    arguments[base_name(mine.op), mine.origin, place].add((default, default))
            for (place, here, size), (_, there, _) in zip(mine.written, other.written, strict=True):
                at[mine.origin].add((here, there))
                arguments[base_name(mine.op), mine.origin, place].add((here, there))
                if not size or (here, there) not in dims:
                    written.append((mine.op, place, (here, there)))
        return cls(tuple(written), at, sizes.union(*at.values()), arguments)

    def __or__(self, other: Pairs) -> Pairs:
        """Return both together; ``written`` is the first's."""
        at, arguments = _union(self.at, other.at), _union(self.arguments, other.arguments)
        return Pairs(self.written, at, self.every | other.every, arguments)

    def forward(self, numbers: Numbers, argument: str) -> Set[NumberPair]:
        """Return the pairs that the forward operator of a derivative's line has for an argument, such as an attention's
        ``scale``; empty for other lines."""
        name = base_name(numbers.op)
        operator_name = name.removesuffix("_backward")
        key = (operator_name, numbers.origin, argument)
        return frozenset() if name == operator_name else self.arguments.get(key, frozenset())


def _union(one: Mapping[_K, Set[NumberPair]], other: Mapping[_K, Set[NumberPair]]) -> dict[_K, Set[NumberPair]]:
    return {key: one.get(key, frozenset()) | other.get(key, frozenset()) for key in {**one, **other}}


def number_problem(ours: Sequence[Numbers], theirs: Sequence[Numbers], model: Pairs, *, whole: bool) -> str | None:
    """Return the fault in the numbers of two equal functions, a build's and its twin's, or None if there is none.

    A number is the size of a dim of its own line in both, or one that the model has in that place of its code, or
    follows from such. A function that is the ``whole`` of a piece of the model has all numbers of the ``model`` in the
    operators that both have.
    """
    pairs = []
    for mine, other in zip(ours, theirs, strict=True):
        dims, near = {*zip(mine.dims, other.dims, strict=True)}, model.at.get(mine.origin, frozenset())
        for (place, here, size), (_, there, _) in zip(mine.written, other.written, strict=True):
            pair = here, there
            pairs.append((mine.op, place, pair))
            if not size and (forward := model.forward(mine, place)) and pair not in forward:
                return f"{mine.op} has {here!r} where its twin has {there!r}: the operator itself has no such {place}"
            sizes: Set[NumberPair] = dims if size else frozenset()
            if pair not in sizes and not _follows(pair, near, model.every, sizes):
                return f"{mine.op} has {here!r} where its twin has {there!r}: the model has no such number there"
    have, ops, places = Counter(pairs), {numbers.op for numbers in ours}, {(op, place) for op, place, _ in pairs}
    for (op, place, pair), count in Counter(model.written).items() if whole else ():
        default = pair[0] == pair[1] and (op, place) not in places  # left out by both
        if op in ops and not default and have[op, place, pair] < count:
            return f"{op} has another number than the model's {pair[0]!r}"
    return None


def _follows(pair: NumberPair, near: Set[NumberPair], model: Set[NumberPair], sizes: Set[NumberPair]) -> bool:
    """Return whether a pair of numbers is ``near`` in the model's code, is computed from such a pair or from ``sizes``,
    or is one number that does not depend on the size of the model."""
    here, there = pair
    if pair in near:
        return True
    if here == there and not any(b == there for _, b in near):
        return abs(here) <= _LITERAL or pair in model or not any(b == there for _, b in model)
    if any(_close(form(a), here) and _close(form(b), there) for a, b in near or model for form in _FORMS):
        return True
    if any((here + a, there + b) in sizes for a, b in sizes):  # the last part of a dim begins there
        return True
    if any(a != b and here == here // a * a and (here // a) * b == there for a, b in sizes if a):
        return True  # one of the equal parts of a dim begins there
    whole = [p for p in sizes | near if sizes and 0 < p[0] <= abs(here)]
    return any(pair in ((a + c, b + d), (a * c, b * d)) for a, b in whole for c, d in whole)


_FORMS: Sequence[Callable[[Scalar], Scalar]] = (
    lambda x: -x,
    lambda x: 1 - x,
    lambda x: 1 / x if x else math.nan,
    lambda x: 1 / (1 - x) if x != 1 else math.nan,
    lambda x: math.sqrt(x) if x > 0 else math.nan,
    lambda x: 1 / math.sqrt(x) if x > 0 else math.nan,
)
"""The forms that a derivative, or an operator's decomposition, may give to a number of the model."""


def _close(x: Scalar, y: Scalar) -> bool:
    return x == y or (isinstance(y, float) and math.isclose(x, y, rel_tol=1e-12))
