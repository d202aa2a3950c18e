"""The layers of a model that route tokens to experts."""

from __future__ import annotations

from torch import fx

from ..ops.expert_ops import OPS
from .node_facts import noted


def routed_layers(graph: fx.Graph) -> dict[str, fx.Node]:
    """Return, for each module that packs tokens by expert, the node that says which are chosen: [experts, tokens]."""
    layers: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=OPS.pack.default):
        chosen = node.args[1]
        assert isinstance(chosen, fx.Node)
        layers.setdefault(noted(node).origin.module, chosen)
    return layers
