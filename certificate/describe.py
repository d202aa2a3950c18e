"""The first difference of two meanings, told in words."""

from __future__ import annotations

from .letters import Read
from .meaning import Table, Value


def describe(table: Table, value: Value, expected: Value) -> str:
    """Return the first difference of two values in words: node below node, until what they read is another."""
    lines = []
    one: Value | Read = value
    other: Value | Read = expected
    for depth in range(40):
        a, b = table.nodes[one.node], table.nodes[other.node]
        pad = "  " * depth
        if one.node == other.node:
            lines.append(f"{pad}{a.op}: {one.coefficient} at {one.maps} beside {other.coefficient} at {other.maps}")
            break
        lines.append(f"{pad}{a.op} {a.args or ''} {a.sizes} {a.inner} beside {b.op} {b.args or ''} {b.sizes} {b.inner}")
        left, right = ([r for r in x.reads if r not in y.reads] for x, y in ((a, b), (b, a)))
        if a.op != b.op or not left or len(left) != len(right):
            break
        one, other = left[0], right[0]
    return "\n".join(lines)
