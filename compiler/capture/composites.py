"""A traced graph, rewritten so that its operators write nothing, and none returns sometimes a view and sometimes a
copy."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.utils._pytree import tree_leaves

from ..ops.own_ops import aten
from ..ops.rules import facts
from ..torch_private import decomposed, is_composite
from .node_facts import noted
from .parts import composite_parts, inline
from .writes import forms_that_make, without_writes

_REGION: Any = torch.ops.higher_order.wrap_with_set_grad_enabled


def functional(exported: ExportedProgram) -> ExportedProgram:
    """Return an export with the graph that ``run_decompositions({})`` would make by tracing the whole model twice more;
    a conjugate is not copied before it is read. A graph that writes into nothing but buffers and values of its own is
    rewritten in place instead: regions are inlined, and equal composite calls are traced once."""
    buffers = _own_buffers(exported)
    written = _rewritten(exported.graph, exported.graph_module, buffers)
    if written is None:
        return decomposed(exported)
    results: Any = exported.graph.output_node().args[0]
    exported.graph_signature.output_specs[:0] = [
        OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(new.name), buffers[node])
        for node, new in zip(written, results, strict=False)
    ]
    return exported


def _own_buffers(exported: ExportedProgram) -> Mapping[fx.Node, str]:
    """Return the placeholders of buffers with their names, in order, but for those whose memory others share."""
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    nodes = exported.graph.find_nodes(op="placeholder")
    values = {**exported.constants, **exported.state_dict}
    memory = {name: value.untyped_storage()._cdata for name, value in values.items() if isinstance(value, torch.Tensor)}
    times = Counter(memory.values())
    return {
        node: str(spec.target)
        for node in nodes
        if (spec := specs[node.name]).kind is InputKind.BUFFER and times[memory[str(spec.target)]] == 1
    }


def _rewritten(graph: fx.Graph, module: fx.GraphModule, buffers: Collection[fx.Node]) -> Sequence[fx.Node] | None:
    """Rewrite a graph, and return the buffers that it writes, in order: their new values are the first of its results.
    Return None, and leave it as it was, if something in it writes something else, or may."""
    bodies = {region: _body(module, region) for region in graph.find_nodes(op="call_function", target=_REGION)}
    known = {*bodies, *(region.args[1] for region in bodies)}
    forms = {part: forms_that_make(part, buffers) for part in (graph, *bodies.values())}
    nodes = [node for part in forms for node in part.nodes if node not in known]
    formed = {node: form.target for part in forms.values() for node, form in part.items()}
    if not all(_is_plain(node, formed.get(node, node.target)) for node in nodes):
        return None
    parts: dict[str, fx.Graph] = {}
    for node in nodes:
        if node not in formed and is_composite(node.target) and (call := _call(node)) not in parts:
            if not isinstance(next(iter(tree_leaves(noted(node).value)), None), FakeTensor):
                return None
            found = composite_parts(node)
            if found is None or not all(map(_is_view_or_copy, found.nodes)):  # of a composite that stays whole
                return None
            parts[call] = found
    newest = {part: without_writes(part, forms[part]) for part in forms}[graph]
    written, output = [node for node in buffers if node in newest], graph.output_node()
    results: Any = output.args[0]
    output.args = ((*map(newest.__getitem__, written), *results),)
    for region, body in bodies.items():
        inline(graph, region, body, region.args[2:], placed=True)
    for node in list(graph.nodes):
        if is_composite(node.target):
            inline(graph, node, parts[_call(node)], node.all_input_nodes)
    graph.eliminate_dead_code()
    return written


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
    return all(isinstance(value, torch.Tensor) and all(type(size) is int for size in value.shape) for value in results)


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
        lies += f" {value.is_conj()} {value.is_neg()}"  # facts of a tensor that torch may not have written yet
        return f"{places[operand]}: {value.dtype} {lies}"

    return f"{node.target} {fx.node.map_arg((node.args, dict(node.kwargs)), described)}"
