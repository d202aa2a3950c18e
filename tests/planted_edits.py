"""Programs with something else in one place: a value read in place of another, a line with another argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from parc.compiler.program.program import Function, Line, Program, Ref, Value, map_references

Programs = Mapping[str, Program]
"""Programs by action, or by the names of their files: ``stage0.F``."""


def reading(function: Function, old: str, new: str, start: int = 0) -> Function:
    """Return the function with a new value for an old one where its lines read, from a line on, and in its returns."""

    def change(name: str) -> Ref:
        return Ref(new if name == old else name)

    changed = [
        replace(line, args=map_references(line.args, change),
                kwargs=tuple((key, map_references(item, change)) for key, item in line.kwargs))
        if at >= start and old in line.uses else line for at, line in enumerate(function.lines)
    ]  # fmt: skip
    returns = tuple((key, change(name).name) for key, name in function.returns)
    return replace(function, lines=tuple(changed), returns=returns)


def through(function: Function, name: str, steps: Sequence[tuple[str, tuple[Any, ...], torch.dtype]]) -> Function:
    """Return the function with a value going through some operators as soon as it is there; casts need no arguments."""
    value = function.values()[name]
    at = next((place + 1 for place, line in enumerate(function.lines) if value in line.results), 0)
    more, last = [], name
    for place, (op, args, dtype) in enumerate(steps):
        result = Value(f"{name}_through_{place}", replace(value.type, dtype=dtype))
        kwargs = (("dtype", dtype),) if op == "aten._to_copy.default" else ()
        more.append(Line((result,), op, (Ref(last), *args), kwargs, function.lines[max(at - 1, 0)].origin))
        last = result.name
    later = reading(function, name, last, at)
    return replace(later, lines=(*later.lines[:at], *more, *later.lines[at:]))


def with_argument(line: Line, place: int, item: Any) -> Line:
    """Return the line with another argument at a place."""
    return replace(line, args=(*line.args[:place], item, *line.args[place + 1 :]))


def stacked(line: Line, items: list[Any]) -> Line:
    """Return a stacking line with other items."""
    result = line.made[0]
    longer = replace(result, type=replace(result.type, shape=(len(items),)))
    return replace(line, results=(longer,), args=(items,))


def with_lines(programs: Programs, action: str, changed: Mapping[int, Line]) -> Programs:
    """Return the programs with some lines of a main function replaced."""
    old = programs[action].main.lines
    return with_main(programs, action, lines=tuple(changed.get(at, line) for at, line in enumerate(old)))


def with_main(programs: Programs, action: str, **changes: Any) -> Programs:
    """Return the programs with parts of a main function replaced."""
    return with_function(programs, action, replace(programs[action].main, **changes))


def with_function(programs: Programs, action: str, function: Function) -> Programs:
    """Return the programs with one function in place of its namesake."""
    program = programs[action]
    functions = tuple(function if known.name == function.name else known for known in program.functions)
    return {**programs, action: replace(program, functions=functions)}
