"""The types that a faulty pass would declare: every later type derived anew from a changed line, as far as types can be
had."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from parc.compiler.analysis.dataflow import line_call
from parc.compiler.layout.collectives import COLLECTIVES
from parc.compiler.layout.placement import TensorType
from parc.compiler.ops.infer import infer
from parc.compiler.program.binding import Binding
from parc.compiler.program.program import Function, Line, Program, Value


def carried(programs: Mapping[str, Program], good: Mapping[str, Program]) -> dict[str, Program]:
    """Return changed programs with types that follow from those of their first values; a line that has none keeps its
    own.

    A line of the ``good`` programs whose operands are what they were there keeps its types too.
    """
    carried_types: dict[Binding | None, TensorType] = {}
    result = {}
    for action, program in programs.items():
        types = [carried_types.get(value.binding, value.type) for value in program.main.parameters]
        carrier = _Carrier(program, good[action])
        main = carrier.carry(program.main, types)
        carrier.functions[main.name] = main
        values = main.values()
        carried_types.update((key, values[name].type) for key, name in main.returns if name in values)
        functions = tuple(carrier.functions.values())
        same = all(a is b for a, b in zip(functions, program.functions, strict=True))
        result[action] = program if same else replace(program, functions=functions)
    return result


class _Carrier:
    def __init__(self, program: Program, good: Program) -> None:
        self.program = program
        self.functions = {function.name: function for function in program.functions}
        self.good = {function.name: function for function in good.functions}

    def carry(self, function: Function, parameter_types: Sequence[TensorType]) -> Function:
        """Return the function with other types of its parameters."""
        good = self.good[function.name]
        if (
            function is good
            and all(v.type is t for v, t in zip(function.parameters, parameter_types, strict=True))
            and not any(
                self.functions[line.op] is not self.good[line.op] for line in function.lines if line.calls_function
            )
        ):
            return function
        known, unchanged = _known(good)
        parameters = tuple(
            _retype(value, type_) for value, type_ in zip(function.parameters, parameter_types, strict=True)
        )
        types, others = dict(known), set[str]()  # others are values whose types are not what they were

        def note(values: Iterable[Value]) -> None:
            for value in values:
                types[value.name] = value.type
                if value.type != known.get(value.name):
                    others.add(value.name)

        note(parameters)
        lines = []
        for line in function.lines:
            if id(line) in unchanged and not line.calls_function and others.isdisjoint(line.uses):
                lines.append(line)  # most lines of most mutants
                continue
            operands = [types[name] for name in line.uses]
            derived: list[TensorType | None] = [None if value is None else value.type for value in line.results]
            if line.calls_function:
                inner = self.functions[line.op] = self.carry(self.functions[line.op], operands)
                values = inner.values()
                derived = [
                    values[name].type if name in values else type_  # a function may lack the line that makes a result
                    for (_, name), type_ in zip(inner.returns, derived, strict=True)
                ]
            else:
                derived = _derive(self.program, line, operands)
            results = tuple(
                value if value is None or type_ is None else _retype(value, type_)
                for value, type_ in zip(line.results, derived, strict=True)
            )
            note(value for value in results if value is not None)
            same = all(a is b for a, b in zip(results, line.results, strict=True))
            lines.append(line if same else replace(line, results=results))
        if parameters == function.parameters and all(a is b for a, b in zip(lines, function.lines, strict=True)):
            return function
        return replace(function, parameters=parameters, lines=tuple(lines))


def _known(good: Function) -> tuple[dict[str, TensorType], set[int]]:
    """Return the types of all values of a good function, and which lines are its own; they are kept with it."""
    if "known" not in good.derived:
        types = {name: value.type for name, value in good.values().items()}
        good.derived["known"] = types, {id(line) for line in good.lines}
    stored: tuple[dict[str, TensorType], set[int]] = good.derived["known"]
    return stored


def _retype(value: Value, type_: TensorType) -> Value:
    return value if value.type == type_ else replace(value, type=type_)


def _derive(program: Program, line: Line, operands: Sequence[TensorType]) -> list[TensorType | None]:
    declared = [None if value is None else value.type for value in line.results]
    results = [type_ for type_ in declared if type_ is not None]
    try:
        if line.op in COLLECTIVES:
            derived = [COLLECTIVES[line.op].result(operands[0], program.mesh, line.args[1:])]
            derived[0].local(program.mesh)
            return [*derived]
        call = line_call(line, operands, results, lambda item: item.size)
        placements = infer(call, [t.placement for t in operands], program.mesh, [t.placement for t in results])
    except (ValueError, KeyError, IndexError):
        return declared
    placed = iter(replace(t, placement=p) for t, p in zip(results, placements, strict=True))
    return [None if type_ is None else next(placed) for type_ in declared]
