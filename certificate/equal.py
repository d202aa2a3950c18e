"""Equality: whether two meanings are one, in whatever order sums are made, and their first difference in words."""

from __future__ import annotations

from collections.abc import Mapping

from .letters import Letter, Read
from .meaning import Table, Value


def equal(table: Table, one: Read, other: Read, sizes: Mapping[Letter, int]) -> bool:
    """Return whether two reads are the same: as they are, or without names of sums, or with each product summed over
    all its letters at once."""
    if one == other:
        return True
    parts = [table.straight(table.part(read, sizes)) for read in (one, other)]
    for form in (lambda read: read, lambda read: unnamed(table, read, sizes), lambda read: at_once(table, read, sizes)):
        parts = [form(read) for read in parts]
        if parts[0] == parts[1]:
            return True
    return False


def unnamed(table: Table, read: Read, sizes: Mapping[Letter, int]) -> Read:
    """Return a read whose sum, or that of a factor, has the terms of named sums in the place of these: what is added up
    in another order has other names."""
    node = table.node(read.node)
    if node.op == "product" and not node.inner:
        return table.product(read.coefficient, [unnamed(table, r, sizes) for r in table.inside(read, node)], sizes)
    return table.sum(table.terms(read), sizes) if node.op in ("sum", "named sum") else read


def at_once(table: Table, read: Read, sizes: Mapping[Letter, int]) -> Read:
    """Return a read whose products are summed over all their letters at once: ``sum_b a[b] * sum_i c[i] * d[b, i]``,
    of which a rank with one ``b`` sums over ``i`` first, is one sum over both."""
    node = table.node(read.node)
    if node.op == "sum":
        return table.sum([at_once(table, term, sizes) for term in table.terms(read)], sizes)
    if node.op != "product":
        return read
    stack, lengths, inner = table.opened(node, dict(enumerate(read.maps)), sizes, set())
    factors: list[Read] = []
    while stack:
        factor = stack.pop()
        node = table.node(factor.node)
        if node.op != "product" or factor.coefficient != 1:
            factors.append(factor)
            continue
        more, lengths, inner = table.opened(node, dict(enumerate(factor.maps)), lengths, inner)
        stack += more
    if not inner:
        return table.product(read.coefficient, [at_once(table, factor, sizes) for factor in factors], sizes)
    at, maps, _ = table.make("product", (), factors, lengths, inner, commutes=True)
    return Read(read.coefficient, at, maps)


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
