"""The meaning of programs: their functions, line by line, and the gradients of the model's."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from . import attention, layers, padding, pools, reductions, routing, views  # noqa: F401  they enter their rows
from .alike import Alike, frozen
from .meaning import Table, Value
from .own import OwnRow
from .rows import CONSTANT, ROWS, SLOPES, Call, Row, Slope
from .suspects import Suspects
from .tensors import Tensors
from .text import NO_TYPE, Function, Line, Local, Malformed, Mesh, Name, Program, Refused, Type, Word

Values = dict[str, Value]
MESSAGES = (
    "parc.all_reduce", "parc.all_gather", "parc.reduce_scatter", "parc.all_to_all", "parc.exchange",
    "parc.reduce_scatter_int8", "parc.all_gather_int8",
)  # fmt: skip
"""The collectives that may run while other lines do."""
UNREADABLE = ArithmeticError, AttributeError, LookupError, TypeError, ValueError
"""The errors of rows that read arguments which no program gives them."""
Settle = Callable[[str, Value], Value]


class Returned(NamedTuple):
    """The values that a function returns, by key, and the keys of values that are on their way."""

    values: dict[str, Value]
    coming: frozenset[str] = frozenset()
    kinds: Mapping[str, int] = {}
    """The kinds of their numbers."""


class Messages:
    """The collectives of a function that run while other lines do: a message is some lines with one number, each begun
    in its turn, and its results are read by ``parc.wait`` alone."""

    def __init__(self, coming: Iterable[str]) -> None:
        self.coming, self.awaited = set(coming), set[str]()
        self._last: tuple[int, Any] = (0, None)
        self._begun = set[str]()

    def read(self, line: Line) -> None:
        """Take the next line.

        Raises:
            Malformed: it reads what is on its way, awaits what is not, or begins a message out of turn.
        """
        wait = line.op == "parc.wait"
        for name in names_in([*line.args, *line.kwargs.values()]):
            if wait and name not in self.coming:
                raise Malformed(f"`{name}` is awaited, and is not on its way")
            if not wait and name in self.coming:
                raise Malformed(f"`{name}` is read while it is on its way")
            self.awaited.update([name] if wait else [])
        number = line.kwargs.get("message")
        if number is None:
            self._last = self._last[0], None
            return
        same = line.op, line.args[1:2], line.types[0].dtype
        if line.op not in MESSAGES or number not in (self._last[0], self._last[0] + 1):
            raise Malformed(f"is in message {number} behind message {self._last[0]}")
        if number == self._last[0] and self._last[1] != same:
            raise Malformed(f"does not travel like the rest of message {number}")
        self._last = number, same
        self.coming.update(line.results)
        self._begun.update(line.results)

    def left(self, returns: Sequence[tuple[str, str]]) -> Iterator[str]:
        """Yield the keys of results that are on their way at the end.

        Raises:
            Refused: what a line began is neither awaited nor returned.
        """
        yield from (key for key, name in returns if name in self.coming)
        returned = {name for _, name in returns}
        if lost := sorted(self._begun - self.awaited - returned):
            raise Malformed(f"`{lost[0]}` is never awaited")


# ---- kinds of numbers: truth values, whole numbers and others. Rows read them in types, so no type may lie about them.

_KINDS = {"bool": 0, "u8": 1, "i8": 1, "i16": 1, "i32": 1, "i64": 1}
_COMPARING = re.compile(r"aten\.(ne|eq|lt|le|gt|ge|logical_\w+|is(nan|inf|finite|posinf|neginf)|signbit|any|all)\.")
_FINDING = re.compile(
    r"(aten\.(argsort|argmax|argmin|bincount|bucketize|searchsorted|count_nonzero)|parc\.(stream_key|slots))\."
)
_FINDING_TOO = re.compile(
    r"aten\.(topk|sort|(max|min|median)\.dim|kthvalue|mode|cum(max|min)|(adaptive_)?max_pool\dd)|parc\.next_loss_scale"
)
"""Operators that return entries, and whole numbers beside them."""
_CHOOSING = re.compile(r"(aten\.(gather|index|index_select|embedding|scatter\w*|masked_fill|index_\w+)|parc\.lookup)\.")
"""Operators of whose operands the second, or the third, says which entries."""
_COUNTING = re.compile(r"aten\.(sum|mean|cumsum|div|histc|softmax|_softmax)\.|\.Scalar")
"""Operators that make numbers of truth values."""


def kind_of(type_: Type) -> int:
    """Return 0 for truth values, 1 for whole numbers, 2 for others."""
    return _KINDS.get(type_.dtype, 2)


def _demand_kinds(line: Line, types: Mapping[str, Type]) -> None:
    """Refuse results of another kind than an operator makes of its operands.

    Raises:
        Malformed: a type lies.
    """
    reads = line.args
    if ".where." in line.op:
        reads = reads[1:]
    elif _CHOOSING.match(line.op):
        reads = (*reads[:1], *reads[3:])
    most = max((kind_of(types[name]) for name in names_in(reads) if name in types), default=-1)
    words = [item.text for item in (*line.args, *line.kwargs.values()) if type(item) is Word]
    for at, type_ in enumerate(line.types):
        kind = kind_of(type_)
        if type_ is NO_TYPE:
            continue
        if words:
            fits = kind == (0 if words[-1] == "torch.bool" else 1 if "int" in words[-1] else 2)
        elif _COMPARING.match(line.op):
            fits = kind == 0
        elif _FINDING.match(line.op) or (at and _FINDING_TOO.match(line.op)):
            fits = kind == 1
        elif most == 0 and not _COUNTING.search(line.op):
            scaled = line.op.startswith(("aten.add.", "aten.sub.", "aten.mul."))
            fits = kind == 0 or (scaled and type(line.args[-1]) in (int, float))
        else:
            fits = kind >= most
        if not fits:
            raise Malformed(f"{line.op} makes no {type_.dtype} of its operands")


class Reader:
    """The reading of programs into one table."""

    def __init__(self, table: Table, mesh: Mesh, own: Mapping[str, OwnRow] = {}) -> None:
        self.own = own
        """The rows of operators of one's own."""
        self.table, self.tensors, self.alike = table, Tensors(table, mesh), Alike(table)
        self._texts: dict[tuple[str, str], int] = {}
        self._numbers: dict[Hashable, int] = {}
        self.of_model = 0
        """The number of meanings that the model has."""
        self.meant: list[Value] = []
        """The values that the model's lines make, and their gradients."""
        self.suspects: Suspects | None = None
        """The lines to look at first, where a build is read for them."""

    def divide(self, axis: str, sizes: tuple[int, ...]) -> None:
        """Count the ranks of an axis by several letters, and forget what was read with one."""
        self.table.divide(axis, sizes)
        self.alike.forget()
        if self.suspects is not None:
            self.suspects = Suspects(self.tensors, self.of_model, self.meant)

    def call(self, line: Line, values: Values, types: Mapping[str, Type]) -> Call:
        """Return a line with the values of what it reads."""
        operands: dict[int | tuple[int, int], Type] = {}

        def resolved(item: Any) -> Any:
            if type(item) is Name:
                if (value := values.get(item.name)) is None:
                    raise Malformed(f"`{item.name}` is read before it is made")
                return value
            if type(item) is Local:
                size = item.size
                for axis in item.axes:
                    for part in self.tensors.mesh.parts(axis):
                        size //= self.table.mesh[part]
                return size
            return [resolved(each) for each in item] if type(item) is list else item

        for at, item in enumerate(line.args):
            if type(item) is Name and item.name in types:
                operands[at] = types[item.name]
            for inner, each in enumerate(item if type(item) is list else ()):
                if type(each) is Name and each.name in types:
                    operands[at, inner] = types[each.name]
        args = tuple(map(resolved, line.args))
        kwargs = {key: resolved(item) for key, item in line.kwargs.items() if key != "message"}
        return Call(self.tensors, line, args, operands, kwargs)

    def line(self, line: Line, values: Values, types: Mapping[str, Type]) -> tuple[Call, Sequence[Value]]:
        """Return a line with its operands, and what its operator makes.

        Raises:
            Refused: it has no row, or its results have other shapes than the line says.
        """
        registered = self.own.get(line.op)
        function = registered.row if registered is not None else ROWS.get(line.op)
        if function is None:
            raise Refused(f"no rule for `{line.op}`")
        call = self.call(line, values, types)
        return call, self.alike.results(self._what(call, call.kwargs), call.args, lambda: self._meant(function, call))

    def _what(self, call: Call, kwargs: Mapping[str, Any]) -> Hashable:
        """Return all that a call's results depend on but its operands. Equal types of programs are one object."""
        return call.line.op, *map(id, (*call.types.values(), *call.line.types)), frozen(list(kwargs.items()))

    def _meant(self, function: Row, call: Call) -> Sequence[Value]:
        """Return what a row makes of a call."""
        meant = function(call)
        results = (meant,) if isinstance(meant, Value) else meant
        if call.kwargs:
            raise Refused(f"{call.line.op} with `{next(iter(call.kwargs))}` has no rule")
        types = call.line.types
        if any(type_.packed for type_ in types):
            return [self._packed(call, type_, value) for type_, value in zip(types, results, strict=True)]
        return results

    def _packed(self, call: Call, type_: Type, value: Value) -> Value:
        """Return a result with the mark of which rows are present, which those of its operands have too."""
        if not type_.packed or value.chosen is not None:
            return value
        marks = [item.chosen for item in _values(call.args) if item.chosen is not None]
        if not marks or any(not self.tensors.canonical(mark, marks[0]) for mark in marks[1:]):
            raise Refused(f"{call.line.op} makes packed rows of values that have not the same rows")
        return value._replace(chosen=marks[0])

    def run(
        self, program: Program, function: Function, operands: Sequence[Value], coming: Collection[str] = ()
    ) -> Returned:
        """Return what a function returns. The parameters bound to ``coming`` are on their way when it begins."""
        steps = self.steps(program, function, operands, coming)
        try:
            (axis, _), _ = next(steps)
        except StopIteration as end:
            returned: Returned = end.value
            return returned
        raise Refused(f"{program.file}: {function.name} sums over the roles of `{axis}`, which programs of work do not")

    def steps(
        self,
        program: Program,
        function: Function,
        operands: Sequence[Value],
        coming: Collection[str] = (),
        settle: Settle = lambda name, value: value,
    ) -> Generator[tuple[tuple[str, tuple[int, ...]], Value], Value, Returned]:
        """Run a function, which stops at sums among roles: what it yields there is to be answered by the sum.
        ``settle`` may put another value in the place of one that it has checked."""
        if len(operands) != len(function.parameters):
            raise Malformed(f"{program.file}:{function.row}: `{function.name}` takes {len(function.parameters)} values")
        values: Values = {}
        types: dict[str, Type] = {}
        messages = Messages(parameter.name for parameter in function.parameters if parameter.binding in coming)
        for parameter, value in zip(function.parameters, operands, strict=True):
            self._check(parameter.type, value, f"{program.file}:{parameter.row}", parameter.name)
            values[parameter.name], types[parameter.name] = settle(parameter.name, value), parameter.type
        for line in function.lines:
            where = f"{program.file}:{line.row}"
            try:
                messages.read(line)
                called = program.functions.get(line.op)
                if called is not None:
                    self._demand_call(called, line, types)
                    results = self._called(program, called, line, self.call(line, values, types).args)
                elif line.op == "parc.all_reduce_among":
                    operand, axis, ranks = line.args
                    results = ((yield (axis, tuple(ranks)), values[operand.name]),)
                else:
                    _demand_kinds(line, types)
                    _, results = self.line(line, values, types)
            except Refused as error:
                raise error if ".py:" in str(error) else type(error)(f"{where}: {error} ({line.origin})") from None
            except UNREADABLE as error:
                raise Refused(f"{where}: `{line.op}` is not called so ({type(error).__name__}: {error})") from None
            if len(results) != len(line.results):
                raise Malformed(f"{where}: `{line.op}` makes {len(results)} values, not {len(line.results)}")
            for name, type_, value in zip(line.results, line.types, results, strict=True):
                if name != "_":
                    self._check(type_, value, where, name)
                    values[name], types[name] = settle(name, value), type_
            if self.suspects is not None:
                named = [(v, t) for name, t, v in zip(line.results, line.types, results, strict=True) if name != "_"]
                operands = [values[name] for name in names_in(line.args)]
                place = f"{where}: `{', '.join(line.results)}` = {line.op} ({line.origin})"
                self.suspects.line(place, operands, named, called is not None)
        returned = {key: values[name] for key, name in function.returns}
        try:
            kinds = {key: kind_of(types[name]) for key, name in function.returns}
            return Returned(returned, frozenset(messages.left(function.returns)), kinds)
        except Refused as error:
            raise type(error)(f"{program.file}: {error}") from None

    def _called(self, program: Program, called: Function, line: Line, operands: tuple[Any, ...]) -> Sequence[Value]:
        """Return what a function that a line calls returns."""

        def compute() -> Sequence[Value]:
            back = self.run(program, called, operands)
            if back.coming:
                raise Malformed(f"`{line.op}` returns `{min(back.coming)}` while it is on its way")
            kinds = zip(line.types, back.kinds.values(), strict=False)
            if any(type_ is not NO_TYPE and kind_of(type_) != kind for type_, kind in kinds):
                raise Malformed(f"`{line.op}` returns numbers of another kind")
            return list(back.values.values())

        return self.alike.results((self._text(program, called), *map(id, line.types)), operands, compute)

    def _text(self, program: Program, function: Function) -> int:
        """Return a number that functions of the same parameters and lines have, with the functions that they call."""
        key = program.file, function.name
        known = self._texts.get(key)
        if known is None:
            lines = [
                (
                    self._text(program, program.functions[line.op]) if line.op in program.functions else line.op,
                    line.results,
                    line.types,
                    frozen(line.args),
                    frozen(list(line.kwargs.items())),
                )
                for line in function.lines
            ]
            text = tuple(parameter[:2] for parameter in function.parameters), tuple(lines), function.returns
            known = self._texts[key] = self._numbers.setdefault(text, len(self._numbers))
        return known

    def _demand_call(self, called: Function, line: Line, types: Mapping[str, Type]) -> None:
        """Refuse operands of another kind than a function says that they are."""
        for parameter, item in zip(called.parameters, line.args, strict=False):
            if type(item) is Name and item.name in types and kind_of(types[item.name]) != kind_of(parameter.type):
                raise Malformed(f"`{line.op}` takes another kind of numbers as its `{parameter.name}`")

    def _check(self, type_: Type, value: Value, where: str, name: str) -> None:
        if type_ is NO_TYPE:
            return
        if value.shape != type_.local:
            raise Malformed(
                f"{where}: `{name}` has the shape {list(value.shape)}, and its type says {list(type_.local)}"
            )
        if not value.axes <= {*type_.axes, *(f"~{axis}" for axis in type_.axes), "#"}:
            other = sorted(value.axes - type_.axes - {"#"})
            raise Refused(f"{where}: `{name}` differs along `{other[0]}`, which its type does not say")

    # ---- gradients

    def forward(self, function: Function, values: Values) -> list[tuple[Call, Sequence[Value]]]:
        """Run a model's function; return its calls with their results. ``values`` gets every value by name."""
        types = {parameter.name: parameter.type for parameter in function.parameters}
        calls = []
        for line in function.lines:
            try:
                call, results = self.line(line, values, types)
                calls.append((call, results))
            except Refused as error:
                raise Refused(f"model.py:{line.row}: {error} ({line.origin})") from None
            except UNREADABLE as error:
                raise Refused(f"model.py:{line.row}: `{line.op}` is not called so ({error}) ({line.origin})") from None
            for name, type_, value in zip(line.results, line.types, results, strict=True):
                if name != "_":
                    self._check(type_, value, f"model.py:{line.row}", name)
                    values[name], types[name] = value, type_
                    self.meant.append(value)
        return calls

    def gradients(
        self, calls: Sequence[tuple[Call, Sequence[Value]]], start: Mapping[str, Value], wanted: Sequence[str]
    ) -> dict[str, Value]:
        """Return the gradients of ``wanted`` parameters, for those in ``start`` of results."""
        needs = set(wanted)
        active = []
        for call, _ in calls:
            reads = names_in(call.line.args)
            used = call.line.op not in CONSTANT and not needs.isdisjoint(reads)
            floats = [name for name, type_ in zip(call.line.results, call.line.types, strict=True)
                      if type_.dtype.startswith(("f", "bf"))]  # fmt: skip
            active.append(used and bool(floats))
            if active[-1]:
                needs.update(floats)
        total: dict[str, list[Value]] = {name: [value] for name, value in start.items()}
        for (call, results), used in zip(reversed(calls), reversed(active), strict=True):
            if not used:
                continue
            grads = [self._sum(total.pop(name, [])) for name in call.line.results]
            self.meant += [grad for grad in grads if grad is not None]
            if all(g is None for g in grads):
                continue
            registered = self.own.get(call.line.op)
            slope = registered.gradients if registered is not None else SLOPES.get(call.line.op)
            if slope is None:
                raise Refused(f"model.py:{call.line.row}: no derivative for `{call.line.op}` ({call.line.origin})")
            try:
                parts = self._parts(slope, call, results, grads)
            except Refused as error:
                raise Refused(f"model.py:{call.line.row}: {error} ({call.line.origin})") from None
            except UNREADABLE as error:
                raise Refused(f"model.py:{call.line.row}: `{call.line.op}` has no such gradient ({error})") from None
            for name, part in zip(names_in(call.line.args), parts, strict=True):
                if part is not None and name in needs:
                    total.setdefault(name, []).append(part)
        return {name: value for name in wanted if (value := self._sum(total.get(name, []))) is not None}

    def _parts(
        self, slope: Slope, call: Call, results: Sequence[Value], grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        """Return the gradients of a call's operands, for those of its results."""
        call.results, call.grads = results, grads
        first = self.table.constant(0, results[0].shape) if grads[0] is None else grads[0]
        what = "gradients", self._what(call, call.line.kwargs)
        return self.alike.results(what, (call.args, first, results, grads), lambda: slope(call, first, results[0]))

    def _sum(self, parts: list[Value]) -> Value | None:
        if len(parts) < 2:
            return parts[0] if parts else None
        return self.alike.value("sum", parts, self.tensors.plus)


def _values(args: Sequence[Any]) -> list[Value]:
    """Return the values among arguments."""
    return [
        value for item in args for value in (_values(item) if type(item) is list else [item]) if type(value) is Value
    ]


def names_in(args: Sequence[Any]) -> list[str]:
    """Return the names among arguments, in their order."""
    names: list[str] = []
    for item in args:
        if type(item) is Name:
            names.append(item.name)
        elif type(item) is list:
            names += names_in(item)
    return names


def place_of(program: Program, binding: str) -> str:
    """Return a name for what programs hand to each other: what is saved belongs to a stage."""
    kind, _, name = binding.partition(" ")
    if kind in ("saved", "deferred"):
        return f"{program.role} {binding}"
    return f"sent {name}" if kind == "received" else binding


def bound_to(kind: str, bindings: Iterable[str]) -> list[str]:
    """Return the names of bindings of a kind, in their order."""
    return [binding.partition(" ")[2] for binding in bindings if binding.startswith(f"{kind} ")]


def received(sent: Mapping[str, Value]) -> dict[str, Value]:
    """Return what a stage sends by the names under which the next one reads it."""
    return {f"received {key.partition(' ')[2]}": value for key, value in sent.items()}
