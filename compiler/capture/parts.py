"""Decompositions of one operator: the graph of the operators that it consists of, inlined in its place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..ops.results import changed
from ..torch_private import trace
from .node_facts import copy_place, keep_value, noted


class _Recorder(TorchDispatchMode):
    """A mode that records the operators that run in it on fake tensors, in a quarter of the time of ``make_fx`` for the
    few operators of a composite."""

    def __init__(self, operands: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._tensors: list[torch.Tensor] = []  # while a tensor lives, no other has its number
        for at, operand in enumerate(operands):
            self._note(self.graph.placeholder(f"arg{at}"), operand)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a question about a tensor, such as its device
            return results
        call = self._in_nodes(args), self._in_nodes(kwargs or {})
        name = func.overloadpacket.__name__
        node = self.graph.create_node("call_function", func, *call, name=name)
        if isinstance(results, torch.Tensor):
            self._note(node, results)
        else:
            noted(node).value = results
            for at, result in enumerate(results or ()):
                if isinstance(result, torch.Tensor):
                    self._note(self.graph.call_function(operator.getitem, (node, at)), result)
        return results

    def finish(self, results: Any) -> fx.Graph:
        """Return the graph, which returns ``results``."""
        self.graph.output(self._in_nodes(results))
        return self.graph

    def _note(self, node: fx.Node, value: torch.Tensor) -> None:
        noted(node).value = value
        self._nodes[id(value)] = node
        self._tensors.append(value)

    def _in_nodes(self, item: Any) -> Any:
        return changed(item, lambda tensor: self._nodes[id(tensor)])


def parts_of(
    node: fx.Node, function: Callable[..., Any], decompositions: Mapping[Any, Callable[..., Any]] | None = None
) -> fx.Graph:
    """Trace a call of ``function`` with the arguments of ``node``. The operands of ``node`` are the placeholders of the
    graph."""
    call, operands = _call_with_operands(node, function)
    return trace(call, operands, tree_leaves(noted(node).value)[0].fake_mode, decompositions)


def composite_parts(node: fx.Node) -> fx.Graph | None:
    """Return the graph of torch's decomposition of a composite operator; None where it reads a tensor that is no
    operand. The operands of ``node`` are the placeholders of the graph."""
    call, operands = _call_with_operands(node, node.target)
    if len({id(operand) for operand in operands}) < len(operands):  # two nodes for one tensor
        operands = [operand.detach() for operand in operands]
    recorder = _Recorder(operands)
    try:
        # with the Python dispatcher, as in torch's own traces: some composites decompose into others in Python
        with tree_leaves(noted(node).value)[0].fake_mode, enable_python_dispatcher(), recorder:
            results = call(*operands)
        return recorder.finish(results)
    except KeyError:
        return None


def _call_with_operands(node: fx.Node, function: Any) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    places = {operand: at for at, operand in enumerate(node.all_input_nodes)}

    def call(*values: torch.Tensor) -> Any:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda operand: values[places[operand]])
        return function(*args, **kwargs)

    return call, [noted(operand).value for operand in places]


def inline(graph: fx.Graph, node: fx.Node, parts: fx.Graph, operands: Sequence[Any], placed: bool = False) -> None:
    """Replace an operator by the nodes of ``parts``. They get the operator's place in the model's code, unless they
    have their own (``placed``)."""
    placeholders = [part for part in parts.nodes if part.op == "placeholder"]
    mapping: dict[fx.Node, fx.Node] = dict(zip(placeholders, operands, strict=True))
    with graph.inserting_before(node):
        outputs: Any = graph.graph_copy(parts, mapping)
    for old, new in mapping.items():
        if old.op == "call_function" and not placed:
            keep_value(new)
            copy_place(node, new)
    if isinstance(outputs, fx.Node):
        node.replace_all_uses_with(outputs)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)
