"""Totals: what a program can add to the sum of earlier microbatches as it makes it, and after what it sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from .program import Function, Program

ADDABLE = frozenset({"aten.mm.default", "aten.embedding_dense_backward.default"})
"""Operators that can add what they make to something: the gradients of weights."""


def uses_of(function: Function) -> Counter[str]:
    """How often each value is read or returned."""
    read = Counter(name for line in function.lines for name in line.uses())
    return read + Counter(name for _, name in function.returns)


def addable(program: Program, operators: Collection[str] = ADDABLE) -> dict[str, frozenset[str]]:
    """For each function the values that may be added to a total as they are made: made by one of these operators, here
    or in a function that is called, and given back and nothing else."""
    found: dict[str, frozenset[str]] = {}
    for function in program.functions:
        uses, returned = uses_of(function), Counter(name for _, name in function.returns)
        names: set[str] = set()
        for line in function.lines:
            if line.calls_function:
                keys = program.function(line.op).returns
                inner = [value.name for value, (_, name) in zip(line.made, keys, strict=True) if name in found[line.op]]
            else:
                inner = [value.name for value in line.made] if line.op in operators else []
            names.update(name for name in inner if uses[name] == returned[name] == 1)
        found[function.name] = frozenset(names)
    return found


def lasting(function: Function, added: Collection[str]) -> set[str]:
    """What may be read after the function's last line, where what is ``added`` may be made then."""
    return {name for line in function.lines if any(v.name in added for v in line.made) for name in line.uses()}
