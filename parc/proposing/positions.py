"""The longest sequence that a model's tables of positions have rows for. Tensors that hold nothing show no such end."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from parc.compiler.capture.capture import Captured
from parc.compiler.capture.node_facts import noted
from parc.compiler.initial.recipes import Recorded
from parc.compiler.ops.rules import facts
from parc.passes.calls import operands_of, substitute_nodes, tensors_of

_TOKEN = 2
"""A token that stands for all: the first ones often pad, and have no position."""
_MOST = 1 << 20


def longest(captured: Captured, recorded: Recorded, length: int) -> int:
    """Return the largest length, at most the given one, at which every table has the rows that are looked up."""
    values: dict[fx.Node, Any] = {}
    for node in captured.graph.nodes:
        if node.op == "call_function" and facts(node.target).looks_up:
            table, index = operands_of(node)[:2]
            found, rows = _numbers(index, recorded, values), noted(table).value.shape[0]
            if found is not None and found.numel() and (beyond := int(found.max()) + 1 - rows) > 0:
                length = min(length, max(_power(length - beyond), 1))
    return length


def _power(size: int) -> int:
    """Return the largest power of two that is not larger."""
    return 1 << max(size.bit_length() - 1, 0)


def _numbers(node: fx.Node, recorded: Recorded, values: dict[fx.Node, Any]) -> Any:
    """Return the whole numbers that a node has, computed from positions and tokens; None if they depend on more."""
    if node not in values:
        values[node] = _computed(node, recorded, values)
    return values[node]


def _computed(node: fx.Node, recorded: Recorded, values: dict[fx.Node, Any]) -> Any:
    tensors = tensors_of(node)
    if any(not isinstance(value, torch.Tensor) or value.numel() > _MOST for value in tensors):
        return None
    with unset_fake_temporarily():
        if node.op == "placeholder":
            binding, value = noted(node).binding, tensors[0]
            if binding.kind == "input" and not value.is_floating_point():
                return torch.full(tuple(value.shape), _TOKEN, dtype=value.dtype)
            known = binding.kind == "buffer" and binding.name in recorded.recipes and not value.is_floating_point()
            return recorded.recipes[binding.name].whole() if known else None
        if node.op != "call_function" or tensors[0].is_floating_point():
            return None
        operands = {operand: _numbers(operand, recorded, values) for operand in operands_of(node)}
        if any(value is None for value in operands.values()):
            return None
        args, kwargs = substitute_nodes((node.args, node.kwargs), operands.__getitem__)
        operator: Any = node.target
        return operator(*args, **kwargs)
