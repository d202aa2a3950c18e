"""Totals: values that a program can add, as it makes them, to the sum of earlier microbatches, also after its sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import torch

from ..ops.rules import facts
from .aliases import may_alias
from .program import Function, Line, Program, Value

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
