"""Joint trace: a segment's forward and backward on global shapes, with the type and provenance of every node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.capture.reach import ancestors
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Packed, Placement, TensorType, along, parse_kind
from ...compiler.ops.infer import infer, packed_result, place_created
from ...compiler.ops.own_ops import OPS, aten
from ...compiler.ops.precision import is_narrow
from ...compiler.ops.rules import facts
from ...compiler.program.program import Origin
from ...compiler.torch_private import quiet
from ..calls import call_of, operands_of, substitute_nodes, tensors_of
from .backward_forms import fold_zeros, free_creations, is_zero, simplify, write_functional
from .kept import kept_values, may_remake
from .recorder import GraphRecorder, RecordedTensor
from .segments import Segment, node_type


class InternalTypeFault(AssertionError):
    """The error of types that contradict each other inside the compiler: parc's fault, never the user's."""


@dataclass(slots=True)
class Joint:
    """A traced segment. ``forward`` and ``backward`` are lists of nodes in order; ``saved`` are the forward's nodes
    that backward reads; ``gradients`` pairs an input's index with its gradient's node."""

    inputs: list[fx.Node]
    outputs: list[fx.Node]
    tangents: dict[int, fx.Node]
    gradients: dict[int, fx.Node]
    forward: list[fx.Node] = field(default_factory=list)
    backward: list[fx.Node] = field(default_factory=list)
    saved: list[fx.Node] = field(default_factory=list)


@dataclass(slots=True)
class _Record:
    """The notes that are taken while a segment is traced."""

    owner: dict[fx.Node, Origin] = field(default_factory=dict)
    maker: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The segment's node that each of forward's nodes is a part of."""
    known: dict[fx.Node, Placement] = field(default_factory=dict)
    last: fx.Node | None = None
    forward_end: fx.Node | None = None
    """The last node that forward made, once it has run."""

    def claim(self, graph: fx.Graph, origin: Origin, maker: fx.Node | None = None) -> None:
        """Note ``origin``, and the ``maker``, as those of all nodes since the last claim."""
        new = list(takewhile(lambda node: node is not self.last, reversed(graph.nodes)))
        self.owner.update(dict.fromkeys(new, origin))
        if maker is not None:
            self.maker.update(dict.fromkeys(new, maker))
        self.last = new[0] if new else self.last


def trace_joint(segment: Segment, mesh: Mesh) -> Joint:
    """Trace ``outputs, gradients = segment(inputs, tangents)``; equal segments need one trace."""
    record = _Record()
    flows = [node in segment.flow for node in segment.inputs]
    flowing = [index for index, node in enumerate(segment.outputs) if node in segment.flow]
    with quiet(), torch.backends.mkldnn.flags(enabled=False), GraphRecorder() as recorder:
        types = map(node_type, [*segment.inputs, *(segment.outputs[index] for index in flowing)])
        values = [recorder.placeholder(type_.dtype, type_.shape) for type_ in types]
        inputs, tangents = values[: len(flows)], values[len(flows) :]
        leaves = [x.detach().requires_grad_() if flow else x for x, flow in zip(inputs, flows, strict=True)]
        record.last = next(iter(reversed(recorder.graph.nodes)), None)
        env: dict[fx.Node, Any] = dict(zip(segment.inputs, leaves, strict=True))
        _execute(segment, env, record, recorder.graph)
        record.forward_end = record.last
        outputs = [env[node] for node in segment.outputs]
        wanted = [leaf for leaf, flow in zip(leaves, flows, strict=True) if flow]
        gradients: Sequence[Any] = [None] * len(wanted)
        if wanted and flowing:
            gradients = torch.autograd.grad([outputs[i] for i in flowing], wanted, tangents, allow_unused=True)
        record.claim(recorder.graph, noted(segment.nodes[0]).origin)
    graph = recorder.finish((tuple(outputs), tuple(gradients)))
    return _read(graph, segment, record, flows, flowing, mesh)


def _execute(segment: Segment, env: dict[fx.Node, Any], record: _Record, graph: fx.Graph) -> None:
    """Run the segment's nodes. Note which traced nodes each of them made, and the type of its gradient when it
    arrives."""
    for node in segment.nodes:
        uses = {operand: _use(env[operand], operand, node, record, graph) for operand in node.all_input_nodes}
        args, kwargs = substitute_nodes((node.args, dict(node.kwargs)), uses.__getitem__)
        target: Any = FORMS.get(node.target, node.target)
        value = env[node] = target(*args, **kwargs)
        record.claim(graph, noted(node).origin, node)
        if not isinstance(value, RecordedTensor):
            continue
        record.known[value.node] = node_type(node).placement.data()
        if value.requires_grad:
            value.register_hook(_arrival(node, node, record, graph))


def _folding(product: Any) -> Callable[..., Any]:
    """Fold a product into one of matrices, as torch does. If nothing asks for the gradient of the smaller operand,
    torch would repeat that operand for entries that do not lie in order, and no type says how to split such a
    tensor."""

    def folded(x: torch.Tensor, other: torch.Tensor, *bias: torch.Tensor) -> Any:
        return product(x if x.dim() < 3 or other.dim() > 2 or other.requires_grad else x.contiguous(), other, *bias)

    return folded


def _rms_norm(x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Compose an RMS norm as torch does; torch writes ``eps`` rounded to the dtype, which would show in a run in
    another dtype."""
    wide = x.to(torch.float32) if is_narrow(x.dtype) else x
    mean = wide.pow(2).mean([*range(-len(shape), 0)], keepdim=True)
    normed: torch.Tensor = wide * aten.add.Scalar(mean, eps).rsqrt()
    return (normed if weight is None else normed * weight).to(x.dtype)


FORMS: Mapping[Any, Callable[..., Any]] = {
    **{product: _folding(product) for product in (aten.linear.default, aten.matmul.default)},
    aten.rms_norm.default: _rms_norm,
}
"""The function by which an operator is traced, where torch's own trace would not do."""


def _use(value: Any, operand: fx.Node, reader: fx.Node, record: _Record, graph: fx.Graph) -> Any:
    """Return an alias of a value for one reader, so that the gradient it sends back can be told from other readers'."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    alias = aten.alias.default(value)
    alias.register_hook(_arrival(operand, reader, record, graph))
    return alias


def _arrival(node: fx.Node, owner: fx.Node, record: _Record, graph: fx.Graph) -> Callable[[Any], None]:
    """Return a hook that types the gradient of a node's value, and notes that ``owner``'s gradient made the nodes
    before."""

    def hook(gradient: RecordedTensor | None) -> None:
        if owner is not node:
            record.claim(graph, noted(owner).origin)
        if gradient is not None:
            record.known.setdefault(gradient.node, node_type(node).placement.dual().data())

    return hook


def _read(graph: fx.Graph, segment: Segment, record: _Record, flows: Sequence[bool], flowing: Sequence[int],
          mesh: Mesh) -> Joint:  # fmt: skip
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inputs, tangents = placeholders[: len(flows)], placeholders[len(flows) :]
    types: dict[fx.Node, Placement] = {}
    kept: dict[fx.Node, Packed] = {}
    for node, source in zip(inputs, segment.inputs, strict=True):
        types[node] = node_type(source).placement.data()
        kept[node] = node_type(source).packed
    for node, index in zip(tangents, flowing, strict=True):
        types[node] = node_type(segment.outputs[index]).placement.dual().data()
        kept[node] = node_type(segment.outputs[index]).packed
    write_functional(graph)
    backward = list(takewhile(lambda node: node is not record.forward_end, reversed(graph.nodes)))[1:]
    zeros = fold_zeros([node for node in reversed(backward) if node.op == "call_function"])
    free = free_creations(graph, record.known, record.owner, zeros)
    made: Any
    for made, placement in list(record.known.items()):  # a gradient that is cast is typed before the cast already
        while facts(made.target).casts and made.args[0] not in record.known:
            made = made.args[0]
            record.known[made] = placement
    for node in graph.nodes:
        if node.op == "placeholder":
            noted(node).types = [_typed(noted(node).value, types[node], kept[node])]
        elif node.op == "call_function":
            noted(node).origin = record.owner.get(node, Origin())
            if node not in free:
                _place_free(node, free, mesh)
                _type_node(node, record.known, mesh)
    simplify(graph)
    traced: Any = graph.output_node().args[0]
    outputs_, gradients = traced
    flow_index = [index for index, flow in enumerate(flows) if flow]
    for index, gradient in zip(flow_index, gradients, strict=True):
        expected = node_type(segment.inputs[index]).placement.dual().data()
        if gradient in free:
            noted(gradient).types = [_typed(noted(gradient).value, expected)]
        if gradient is not None and node_type(gradient).placement != expected:
            raise InternalTypeFault(
                f"the gradient of input {index} of {segment.block} is {node_type(gradient).text(mesh)}, not {expected}"
            )
    joint = Joint(
        inputs,
        list(outputs_),
        dict(zip(flowing, tangents, strict=True)),
        {index: node for index, node in zip(flow_index, gradients, strict=True) if node is not None},
    )
    _split(joint, graph, segment, record.maker, mesh)
    return joint


def _place_free(node: fx.Node, free: set[fx.Node], mesh: Mesh) -> None:
    """Give the created operands of a node the types in which it needs them."""
    operands = operands_of(node)
    if free.isdisjoint(operands):
        return
    placements = [None if operand in free else node_type(operand).placement for operand in operands]
    zeros = frozenset(index for index, operand in enumerate(operands) if operand in free and is_zero(operand))
    for operand, placement in zip(operands, place_created(call_of(node), placements, zeros, mesh), strict=True):
        if operand in free:
            noted(operand).types = [_typed(noted(operand).value, placement)]


def _typed(value: torch.Tensor, placement: Placement, packed: Packed = None) -> TensorType:
    return TensorType(value.dtype, tuple(value.shape), placement, packed)


def _type_node(node: Any, known: Mapping[fx.Node, Placement], mesh: Mesh) -> None:
    """Type a traced node's results from its operands. They must be those that partition chose."""
    if node.target is operator.getitem:
        source, index = node.args
        noted(node).types = [noted(source).types[index]]
        return
    values = [value for value in tensors_of(node) if isinstance(value, torch.Tensor)]
    read = [node_type(operand) for operand in operands_of(node)]
    operands, packed = [type_.placement for type_ in read], read[0].packed if read else None
    if node.target is OPS.convert.default:
        axes, _, result = (str(text) for text in node.args[1:4])
        placements = [operands[0].replace(along(axes.split(","), parse_kind(result), mesh)).data()]
    elif node.target is OPS.row_max.default:
        over = [axis for axis in str(node.args[1]).split(",") if axis]
        placements = [operands[0].replace(dict.fromkeys(over, "I"))]
    else:
        expected = [known[node]] if node in known else None
        try:
            call = call_of(node)
            placements = infer(call, operands, mesh, expected)
            packed = packed_result(call, [type_.packed for type_ in read])
        except ValueError as fault:
            texts = ", ".join(node_type(operand).text(mesh) for operand in operands_of(node))
            raise InternalTypeFault(f"{node.format_node()} of ({texts}): {fault}") from fault
    if node in known and placements[0] != known[node]:
        raise InternalTypeFault(f"{node.format_node()} is {placements[0]}, but partition said {known[node]}")
    all_types = iter(_typed(value, placement, packed) for value, placement in zip(values, placements, strict=True))
    noted(node).types = [next(all_types) if isinstance(v, torch.Tensor) else None for v in tensors_of(node)]


def _split(
    joint: Joint, graph: fx.Graph, segment: Segment, makers: Mapping[fx.Node, fx.Node], mesh: Mesh
) -> None:  # fmt: skip
    """Split a joint trace: forward is all that outputs need, backward the rest of what gradients need. What backward
    makes again stands just before its first reader."""
    inputs = {node: bool(noted(source).binding.name) for node, source in zip(joint.inputs, segment.inputs, strict=True)}
    order = {node: index for index, node in enumerate(graph.nodes)}
    made = ancestors(joint.outputs, inputs)
    made |= inputs.keys() | {node for node in graph.nodes if node.target is operator.getitem and node.args[0] in made}
    joint.forward = sorted(made - inputs.keys(), key=order.__getitem__)
    needed = sorted(ancestors(joint.gradients.values(), made), key=order.__getitem__)
    read = [node for node in needed if node in made]
    shared = {node for node, source in zip(joint.inputs, segment.inputs, strict=True) if source in segment.shared}
    kept = kept_values(read, inputs, shared, lambda node: may_remake(node, makers.get(node), mesh), mesh)
    there = kept | set(joint.tangents.values())
    for node in dict.fromkeys([*(node for node in needed if node not in made), *joint.gradients.values()]):
        added = ancestors([node], there) - there
        joint.backward.extend(sorted(added, key=order.__getitem__))
        there |= added
    joint.saved = sorted(kept, key=order.__getitem__)
