"""The longest sequence that a model's tables of positions have rows for. Tensors that hold nothing show no such end."""

from __future__ import annotations

from collections.abc import Mapping
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
        try:
            values[node] = _computed(node, recorded, values)
        except (IndexError, RuntimeError):  # a table among buffers or constants ends before
            return length // 2
        if node.op == "call_function" and facts(node.target).looks_up:
            table, index = operands_of(node)[:2]
            found, rows = values.get(index), noted(table).value.shape[0]
            if found is not None and found.numel() and (beyond := int(found.max()) + 1 - rows) > 0:
                length = min(length, max(_power(length - beyond), 1))
    return length


def _power(size: int) -> int:
    """Return the largest power of two that is not larger."""
    return 1 << max(size.bit_length() - 1, 0)


def _computed(node: fx.Node, recorded: Recorded, values: Mapping[fx.Node, Any]) -> Any:
    """Return the numbers that a node has where they follow from positions and tokens; None if they depend on more."""
    with unset_fake_temporarily():
        if node.op == "placeholder":
            binding, value = noted(node).binding, noted(node).value
            if binding.kind == "input" and not value.is_floating_point():
                return torch.full(tuple(value.shape), _TOKEN, dtype=value.dtype)
            known = binding.kind == "buffer" and binding.name in recorded.recipes and value.numel() <= _MOST
            return recorded.recipes[binding.name].whole() if known else None
        tensors = tensors_of(node)
        if node.op != "call_function" or not all(isinstance(t, torch.Tensor) and t.numel() <= _MOST for t in tensors):
            return None
        if any(values.get(operand) is None for operand in node.all_input_nodes):
            return None
        args, kwargs = substitute_nodes((node.args, node.kwargs), values.__getitem__)
        operator: Any = node.target
        return operator(*args, **kwargs)
