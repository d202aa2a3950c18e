"""Regions under ``torch.no_grad()``: their results are detached before the regions are inlined."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from .node_facts import copy_facts, noted


def detach_without_gradients(module: fx.GraphModule) -> bool:
    """Detach the results of regions under ``torch.no_grad()``, which their inlining would forget. Return False where
    regions are nested."""
    regions = [
        node
        for node in module.graph.nodes
        if node.op == "call_function" and str(node.target) == "wrap_with_set_grad_enabled"
    ]
    for region in regions:
        enabled, body = region.args[:2]
        inner: Any = getattr(module, str(body.target))
        if any(str(node.target) == "wrap_with_set_grad_enabled" for node in inner.graph.nodes):
            return False
        if enabled:
            continue
        output = inner.graph.output_node()
        with inner.graph.inserting_before(output):
            output.args = fx.node.map_arg(output.args, partial(_detached, inner.graph))
        inner.recompile()
    return True


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = noted(node).value
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return node
    detach = graph.call_function(torch.ops.aten.detach.default, (node,))
    copy_facts(node, detach)
    return detach
