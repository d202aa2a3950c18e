"""Selections by a tensor of one number, ``x[:, i]``, as lookups."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses import FakeTensor

from ..ops.own_ops import aten
from ..ops.results import changed
from .node_facts import copy_facts, noted


def select_by_tensors(graph: fx.Graph) -> None:
    """Replace ``x[:, i]`` with a tensor ``i`` of one number by an index with that tensor: torch would read the number
    from it."""
    for node in list(graph.nodes):
        number = node.args[2] if node.target is aten.select.int else None
        if not isinstance(number, fx.Node) or number.target is not aten.item.default:
            continue
        (index,) = number.all_input_nodes
        if noted(index).value.dtype in (torch.int64, torch.int32):
            x, dim = node.args[:2]
            with graph.inserting_before(node):
                lookup = graph.call_function(aten.index.Tensor, (x, [None] * (dim % noted(x).value.dim()) + [index]))
            copy_facts(node, lookup)
            node.replace_all_uses_with(lookup)
            graph.erase_node(node)
            if not number.users:
                graph.erase_node(number)
    for node in graph.nodes:  # what was selected, and views of it, began at a place that was not known
        noted(node).value = changed(noted(node).value, _in_its_own_place)


def _in_its_own_place(value: FakeTensor) -> torch.Tensor:
    if not isinstance(value.storage_offset(), torch.SymInt):
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
