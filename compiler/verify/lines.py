"""The check of one program: shapes and types, derived again line by line from its text and the table of rules.

It shares that table with the passes and nothing else. By induction over the lines, the pieces that all ranks hold of a
value are together what the operator returns for whole operands. A result that no line reads is refused too: a
contribution that was forgotten in the sum of a gradient is one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch

from ..analysis.dataflow import Question, follow, line_call, questions
from ..layout.collectives import COLLECTIVES, MESSAGE
from ..layout.mesh import Mesh
from ..layout.packed_rows import EXCHANGE
from ..layout.placement import TensorType
from ..ops.factors import OpCall, fill_operands
from ..ops.infer import infer, packed_result
from ..ops.results import example, results_of
from ..ops.rules import facts, localize
from ..program.program import Fault, Function, Line, Program, Ref, Value, operator, remembered

_Fact = TypeVar("_Fact", bound=Hashable)
"""The facts that a check knows about one value."""
_LineFaults = tuple[tuple[str, str], ...]
"""Pairs of the failed check's name and a message."""


def check_program(program: Program) -> list[Fault]:
    """Check shapes and types of every line of one program, and that every line is read."""
    faults = check_lines(program)
    for function in program.functions:
        where = f"{program.role}.{program.action} {function.name}"
        faults += [Fault("types", f"{where}: {name}", "is made and never read") for name in _unread(function)]
    called = {line.op for function in program.functions for line in function.lines if line.calls_function}
    for function in program.blocks:
        if function.name not in called:
            faults.append(Fault("types", f"{program.role}.{program.action} {function.name}", "is never called"))
    return faults


def check_lines(program: Program) -> list[Fault]:
    """Check shapes and types of every line of one program."""
    faults: list[Fault] = []
    known: dict[str, Function] = {}
    for function in program.functions:
        where = f"{program.role}.{program.action} {function.name}"
        for line, line_faults in _faulty_lines(function, program.mesh):
            wrong = line_faults if line_faults is not None else call_faults(line, function.values(), known[line.op])
            faults += [Fault(check, f"{where}: {line.names}", message) for check, message in wrong]
        known[function.name] = function
    return faults


@remembered
def _faulty_lines(function: Function, mesh: Mesh) -> Sequence[tuple[Line, _LineFaults | None]]:
    """Return the lines of a function that have faults, and its calls (with None), which depend on other functions."""
    checked = [(line, _line_faults(question) if question else None) for line, question in questions(function, mesh)]
    return [(line, faults) for line, faults in checked if faults != ()]


@remembered
def _unread(function: Function) -> Sequence[str]:
    """Return the values that no line reads: parameters (except buffers that are updated), results of calls, and those
    of lines of which no result is read."""
    read, updated = function.uses, {key for key, _ in function.returns if key.kind == "buffer"}
    unread = [v.name for v in function.parameters if v.name not in read and v.binding not in updated]
    for line in function.lines:
        names = [value.name for value in line.made if value.name not in read]
        unread += names if line.calls_function or len(names) == len(line.made) else []
    return unread


def follow_with_faults(
    program: Program,
    parameters: Sequence[_Fact],
    rule: Callable[[Question, tuple[_Fact, ...]], tuple[Sequence[_Fact], str]],
) -> tuple[list[_Fact], list[Fault]]:
    """Follow a program by a ``rule``, which returns the facts about a line's results and the message of its fault, ""
    for none. Return the facts about what the program returns, and the faults, one a line."""
    faults: dict[str, Fault] = {}

    def noted(function: str, question: Question, operands: tuple[_Fact, ...]) -> Sequence[_Fact]:
        results, message = rule(question, operands)
        if message:
            where = f"{program.action} {function}: {question.line.names}"
            faults[where] = Fault("types", where, message)
        return results

    return follow(program, program.main, parameters, noted), list(faults.values())


def call_faults(line: Line, values: Mapping[str, Value], called: Function) -> Iterator[tuple[str, str]]:
    operands = [values[name].type for name in line.uses]
    if operands != [value.type for value in called.parameters]:
        yield "types", f"calls `{called.name}` with operands of other types than it takes"
    inner = called.values()
    declared = [None if value is None else value.type for value in line.results]
    if [inner[name].type for _, name in called.returns] != declared:
        yield "types", f"gives the results of `{called.name}` other types than it returns"


@lru_cache(maxsize=8192)
def _line_faults(question: Question) -> _LineFaults:
    check = collective_faults if question.line.op in COLLECTIVES else _operator_faults
    return tuple(check(question))


def collective_faults(q: Question) -> Iterator[tuple[str, str]]:
    line, mesh = q.line, q.mesh
    source, *options = line.args or (None,)
    if not isinstance(source, Ref) or any(key != MESSAGE for key, _ in line.kwargs):
        yield "types", f"{line.op} takes one value, then axes and dims"
        return
    row = COLLECTIVES[line.op]
    try:
        axes = row.axes(options)
        if len(set(axes)) != len(axes) or any(axis not in mesh.names for axis in axes):
            raise ValueError(f"`{','.join(axes)}` are not distinct axes of the mesh")
        expected = row.result(q.operands[0], mesh, options)
        expected.local(mesh)
        moves_rows = q.operands[0].placement.splits(0) != expected.placement.splits(0)
        if (line.op == EXCHANGE) != (q.operands[0].packed is not None and moves_rows):
            raise ValueError(f"{line.op} of `{q.operands[0].text(mesh)}`: packed rows, and no others, are exchanged")
        beside = row.beside(q.operands[0], expected)
    except (ValueError, TypeError, KeyError, IndexError, ZeroDivisionError) as problem:
        yield "types", str(problem)
        return
    if q.operands[1:] != beside:
        yield "types", f"{line.op} reads beside its operand what does not belong to it"
    if (expected,) != q.declared:
        yield "types", f"{line.op} makes `{expected.text(mesh)}`, not what is declared"


def _operator_faults(q: Question) -> Iterator[tuple[str, str]]:
    line, mesh, results = q.line, q.mesh, q.results
    if _draws(line.op):
        yield "types", f"{line.op} draws from a rank's own random state"
        return
    if problem := _schema_problem(line):
        yield "shapes", f"{line.op} {problem}"
        return
    call = line_call(line, q.operands, results, lambda item: item.size)
    wrong = _result_problem(q, call, [t.shape for t in q.operands], [t and t.shape for t in q.declared])
    if wrong:  # rules speak of calls that are valid
        yield "shapes", wrong
        return
    row = facts(line.op)
    table, dim = row.counted if row.replaced and row.counted else (0, None)
    if dim is not None and q.operands[table].placement.splits(dim):
        yield "types", f"{line.op} needs dim {dim} of its table whole"
    try:
        placements = infer(call, [t.placement for t in q.operands], mesh, [t.placement for t in results])
        packed = packed_result(call, [t.packed for t in q.operands])
    except Exception as error:  # a rule may stumble over arguments that it does not foresee
        yield "types", str(error) or type(error).__name__
        return
    if any(type_.packed != packed for type_ in results):
        yield "types", f"{line.op} does not make rows that are packed so"
    zeros = row.makes_zeros(line.args)
    for placement, type_ in zip(placements, results, strict=True):
        # zeros are partial sums of zero as well
        without_sums = type_.placement.replace(dict.fromkeys(type_.placement.partial, "I"))
        if placement != type_.placement and not (zeros and placement == without_sums):
            text = TensorType(type_.dtype, type_.shape, placement).text(mesh)
            yield "types", f"{line.op} makes `{text}`, not `{type_.text(mesh)}`"
    yield from _local_faults(q, call)


def _draws(op: str) -> bool:
    try:
        return torch.Tag.nondeterministic_seeded in operator(op).tags
    except AttributeError:
        return False


def _schema_problem(line: Line) -> str:
    """Return how a call does not fit its operator's schema, "" if it does: torch may crash at such calls."""
    if not line.op.startswith("aten."):
        return ""
    named: dict[int | str, Any] = {**dict(enumerate(line.args)), **dict(line.kwargs)}
    for at, argument in enumerate(operator(line.op)._schema.arguments):
        if at not in named and argument.name not in named:
            if not argument.has_default_value():
                return f"lacks its `{argument.name}`"
            continue
        number = type(named.get(at, named.get(argument.name))) is int
        if number and str(argument.type) != str(argument.real_type):
            return "has a number where it takes a type"
        if number and str(argument.type) in ("bool", "Optional[bool]"):
            return f"has a number for `{argument.name}`, which is true or false"
    return ""


def _local_faults(q: Question, call: OpCall) -> Iterator[tuple[str, str]]:
    """Yield the faults on one rank's shapes: sizes in arguments are those that the rule derives, and with them the
    operator returns the declared shapes."""
    op, mesh, results = q.line.op, q.mesh, q.results
    shapes = tuple(t.local(mesh) for t in q.operands), tuple(t.local(mesh) for t in results)
    local = line_call(q.line, q.operands, results, lambda item: item.local(mesh))
    try:
        args, kwargs = localize(call, *shapes)
    except Exception as problem:  # whatever a rule raises for sizes that do not divide
        yield "shapes", f"{op} has no sizes on a rank: {problem}"
        return
    if (list(args), kwargs) != (list(local.args), dict(local.kwargs)):
        yield "shapes", f"sizes of {op} on a rank are not those its rule derives"
    wrong = _result_problem(q, local, shapes[0], [t and t.local(mesh) for t in q.declared])
    if wrong:
        yield "shapes", f"on a rank {wrong}"


def _result_problem(q: Question, call: OpCall, shapes: Sequence[Any], wanted: Sequence[Any]) -> str:
    """Run the operator on shapes alone, and return how its results are not those declared, or ""."""
    op = q.line.op
    expected = [None if t is None else (t.dtype, shape) for t, shape in zip(q.declared, wanted, strict=True)]
    try:
        operands = [example(type_.dtype, tuple(shape)) for shape, type_ in zip(shapes, q.operands, strict=True)]
        args, kwargs = fill_operands(call.args, operands), fill_operands(dict(call.kwargs), operands)
        forms = forms_of(results_of(operator(op), args, kwargs).values)
    except Exception as problem:  # whatever an operator raises for operands that it does not take
        return f"{op} does not take these shapes: {(str(problem).strip() or type(problem).__name__).splitlines()[0]}"
    return "" if forms == expected else f"{op} makes {_shape_text(forms)}, not {_shape_text(expected)}"


def forms_of(output: Any) -> list[tuple[torch.dtype, Any] | None]:
    """Return dtypes and shapes of an operator's results."""
    tensors = output if isinstance(output, (tuple, list)) else [output]
    return [None if x is None else (x.dtype, tuple(x.shape)) for x in tensors]


def _shape_text(forms: Sequence[Any]) -> str:
    return "; ".join("-" if form is None else f"{str(form[0]).removeprefix('torch.')}{list(form[1])}" for form in forms)
