"""Checks of what backward recomputes, and of every rounding to a narrow type.

Recomputed values: a function of B may use the names of its function of F. Such a value is read from F, or it repeats
F's line exactly: operator, arguments and types. By induction over the lines, both are the same numbers. Keys of random
streams are values like others, so dropout is replayed.

Roundings: a value is narrow only where the plan's ``precision`` lines, or the model itself, make it so. Numbers are
tested in float64, where a cast changes nothing, so no test sees a rounding too many. Proved is that

- weights, their gradients as they are summed, and the loss have the model's own types;
- an operator that is sensitive to rounding, a loss, a value computed from a loss, and a single number are never narrow;
- a value becomes narrow only in a module that computes in that type; in B only where F does so, or as the gradient of a
  value that F widens there;
- a table, an angle or a mask (computed from positions, buffers and constants alone) is rounded once, for a line that
  reads it with narrow activations. Other lines read it as the model computes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum

import torch

from ..analysis.dataflow import Question, follow, questions
from ..analysis.torch_runs import operators_of
from ..layout.collectives import COLLECTIVES
from ..layout.mesh import Shape
from ..ops.precision import Rounding, base_name, is_narrow, is_sensitive, may_narrow
from ..ops.rules import facts
from ..program.actions import BACKWARD, FORWARD, REDUCE, UNSHARD, work_kinds
from ..program.binding import BUFFERS, LOSS, Binding
from ..program.plain import synchronous
from ..program.program import Fault, Function, Line, Program, Value, needed
from .lines import follow_with_faults

# ---- recomputed values


def forward_lines(forward: Program, function: Function) -> dict[str, Line | None]:
    """Return the line of F for every value of a function of B that has a name of its function of F; None for a
    parameter there."""
    if (block := _forward_of(forward, function)) is None:
        return {}
    makers: dict[str, Line | None] = {**dict.fromkeys(v.name for v in block.parameters), **_sync_makers(block)}
    return {name: makers[name] for name in _sync_makers(function) if name in makers}


def check_recomputed(programs: Mapping[str, Program]) -> Iterator[Fault]:
    """Find lines of B that compute a value of F otherwise than F does, random streams that B begins by itself, and
    calls of B that mix the values of several calls of F."""
    forward, backward = programs[FORWARD], programs[BACKWARD]
    for function in backward.functions:
        of_forward = forward_lines(forward, function)
        for name, line in _sync_makers(function).items():
            if name in of_forward and _computation(of_forward[name]) != _computation(line):
                yield Fault("types", f"B {function.name}: {name}", "is not made as F makes it")
            if line.op == "parc.stream_key.default":
                yield Fault("types", f"B {function.name}: {name}", "draws from a stream that is not F's")
    yield from _call_faults(forward, backward)


def _sync_makers(function: Function) -> dict[str, Line]:
    """Return the line that makes each value, with an asynchronous collective and its wait as one collective."""
    return {value.name: line for line in synchronous(function) for value in line.made}


def _computation(line: Line | None) -> tuple[object, ...] | None:
    """Return all of a line but its place in the model."""
    return None if line is None else (line.results, line.op, line.args, line.kwargs)


def _forward_of(forward: Program, function: Function) -> Function | None:
    """Return the function of F whose gradients a function of B makes."""
    name = function.name.removesuffix("_backward")
    return next((block for block in forward.blocks if block.name == name != function.name), None)


def _call_faults(forward: Program, backward: Program) -> Iterator[Fault]:
    """Find calls of B that mix the values of several calls of F."""
    calls: dict[str, list[dict[str, str]]] = defaultdict(list)
    for line in forward.main.lines:
        if line.calls_function:
            called = forward.function(line.op)
            operands = zip((value.name for value in called.parameters), line.uses, strict=True)
            returned = zip(line.results, called.returns, strict=True)
            results = {name: value.name for value, (_, name) in returned if value is not None}
            calls[line.op].append({**dict(operands), **results})
    values = backward.main.values()
    for line in backward.main.lines:
        callee = backward.function(line.op) if line.calls_function else None
        if callee is None or (block := _forward_of(forward, callee)) is None:
            continue
        saved = {
            value.name: name for value, name in zip(callee.parameters, line.uses, strict=True)
            if value.name in block.values() and values[name].kind == "saved"
        }  # fmt: skip
        if not any(saved.items() <= call.items() for call in calls[block.name]):
            yield Fault("types", f"B {line.op} of {line.origin.module}", "reads values of several calls of F")


# ---- roundings


def check_precision(programs: Mapping[str, Program], reference: Program, rounding: Rounding) -> list[Fault]:
    """Return the faults of the types in a step's programs: the captured graph and the plan's ``precision`` lines say
    where a value may be narrow."""
    model = _ModelPrecision(reference)
    faults = [*_outside_faults(programs, reference, rounding)]
    widened = _widened_values(programs[FORWARD])
    for action, program in programs.items():
        for function in program.functions:
            recomputed = forward_lines(programs[FORWARD], function) if action == BACKWARD else {}
            for line, fault in _line_faults(function, action, rounding, model, widened, recomputed):
                faults.append(Fault("types", f"{action} {function.name}: {line.names}", fault))
    return [*faults, *_loss_faults(programs[FORWARD], model), *_table_faults(programs, model)]


_Widened = tuple[str, Shape, torch.dtype]
"""A module that widens a value, and the value's shape and type before."""


class _ModelPrecision:
    """The narrow parts of the captured graph itself: operators, with what they are made of and what their derivatives
    are; modules that mix widths; and types of parameters."""

    def __init__(self, reference: Program) -> None:
        self.ops: set[str] = set()
        self.modules: set[tuple[str, torch.dtype]] = set()
        self.types: set[torch.dtype] = set()
        for function in reference.functions:
            self.types.update(value.type.dtype for value in function.parameters)
            of_lines = questions(function, reference.mesh)
            for (line, reads, makes), (_, question) in zip(_floats(function), of_lines, strict=True):
                self.types.update(value.type.dtype for value in makes if not value.type.shape)
                narrow = [value for value in (*reads, *makes) if is_narrow(value.type.dtype)]
                self.ops.update(base_name(line.op) for _ in narrow[:1])
                if narrow and question is not None and is_sensitive(line.op):
                    self.ops |= operators_of(question)
                rounded = (*narrow, *_rounded_values(reads, makes))
                self.modules.update((line.origin.module, value.type.dtype) for value in rounded)

    def mixes(self, module: str, dtype: torch.dtype | None = None) -> bool:
        """Return whether the model itself rounds in a module, to a ``dtype`` or to any. ``layers.*`` matches any
        block."""
        parts = module.split(".")
        rounds = is_narrow if dtype is None else dtype.__eq__
        names = (name.split(".") for name, rounded_to in self.modules if rounds(rounded_to))
        return any(
            len(parts) == len(other) and all(a in (b, "*") for a, b in zip(parts, other, strict=True))
            for other in names
        )


def _floats(function: Function) -> Iterator[tuple[Line, list[Value], list[Value]]]:
    """Yield each line with its floating operands and results."""
    values = function.values()
    for line in function.lines:
        reads = [values[name] for name in line.uses if values[name].type.dtype.is_floating_point]
        makes = [value for value in line.made if value.type.dtype.is_floating_point]
        yield line, reads, makes


def _rounded_values(reads: Sequence[Value], makes: Sequence[Value]) -> list[Value]:
    """Return the results of a line that are narrower than all its floating operands, and narrow results of a type that
    it does not read."""
    widths = [value.type.dtype.itemsize for value in reads]
    read = {value.type.dtype for value in reads}
    return [
        value for value in makes
        if (is_narrow(value.type.dtype) and value.type.dtype not in read)
        or (widths and value.type.dtype.itemsize < min(widths))
    ]  # fmt: skip


def _outside_faults(programs: Mapping[str, Program], reference: Program, rounding: Rounding) -> Iterator[Fault]:
    """Find values that a step reads or returns in another type than the model has, and gradients summed in a narrow
    type."""
    known = {v.binding: v.type.dtype for function in reference.functions for v in function.parameters}
    main = reference.main.values()
    known.update((key, main[name].type.dtype) for key, name in reference.main.returns)
    for action, program in programs.items():
        values = program.main.values()
        parameters = [(value.binding, value.type.dtype) for value in program.main.parameters]
        results = [(key, values[name].type.dtype) for key, name in program.main.returns if key == LOSS]
        for key, dtype in (*parameters, *results):
            kept_whole = rounding.lines and dtype == torch.float32  # as what is narrow in the model itself may be
            if dtype != known.get(key, dtype) and not (kept_whole and is_narrow(known[key])):
                yield Fault("types", f"{action} {key}", f"is {_text(dtype)}, but {_text(known[key])} in the model")
    values = programs[BACKWARD].main.values()
    for name, gradient in programs[BACKWARD].main.returned("gradient").items():
        dtype = values[gradient].type.dtype
        if is_narrow(dtype) and dtype not in (known.get(Binding("parameter", name)), rounding.sums):
            yield Fault("types", f"B {name}", f"is added up over microbatches in {_text(dtype)}")


def _widened_values(forward: Program) -> set[_Widened]:
    """Return the values that F casts to a wider type, or to another of the same width."""
    places: set[_Widened] = set()
    for function in forward.functions:
        for line, reads, makes in _floats(function):
            width = max((value.type.dtype.itemsize for value in makes), default=0)
            kept = {value.type.dtype for value in makes if value.type.dtype.itemsize == width}
            if not line.calls_function:
                narrow = [v for v in reads if v.type.dtype.itemsize <= width and v.type.dtype not in kept]
                places.update((line.origin.module, value.type.shape, value.type.dtype) for value in narrow)
    return places


def _line_faults(
    function: Function, action: str, rounding: Rounding, model: _ModelPrecision, widened: set[_Widened],
    recomputed: Collection[str],
) -> Iterator[tuple[Line, str]]:  # fmt: skip
    """Yield the lines that round what they may not, with the fault. ``recomputed`` are the values of a backward that
    are F's, as `check_recomputed` proves."""
    totals = [line for line in function.lines if facts(line.op).computes == "total"]
    # terms of several stages are added up like those of microbatches
    _, returned = needed(totals, (name for _, name in function.returns))
    for line, reads, makes in _floats(function):
        narrow = [value for value in (*makes, *reads) if is_narrow(value.type.dtype)]
        if line.calls_function:
            continue
        differentiates = action == BACKWARD and not any(value.name in recomputed for value in line.made)
        sensitive = is_sensitive(line.op, backward=differentiates) and base_name(line.op) not in model.ops
        if sensitive and narrow and narrow[0].type.dtype not in model.types:
            yield line, f"{line.op} is sensitive to rounding, but takes or gives {_text(narrow[0].type.dtype)}"
            continue
        for value in _rounded_values(reads, makes)[:1]:
            dtype, shape, module = value.type.dtype, value.type.shape, line.origin.module
            if (is_narrow(dtype) and dtype in model.types) or facts(line.op).makes_zeros(line.args):
                continue
            if action == BACKWARD and value.name in returned and is_narrow(dtype) and dtype == rounding.sums:
                continue
            if action == REDUCE and dtype == torch.float16 and shape and "fp16" in dict(rounding.sent):
                continue  # a gradient's: `check_compressed`
            allowed = may_narrow(rounding.lines, module, dtype) or model.mixes(module, dtype)
            if differentiates:  # the gradient of a value that F widens there
                allowed = (module, shape, dtype) in widened
            single = is_narrow(dtype) and not shape
            if action not in (*work_kinds(), UNSHARD) or single or not allowed:
                yield line, f"rounds to {_text(dtype)}, which no line of the plan asks for"


def _loss_faults(forward: Program, model: _ModelPrecision) -> Iterator[Fault]:
    """Find narrow values that are computed from a loss."""
    by_place: dict[str, Fault] = {}

    def depends_on_loss(function: str, question: Question, of_loss: tuple[bool, ...]) -> list[bool]:
        line = question.line
        row = facts(line.op)
        depends = (row.precision == "loss" and not row.backward) or any(of_loss)
        for value in line.made if depends else ():
            if is_narrow(value.type.dtype) and value.type.dtype not in model.types:
                where = f"F {function}: {value.name}"
                by_place[where] = Fault("types", where, f"is made of the loss, but {_text(value.type.dtype)}")
        return [depends] * len(line.made)

    follow(forward, forward.main, [False] * len(forward.main.parameters), depends_on_loss)
    yield from by_place.values()


# ---- tables, angles and masks


class _Table(Enum):
    """The kinds of values that a value is computed from."""

    EXACT = "positions, buffers and constants, as the model computes them"
    ROUNDED = "the same, once rounded"
    OTHER = "weights or activations"


def _table_faults(programs: Mapping[str, Program], model: _ModelPrecision) -> Iterator[Fault]:
    """Find tables that are rounded for a line that does not read them with narrow activations."""

    def kinds_of_results(question: Question, operands: tuple[_Table, ...]) -> tuple[list[_Table], str]:
        kind, fault = _result_table(question, operands)
        return [kind] * len(question.line.made), "" if model.mixes(question.line.origin.module) else fault

    saved: dict[str, _Table] = {}
    for program in (programs[FORWARD], programs[BACKWARD]):
        main = program.main
        parameters = [saved.get(value.name, _Table.OTHER) if value.kind == "saved" else _parameter_table(value)
                      for value in main.parameters]  # fmt: skip
        results, faults = follow_with_faults(program, parameters, kinds_of_results)
        yield from faults
        for (key, _), kind in zip(main.returns, results, strict=True):
            if key.kind == "saved":
                saved[key.name] = kind
            if key.kind == "buffer" and kind is _Table.ROUNDED:
                yield Fault("types", f"{program.action} {key}", "is kept rounded from step to step")


def _parameter_table(value: Value) -> _Table:
    exact = value.kind in BUFFERS or (value.kind == "input" and not value.type.dtype.is_floating_point)
    return _Table.EXACT if exact else _Table.OTHER


def _result_table(question: Question, operands: Sequence[_Table]) -> tuple[_Table, str]:
    """Return the kind of a line's results, and the fault in the operands that it reads ("" if none)."""
    line, results, row = question.line, question.results, facts(question.line.op)
    narrow = any(is_narrow(type_.dtype) for type_ in results)
    floats = [pair for pair in zip(question.operands, operands, strict=True) if pair[0].dtype.is_floating_point]
    activations = [type_.dtype for type_, kind in floats if kind is _Table.OTHER and type_.shape]
    rounded = any(kind is _Table.ROUNDED for _, kind in floats)
    if line.op in COLLECTIVES or row.keeps_values:
        return (operands or [_Table.EXACT])[0], ""
    compares = bool(activations) and not any(type_.dtype.is_floating_point for type_ in results)
    if rounded and not ((narrow or compares) and all(map(is_narrow, activations))):
        return _Table.OTHER, "reads what was rounded and is made of positions, buffers and constants as if it were not"
    if rounded and base_name(line.op) == "attention" and operands[3:4] == [_Table.ROUNDED]:
        return _Table.OTHER, "reads a mask that was rounded"
    if _Table.OTHER in operands:
        return _Table.OTHER, ""
    if rounded and not row.casts:
        return _Table.OTHER, "computes with what was rounded, and meets no activation"
    narrow_in_model = bool(floats) and all(is_narrow(type_.dtype) for type_, _ in floats) and not rounded
    exact = row.creates and _holds(row.number_in(line.args), results[0].dtype)
    return (_Table.EXACT if not narrow or narrow_in_model or exact else _Table.ROUNDED), ""


def _holds(number: float, dtype: torch.dtype) -> bool:
    return torch.tensor(number, dtype=dtype).item() == number


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
