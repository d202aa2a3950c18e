"""Fusion: operators that the canonical form took apart and partition left together become one again."""

from __future__ import annotations

import torch
from torch import fx

from ...compiler.capture.node_facts import noted
from ..programs.segments import node_type


def fuse_bias(graph: fx.Graph) -> None:
    """Make ``linear(x, w) + b`` one operator again, where no conversion came between."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        product, bias = node.args
        if not isinstance(product, fx.Node) or product.target is not aten.linear.default or len(product.args) != 2:
            continue
        if len(product.users) != 1 or not isinstance(bias, fx.Node) or len(node_type(bias).shape) != 1:
            continue
        if noted(product).types != noted(node).types:
            continue
        if node_type(product).placement.partial:
            continue
        node.target, node.args = aten.linear.default, (*product.args, bias)
        graph.erase_node(product)
