"""Fuse: what canonical form took apart and partition left together becomes one operator again."""

from __future__ import annotations

import torch
from torch import fx


def fuse_bias(graph: fx.Graph) -> None:
    """``linear(x, w) + b`` is one operator again where no conversion came between."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        product, bias = node.args
        if not isinstance(product, fx.Node) or product.target is not aten.linear.default or len(product.args) != 2:
            continue
        if len(product.users) != 1 or not isinstance(bias, fx.Node) or len(bias.meta["types"][0].shape) != 1:
            continue
        if product.meta["types"] != node.meta["types"]:
            continue
        if product.meta["types"][0].placement.partial:
            continue
        node.target, node.args = aten.linear.default, (*product.args, bias)
        graph.erase_node(product)
