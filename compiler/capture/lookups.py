"""Look-ups of positions: numbers that a model counts by itself, which must be rows of the table that it looks them up
in. A table that ranks split would give zeros for others, where the plain module fails.

Positions are counted over all entries, or over those of an input that are not padding, as in
``(ids != pad).cumsum(1)``: the largest is then that of a sequence without padding. Other numbers that depend on inputs
are not known before a run: ``(ids == end).cumsum(1)`` numbers the parts of a sequence, which may be few.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from ..ops.own_ops import aten
from ..ops.rules import facts
from .node_facts import noted


def beyond_tables(graph: fx.Graph) -> Iterator[tuple[fx.Node, int, int]]:
    """Yield each look-up of a position that a table does not have: the operator, the largest position, and the number
    of the table's rows."""
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
    row, terms = facts(target), value.args[:2]
    if target is aten.cumsum.default and _is_mask(value.args[0]):
        return int(noted(value).value.shape[value.args[1]])
    if row.computes == "total" and not value.kwargs:
        found = [_largest(term) for term in terms]
        return sum(term for term in found if term is not None) if None not in found else None
    if row.computes == "multiple" and any(map(_is_mask, terms)):
        return next((most for most in map(_largest, terms) if most is not None), None)
    if row.casts or row.moves in ("copy", "shape", "dims"):
        return _largest(value.args[0])
    return None


def _is_mask(value: object) -> bool:
    """Return whether a value says which entries of an input are not a number, such as that of padding."""
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return False
    of: Any = value.args[0] if value.args else None
    if value.target is aten.ne.Scalar:
        return isinstance(of, fx.Node) and of.op == "placeholder" and noted(of).binding.kind == "input"
    return (facts(value.target).casts or facts(value.target).moves in ("copy", "shape", "dims")) and _is_mask(of)
