"""Look-ups of positions: numbers that a model counts by itself, which must be rows of the table that it looks them up
in. A table that ranks split would give zeros for others, where the plain module fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from ..ops.rules import facts
from .node_facts import noted


def beyond_tables(graph: fx.Graph) -> Iterator[tuple[fx.Node, int, int]]:
    """Yield each look-up of a position that a table does not have: the operator, the largest position, and the number
    of the table's rows. Numbers that depend on inputs are not known before a run."""
    for node in graph.nodes:
        counted = facts(node.target).counted if node.op == "call_function" else None
        if counted is None or not facts(node.target).looks_up:
            continue
        at, dim = counted
        table, index = node.args[at], node.args[facts(node.target).named_at]
        most = _largest(index) if isinstance(index, fx.Node) else None
        if most is not None and isinstance(table, fx.Node) and most >= noted(table).value.shape[dim]:
            yield node, most, int(noted(table).value.shape[dim])


def _largest(value: object) -> int | None:
    """Return the largest whole number of a value that is counted, moved or added to; None of any other value."""
    if isinstance(value, int):
        return value
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return None
    target: Any = value.target
    if facts(target).counts:
        given = dict(zip((argument.name for argument in target._schema.arguments), value.args, strict=False))
        start, step, count = given.get("start", 0), given.get("step", 1), noted(value).value.numel()
        whole = count and isinstance(start, int) and isinstance(step, int)
        return max(start, start + (count - 1) * step) if whole else None
    row = facts(target)
    if row.computes == "total" and not value.kwargs:
        terms = [_largest(term) for term in value.args[:2]]
        return sum(term for term in terms if term is not None) if None not in terms else None
    if row.casts or row.moves in ("copy", "shape", "dims"):
        return _largest(value.args[0])
    return None
