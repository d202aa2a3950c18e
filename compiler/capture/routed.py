"""The layers of a model that route tokens to experts."""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import fx

from ..ops.own_ops import OPS
from .node_facts import noted


class Routed(NamedTuple):
    """The routing of a layer: which experts are ``chosen``, [experts, tokens] or [experts, sequences, tokens], ``top``
    for each token; and the ``slots`` that they get, if experts have a capacity."""

    chosen: fx.Node
    top: int
    slots: fx.Node | None = None

    @property
    def experts(self) -> int:
        """The number of experts."""
        count: int = noted(self.chosen).value.shape[0]
        return count


def routed_layers(graph: fx.Graph) -> dict[str, list[Routed]]:
    """Return the layers of a graph that route tokens, by the module of their experts, with each routing of one."""
    layers: dict[str, list[Routed]] = {}
    for node in graph.nodes:
        if node.target == OPS.pack.default:
            _, chosen, top = cast(tuple[fx.Node, fx.Node, int], node.args)
            layers.setdefault(noted(node).origin.module, []).append(Routed(chosen, top))
        elif node.target == OPS.slots.default:
            chosen, _, top = cast(tuple[fx.Node, int, int], node.args)
            layers.setdefault(noted(node).origin.module, []).append(Routed(chosen, top, node))
    return layers
