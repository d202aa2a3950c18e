"""Dims of a parameter, followed to all values computed from it. The rule of an operator says where it puts them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import TypeVarTuple

from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.layout.stretches import Outer
from ...compiler.ops.factors import OpRule
from ...compiler.ops.splits import from_factor
from ...compiler.program.binding import PARAMETERS
from ..calls import ValueKey, computes, key_of, operands_of, rule_of
from ..canonical.canonicalize import canonical_form

_State = TypeVarTuple("_State")


class Follower:
    """A walk that follows dims of parameters forward through a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        bound = [(noted(node).binding, node) for node in graph.find_nodes(op="placeholder")]
        self.parameters = {binding.name: (node, 0) for binding, node in bound if binding.kind in PARAMETERS}
        self.computed = {node for binding, node in bound if binding.kind == "input"}
        """The inputs, and all nodes that depend on them."""
        self.rule = cache(lambda node: rule_of(node)[0])
        self._readers: dict[ValueKey, list[tuple[fx.Node, int]]] = {}
        for node in graph.nodes:
            if not self.computed.isdisjoint(node.all_input_nodes):
                self.computed.add(node)
            for index, operand in enumerate(operands_of(node) if computes(node) else ()):
                self._readers.setdefault(key_of(operand), []).append((node, index))

    def readings(
        self, pending: list[tuple[ValueKey, *_State]]
    ) -> Iterator[tuple[tuple[ValueKey, *_State], fx.Node, OpRule, int]]:
        """Yield every operator that reads a pending value: the pending state, the operator, its rule, and the index of
        the operand. States that the caller adds meanwhile are followed too: first ``[(weight, 0)]``, then the
        ``factor_places`` of dim 0's factor."""
        seen = set()
        while pending:
            state = pending.pop(0)
            for node, index in self._readers.get(state[0], ()) if state not in seen else ():
                yield state, node, self.rule(node), index
            seen.add(state)


@lru_cache(maxsize=2)
def canonical_follower(graph: fx.Graph) -> Follower:
    """Return the walk through the canonical form of a captured graph."""
    return Follower(canonical_form(graph, False))


def factor_places(node: fx.Node, rule: OpRule, factor: str, outer: Outer = 1) -> Iterator[tuple[ValueKey, int, Outer]]:
    """Yield the places of a part of a factor in a node's results: the result, its dim, and the outer parts there."""
    for index, dims in enumerate(rule.results):
        place = from_factor(rule, dims, factor, outer)
        if place is not None:
            yield (node, index), *place
