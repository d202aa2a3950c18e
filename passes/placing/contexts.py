"""Contexts: the attentions that lines of ``context`` speak of."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.ops.own_ops import OPS
from ...compiler.resolve.in_graph import ContextLine
from ...compiler.resolve.names import is_within


def heads_over(graph: fx.Graph, lines: Sequence[ContextLine]) -> dict[fx.Node, list[str]]:
    """Return the axes that split the heads of each attention (Ulysses), where there are any."""
    found: dict[fx.Node, list[str]] = {}
    for line in (line for line in lines if line.method == "ulysses"):
        for node in graph.nodes:
            module = noted(node).origin.module
            if node.target is OPS.attention.default and any(is_within(module, outer) for outer in line.modules):
                found.setdefault(node, []).append(line.axis)
    return found
