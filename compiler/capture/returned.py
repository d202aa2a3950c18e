"""The tensors that a model returns, as further outputs of its captured graph."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import fx

from .capture import Captured
from .node_facts import noted
from .reach import ancestors


def reading_only(captured: Captured, parameters: Collection[str]) -> Captured:
    """Return a captured model without the returned tensors that need other parameters than these."""
    every: Any = captured.graph.output_node().args[0]
    first = len(every) - len(captured.returned)
    kept = []
    for name, node in zip(captured.returned, every[first:], strict=True):
        bindings = (noted(read).binding for read in ancestors([node]) if read.op == "placeholder")
        if all(binding.kind != "parameter" or binding.name in parameters for binding in bindings):
            kept.append((name, node))
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(captured.graph, copies)
    graph.output(tuple(copies[node] for node in (*every[:first], *(node for _, node in kept))))
    graph.eliminate_dead_code()
    return replace(captured, graph=graph, returned=tuple(name for name, _ in kept))
