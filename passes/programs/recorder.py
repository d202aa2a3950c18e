"""A recorder of operators: the ATen graph, forward and backward, of a computation with tensors that hold no numbers.

    with GraphRecorder() as recorder:
        x = recorder.placeholder(torch.float32, (2, 3))
        y = (x.detach().requires_grad_() * 2).sum()
    recorder.finish(y)  # placeholder, detach, mul, sum, output

Unlike ``make_fx``, it runs no operator again whose results are remembered: it only makes a node.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from ...compiler.capture.node_facts import noted
from ...compiler.ops.results import changed, example, results_of
from ...compiler.torch_private import without_dispatch


class RecordedTensor(torch.Tensor):
    """A tensor without numbers. ``node`` is the one that made it, in the graph under record."""

    node: fx.Node
    example: torch.Tensor

    @staticmethod
    def of(like: torch.Tensor, node: fx.Node) -> RecordedTensor:
        """Return a tensor with the layout of an example."""
        tensor: RecordedTensor = torch.Tensor._make_wrapper_subclass(
            RecordedTensor, like.shape, strides=like.stride(), storage_offset=like.storage_offset(), dtype=like.dtype
        )
        tensor.example, tensor.node = like, node
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} outside of the recorder that made its operands")


def _writes(target: Any) -> bool:
    """Return whether an operator writes one of its operands: other views of the same storage then change too."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


class GraphRecorder(TorchDispatchMode):
    """A mode that records the graph of all operators that run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()

    def placeholder(self, dtype: torch.dtype, shape: Sequence[int]) -> RecordedTensor:
        """Add an input of the graph, a dense tensor."""
        node = self.graph.placeholder(f"arg{len(self.graph.nodes)}_1")
        noted(node).value = example(dtype, tuple(shape))
        return RecordedTensor.of(noted(node).value, node)

    def finish(self, results: Any) -> fx.Graph:
        """Return the graph, which returns ``results``, without operators that nobody reads."""
        self.graph.output(changed(results, lambda tensor: tensor.node))
        for node in reversed(self.graph.nodes):
            if node.op == "call_function" and not node.users and not _writes(node.target):
                self.graph.erase_node(node)
        return self.graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = args, kwargs or {}
        results = results_of(func, *changed(arguments, lambda tensor: tensor.example))
        node = self.graph.call_function(func, *changed(arguments, lambda tensor: tensor.node))
        noted(node).value = results.values
        if results.in_place:  # whoever reads the operand after this reads the node
            if results.values is not args[0].example:
                with without_dispatch():  # its sizes and strides are all that it has
                    func(*args, **(kwargs or {}))
            args[0].node, args[0].example = node, results.values
            return args[0]
        return self._made(node, results.values)

    def _made(self, node: fx.Node, values: Any) -> Any:
        if isinstance(values, torch.Tensor):
            return RecordedTensor.of(values, node)
        if not isinstance(values, (tuple, list)):
            return values
        parts: list[Any] = []
        for index, value in enumerate(values):
            if value is None:
                parts.append(None)
                continue
            part = self.graph.call_function(operator.getitem, (node, index))
            noted(part).value = value
            parts.append(self._made(part, value))
        return type(values)(parts)
