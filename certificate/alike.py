"""Templates: computations that are done once for all that is alike, such as equal layers and stages.

A row makes of its operands what depends on what it sees of the table: how nodes look, which of them are one, and, where
operands commute, their order. So its result for some operands is its result for others that look the same, with other
nodes in it. A `Template` has what was seen once (`Seen`), and does it again for other nodes: it compares how they look,
and makes what was made. All that a row derives from how nodes look is true of all nodes that look so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from .letters import Maps
from .meaning import Table, Value
from .nodes import MOST_LOOKED, Equals, Look, Seen

_MOST_TEMPLATES = 16
"""The most templates of one operator and operands that are read in one way."""
Results = Sequence[Value | None]


class _Step(NamedTuple):
    """A node that is made, by the number of its shape, or a leaf with that name; nodes are named by their places."""

    place: int
    shape: int
    operands: tuple[int, ...]
    look: Look
    leaf: int | None


class Template(NamedTuple):
    """A computation for any nodes that look the same. Nodes have places: those of the operands come first, then what
    is seen behind these, then what is made."""

    looks: list[tuple[int, Look, tuple[int, ...]]]
    steps: list[_Step]
    facts: list[tuple[int, Hashable]]
    parts: list[tuple[int, int, Maps]]
    equals: list[tuple[int, Equals]]
    results: Any

    def nodes(self, table: Table, nodes: list[int]) -> list[int] | None:
        """Return the nodes at all places, for those of the operands; None where they look otherwise."""
        for place, look, operands in self.looks:
            at = nodes[place]
            if table.looks[at] != look:
                return None
            for known, read in zip(operands, table.nodes[at].reads, strict=True):
                if known == len(nodes):
                    nodes.append(read.node)
                elif nodes[known] != read.node:
                    return None
        for place, shape, operands, look, leaf in self.steps:
            if leaf is None:
                reads = tuple([nodes[operand] for operand in operands])
                at = table.add(shape, reads)
                if table.looks[at] != look or (table.commutes(shape) and any(a > b for a, b in pairwise(reads))):
                    return None
            else:
                at = leaf
            if place == len(nodes):
                nodes.append(at)
            elif nodes[place] != at:
                return None
        if len(set(nodes)) < len(nodes) or not all(table.agree(nodes[place], fact) for place, fact in self.facts):
            return None
        if not all(table.equals[nodes[place]] == groups for place, groups in self.equals):
            return None
        for part, whole, maps in self.parts:
            table.keep_whole(nodes[part], nodes[whole], maps)
        return nodes

    def seen(self, nodes: Sequence[int]) -> Seen:
        """Return what is seen and made with these nodes."""
        seen = Seen()
        seen.looked = dict.fromkeys([nodes[place] for place, _, _ in self.looks])
        seen.made = {
            (nodes[step.place], step.shape, tuple([nodes[at] for at in step.operands])): None for step in self.steps
        }
        seen.parts = {(nodes[part], nodes[whole], maps): None for part, whole, maps in self.parts}
        seen.agreed = {(nodes[place], fact): None for place, fact in self.facts}
        seen.equals = {(nodes[place], groups): None for place, groups in self.equals}
        return seen


class Alike:
    """The templates of one table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._templates: dict[Hashable, list[Template]] = {}

    def forget(self) -> None:
        """Forget all templates, as the axes are counted otherwise now."""
        self._templates.clear()

    def value(self, what: Hashable, operands: Sequence[Value], compute: Callable[..., Value]) -> Value:
        """Return what is computed of values; ``what`` says all else that it depends on."""
        value: Value = self.results(what, operands, lambda: [compute(*operands)])[0]
        return value

    def results(self, what: Hashable, operands: Any, compute: Callable[[], Results]) -> list[Any]:
        """Return what is computed of operands; ``what`` says all else that it depends on."""
        table = self.table
        places = {table.one: 0, table.delta: 1}
        alike = _with_places(operands, places)
        key = what, alike, tuple([table.looks[at] for at in places])
        known = self._templates.setdefault(key, [])
        outer, table.seen = table.seen, None
        try:
            for template in known:
                if (nodes := template.nodes(table, list(places))) is not None:
                    if outer is not None:
                        outer.take(template.seen(nodes))
                    return [_with_nodes(value, nodes) for value in template.results]
            table.seen = seen = Seen()
            results = compute()
        finally:
            table.seen = outer
        if outer is not None:
            outer.take(seen)
        if not seen.deep and len(seen.looked) <= MOST_LOOKED and len(known) < _MOST_TEMPLATES:
            new = _template(table, seen, places, results)
            known += [] if new is None else [new]
        return list(results)


def _template(table: Table, seen: Seen, places: dict[int, int], results: Results) -> Template | None:
    """Return what was seen and made with nodes, by places of these; None where something is made of nodes that no
    operand reads, as the terms of a sum behind its name."""
    looks, steps = [], []
    for at in seen.looked:
        if (place := places.get(at)) is not None:  # else it is made below
            operands = tuple([places.setdefault(read.node, len(places)) for read in table.nodes[at].reads])
            looks.append((place, table.looks[at], operands))
    for at, shape, reads in seen.made:
        if not all(read in places for read in reads):
            return None
        operands = tuple([places[read] for read in reads])
        leaf = at if shape < 0 else None
        steps.append(_Step(places.setdefault(at, len(places)), shape, operands, table.looks[at], leaf))
    count, values = len(places), _with_places(results, places)
    if len(places) > count or not {at for at, _ in (*seen.agreed, *seen.equals)} <= places.keys():
        return None
    facts = [(places[at], fact) for at, fact in seen.agreed]
    parts = [(places[part], places[whole], maps) for part, whole, maps in seen.parts]
    equals = [(places[at], groups) for at, groups in seen.equals]
    return Template(looks, steps, facts, parts, equals, values)


def frozen(item: Any) -> Hashable:
    """Return arguments without values as what is equal for equal ones alone."""
    return (_with_places(item, {}),)


def _with_places(item: Any, places: dict[int, int]) -> Any:
    """Return operands or results with places for nodes. Numbers that are equal to those of other types differ."""
    kind = type(item)
    if kind is Value:
        place = places.setdefault(item.node, len(places))
        chosen = None if item.chosen is None else _with_places(item.chosen, places)
        return Value(item.coefficient, place, item.maps, item.dims, chosen)
    if kind is list or kind is tuple:
        return tuple([_with_places(each, places) for each in item])
    return (kind, item) if kind is bool or kind is float else item


def _with_nodes(value: Value | None, nodes: Sequence[int]) -> Value | None:
    if value is None:
        return None
    return Value(value.coefficient, nodes[value.node], value.maps, value.dims, _with_nodes(value.chosen, nodes))
