"""The layers of a model that route tokens to experts."""

from __future__ import annotations

from torch import fx

from ..ops.expert_ops import OPS
from .node_facts import noted


def routed_layers(graph: fx.Graph) -> dict[str, fx.Node]:
    """Return the node that packs tokens by expert, for each module that does."""
    layers: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=OPS.pack.default):
        layers.setdefault(noted(node).origin.module, node)
    return layers


def chosen_experts(pack: fx.Node) -> fx.Node:
    """Return the node that says which experts each token chose: [experts, tokens]."""
    chosen = pack.args[1]
    assert isinstance(chosen, fx.Node)
    return chosen
