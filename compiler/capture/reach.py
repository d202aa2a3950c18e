"""Reach: the nodes of a graph through which gradients flow to parameters, and those that depend on no parameter.

Checks do not use it: the certificate derives gradients from the text of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache

import torch
from torch import fx

from ..ops.own_ops import OPS
from ..ops.rules import facts
from ..program.binding import BUFFERS, Binding, Kind
from .node_facts import noted


class GradientFlow:
    """The nodes whose gradient flows on to a parameter: ``node in flow``. Answers are cached, so the graph must not
    change meanwhile."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, bool] = {}
        self._carries = cache(carries_gradient)

    def __contains__(self, node: fx.Node) -> bool:
        pending = [node]
        while pending:
            last = pending[-1]
            read = last.all_input_nodes if self._carries(last) else []
            if unknown := [operand for operand in read if operand not in self._known]:
                pending += unknown
                continue
            trained = last.op == "placeholder" and noted(last).binding.kind == "parameter"
            self._known[last] = self._carries(last) and (trained or any(self._known[operand] for operand in read))
            pending.pop()
        return self._known[node]


def carries_gradient(node: fx.Node) -> bool:
    """Return whether a gradient of some result of an operator flows back to its operands."""
    if facts(node.target).stops_gradient or node.target is OPS.row_max.default:  # its result is only subtracted
        return False
    value, types = noted(node).value, () if noted(node).value is not None else noted(node).types
    values = value if isinstance(value, (tuple, list)) else (value,)
    dtypes = [*(v.dtype for v in values if isinstance(v, torch.Tensor)), *(t.dtype for t in types if t is not None)]
    return any(dtype.is_floating_point for dtype in dtypes)


def reached_by_gradient(loss: fx.Node) -> set[fx.Node]:
    """The nodes, parameters among them, to which a gradient of the loss flows back."""
    reached, pending = set[fx.Node](), [loss]
    while pending:
        node = pending.pop()
        if node not in reached and carries_gradient(node):
            reached.add(node)
            pending += node.all_input_nodes
    return reached


def ancestors(roots: Iterable[fx.Node], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Return the roots and all nodes that they depend on. The search does not go beyond the nodes in ``stop``."""
    reached: set[fx.Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            if node not in stop:
                pending.extend(node.all_input_nodes)
    return reached


def made_of(graph: fx.Graph, kinds: Collection[Kind], but: Collection[Binding] = ()) -> set[fx.Node]:
    """Return the placeholders bound to one of ``kinds`` but not to one of ``but``, and the operators that only these
    reach."""
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        binding = noted(node).binding
        if node.op == "placeholder":
            belongs = binding.kind in kinds and binding not in but
        else:
            belongs = node.op == "call_function" and reached.issuperset(node.all_input_nodes)
        if belongs:
            reached.add(node)
    return reached


FIXED: Collection[Kind] = (*BUFFERS, "key")
"""Kinds of bindings that do not depend on the microbatch, and are not trained."""


def computed_anywhere(graph: fx.Graph, updates: Collection[str]) -> set[fx.Node]:
    """Return the operators that no parameter, random stream or updated buffer reaches: positions, rotary tables, masks.
    Any stage of a pipeline can compute them itself."""
    free = made_of(graph, ("input", *BUFFERS), [Binding("buffer", name) for name in updates])
    return {node for node in free if node.op == "call_function"}
