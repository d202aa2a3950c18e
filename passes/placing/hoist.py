"""The place of ``I → R`` conversions: before operators of whole operands, toward the parameters, as a greatest
fixpoint."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ...compiler.layout.mesh import Mesh
from ...compiler.ops.splits import from_factor
from ..calls import ValueKey, computes, key_of, operands_of
from .propagate import Placed


def plan_hoist(
    graph: fx.Graph, mesh: Mesh, placed: Placed, grad: Mapping[ValueKey, bool]
) -> dict[fx.Node, frozenset[str]]:
    """Return the operators to compute in ``R``, with the axes.

    ``R`` is absorbing, so an operator is hoisted only if every reader is hoisted or is split and needs ``R`` there,
    and every operand that carries gradient is a parameter, is hoisted, is split (what a gather to ``R`` gets back is
    scattered), or has another reader that needs it in ``R``. Position embeddings and replicated key/value weights are,
    norms are not.
    """
    consumers: dict[ValueKey, list[fx.Node]] = {}
    for node in graph.nodes:
        if computes(node) or node.op == "output":
            for operand in node.all_input_nodes if node.op == "output" else operands_of(node):
                consumers.setdefault(key_of(operand), []).append(node)
    hoisted: dict[fx.Node, set[str]] = {}
    for axis in mesh.names:
        for node in _fixpoint(graph, axis, placed, grad, consumers):
            hoisted.setdefault(node, set()).add(axis)
    return {node: frozenset(axes) for node, axes in hoisted.items()}


def _fixpoint(
    graph: fx.Graph,
    axis: str,
    placed: Placed,
    grad: Mapping[ValueKey, bool],
    consumers: Mapping[ValueKey, list[fx.Node]],
) -> set[fx.Node]:
    def reads(consumer: fx.Node, key: ValueKey) -> bool:
        """Return whether a split reader holds the value whole: it then needs ``R``."""
        if not computes(consumer) or axis not in placed.parts[consumer]:
            return False
        rule, part = placed.rules[consumer], placed.parts[consumer][axis]
        terms = zip(operands_of(consumer), rule.operands, strict=True)
        return all(from_factor(rule, dims, *part) is None for n, dims in terms if key_of(n) == key)

    def readers(node: fx.Node) -> list[tuple[fx.Node, ValueKey]]:
        results = [(node, index) for index in range(len(placed.rules[node].results))]
        return [(consumer, key) for key in results for consumer in consumers.get(key, ())]

    def holds(node: fx.Node) -> bool:
        read = readers(node)
        if not read or not all(consumer in chosen or reads(consumer, key) for consumer, key in read):
            return False
        for operand in operands_of(node):
            key = key_of(operand)
            if not grad[key] or key[0] in chosen or key[0].op == "placeholder" or axis in placed.splits[key]:
                continue
            if not any(consumer is not node and reads(consumer, key) for consumer in consumers[key]):
                return False
        return True

    chosen = {
        node
        for node in graph.nodes
        if computes(node)
        and axis not in placed.parts[node]
        and axis not in placed.splits[node, 0]
        and grad[node, 0]
        and node not in placed.without_rule  # what its gradient is linear in is not known
    }
    pending = list(chosen)
    while pending:
        node = pending.pop()
        if node in chosen and not holds(node):
            chosen.remove(node)
            pending += [key_of(operand)[0] for operand in operands_of(node)]
            pending += [consumer for consumer, _ in readers(node)]
    return chosen
