"""A traced graph, rewritten so that its operators write nothing, and none returns sometimes a view and sometimes a
copy."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from ..ops.rules import facts
from ..ops.torch_ops import aten
from ..torch_private import decomposed, is_composite, trace
from .node_facts import copy_place, keep_value, noted
from .writes import own_writes, without_writes

_REGION: Any = torch.ops.higher_order.wrap_with_set_grad_enabled


def functional(exported: ExportedProgram) -> ExportedProgram:
    """Return an export with the graph that ``run_decompositions({})`` would make by tracing the whole model twice more.
    A graph that writes into nothing but values of its own is rewritten in place instead: regions are inlined, and equal
    composite calls are traced once."""
    if _rewritten(exported.graph, exported.graph_module):
        return exported
    return decomposed(exported)


def _rewritten(graph: fx.Graph, module: fx.GraphModule) -> bool:
    """Rewrite a graph. Return False, and leave it as it was, if something in it writes, or may write."""
    bodies = {region: _body(module, region) for region in graph.find_nodes(op="call_function", target=_REGION)}
    known = {*bodies, *(region.args[1] for region in bodies)}
    writes = {part: own_writes(part) for part in (graph, *bodies.values())}
    nodes = [node for part in writes for node in part.nodes if node not in known]
    if not all(_is_plain(node, writes[node.graph].get(node, node.target)) for node in nodes):
        return False
    parts: dict[str, fx.Graph] = {}
    for node in nodes:
        if is_composite(node.target) and (call := _call(node)) not in parts:
            if not isinstance(next(iter(tree_leaves(noted(node).value)), None), FakeTensor):
                return False
            with enable_python_dispatcher():  # as torch has it there: some composites are made of others in Python
                parts[call] = parts_of(node, node.target)
            if not all(map(_is_view_or_copy, parts[call].nodes)):  # it may be made of a composite that stays whole
                return False
    for part, forms in writes.items():
        without_writes(part, forms)
    for region, body in bodies.items():
        inline(graph, region, body, region.args[2:], placed=True)
    for node in list(graph.nodes):
        if is_composite(node.target):
            inline(graph, node, parts[_call(node)], node.all_input_nodes)
    graph.eliminate_dead_code()
    return True


def _body(module: fx.GraphModule, region: fx.Node) -> fx.Graph:
    inner: Any = getattr(module, region.args[1].target)  # type: ignore[union-attr, arg-type]
    graph: fx.Graph = inner.graph
    return graph


def _is_plain(node: fx.Node, target: Any) -> bool:
    """Return whether an operator, in the form ``target``, writes to no tensor, and gives real tensors of known
    shapes."""
    if node.op != "call_function" or target is operator.getitem:
        return node.op != "get_attr"
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or not facts(target).exported:
        return False
    results = [value for value in tree_leaves(noted(node).value) if value is not None]
    return all(
        isinstance(value, torch.Tensor) and not value.is_complex() and all(type(size) is int for size in value.shape)
        for value in results
    )


def _is_view_or_copy(part: fx.Node) -> bool:
    target: Any = part.target
    if part.op != "call_function" or target is operator.getitem or target is aten._assert_tensor_metadata.default:
        return part.op != "get_attr"
    row = facts(target)
    plain = row.moves in ("copy", "shape") or row.casts or row.law != ""
    return _is_plain(part, target) and (
        plain or any(result.alias_info is not None for result in target._schema.returns)
    )


def _call(node: fx.Node) -> str:
    """Return a key that is equal for calls that consist of the same parts."""
    places = {operand: at for at, operand in enumerate(node.all_input_nodes)}

    def described(operand: fx.Node) -> str:
        value = noted(operand).value
        lies = f"{list(value.shape)} {value.stride()} {value.storage_offset()} {value.device}"
        return f"{places[operand]}: {value.dtype} {lies}"

    return f"{node.target} {fx.node.map_arg((node.args, dict(node.kwargs)), described)}"


def parts_of(
    node: fx.Node, function: Callable[..., Any], decompositions: Mapping[Any, Callable[..., Any]] | None = None
) -> fx.Graph:
    """Trace a call of ``function`` with the arguments of ``node``. The operands of ``node`` are the placeholders of the
    graph."""
    places = {operand: at for at, operand in enumerate(node.all_input_nodes)}

    def call(*values: torch.Tensor) -> Any:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda operand: values[places[operand]])
        return function(*args, **kwargs)

    mode = tree_leaves(noted(node).value)[0].fake_mode
    return trace(call, [noted(operand).value for operand in places], mode, decompositions)


def inline(graph: fx.Graph, node: fx.Node, parts: fx.Graph, operands: Sequence[Any], placed: bool = False) -> None:
    """Replace an operator by the nodes of ``parts``. They get the operator's place in the model's code, unless they are
    ``placed``."""
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
