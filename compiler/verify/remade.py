"""The checker of what backward makes again: under a name of F stands F's own line, of F's own values.

A function of B may use names of its function of F. Such a value is read from F, or made by the very line that makes it
there: operator, arguments and types. By induction over the lines, both are the same numbers. Keys of random streams are
values like others, so dropout is replayed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..layout.collectives import MESSAGE, WAIT
from ..program.actions import BACKWARD, FORWARD
from ..program.program import Fault, Function, Line, Program


def forward_lines(forward: Program, function: Function) -> dict[str, Line | None]:
    """Return the line of F for every value of a function of B that has a name of its function of F; None if that is a
    parameter there."""
    if (own := _undone(forward, function)) is None:
        return {}
    makers: dict[str, Line | None] = {**dict.fromkeys(value.name for value in own.parameters), **_makers(own)}
    return {name: makers[name] for name in _makers(function) if name in makers}


def check_remade(programs: Mapping[str, Program]) -> Iterator[Fault]:
    """Find lines of B that make a value of F otherwise than F does, random streams that B begins by itself, and calls
    that mix the values of several calls of F."""
    forward, backward = programs[FORWARD], programs[BACKWARD]
    for function in backward.functions:
        own = forward_lines(forward, function)
        for name, line in _makers(function).items():
            if name in own and _work(own[name]) != _work(line):
                yield Fault("types", f"B {function.name}: {name}", "is not made as F makes it")
            if line.op == "parc.stream_key.default":
                yield Fault("types", f"B {function.name}: {name}", "draws from a stream that is not F's")
    yield from _call_faults(forward, backward)


def _makers(function: Function) -> dict[str, Line]:
    """Return the line that makes each value; of one that is awaited, the collective as if it were not on its way."""
    makers = dict(function.makers)
    started = {name: line for name, line in makers.items() if MESSAGE in dict(line.kwargs)}
    for name, line in function.makers.items():
        if line.op == WAIT and (start := started.get(line.uses[0])) is not None:
            kwargs = tuple((key, item) for key, item in start.kwargs if key != MESSAGE)
            makers[name] = replace(start, results=line.results, kwargs=kwargs)
    return {name: line for name, line in makers.items() if name not in started}


def _work(line: Line | None) -> tuple[object, ...] | None:
    """Return all that a line computes, without the place in the model that it comes from."""
    return None if line is None else (line.results, line.op, line.args, line.kwargs)


def _undone(forward: Program, function: Function) -> Function | None:
    """Return the function of F whose gradients a function of B makes."""
    name = function.name.removesuffix("_backward")
    return next((own for own in forward.blocks if own.name == name != function.name), None)


def _call_faults(forward: Program, backward: Program) -> Iterator[Fault]:
    """Find calls of B that mix the values of several calls of F."""
    calls: dict[str, list[dict[str, str]]] = defaultdict(list)
    for line in forward.main.lines:
        if line.calls_function:
            called = forward.function(line.op)
            inner = zip((value.name for value in called.parameters), line.uses, strict=True)
            outer = zip(line.results, called.returns, strict=True)
            made = {name: value.name for value, (_, name) in outer if value is not None}
            calls[line.op].append({**dict(inner), **made})
    values = backward.main.values()
    for line in backward.main.lines:
        callee = backward.function(line.op) if line.calls_function else None
        if callee is None or (own := _undone(forward, callee)) is None:
            continue
        given = {
            value.name: name for value, name in zip(callee.parameters, line.uses, strict=True)
            if value.name in own.values() and values[name].kind == "saved"
        }  # fmt: skip
        if not any(all(call.get(name) == saved for name, saved in given.items()) for call in calls[own.name]):
            yield Fault("types", f"B {line.op} of {line.origin.module}", "reads values of several calls of F")
