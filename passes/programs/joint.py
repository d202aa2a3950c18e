"""Joint trace: a segment's forward and backward on global shapes, with the type and origin of every node; and the
recorder with which autograd is traced."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from ...compiler.capture.functional import returning_form
from ...compiler.capture.node_facts import copy_facts, noted
from ...compiler.capture.reach import ancestors
from ...compiler.layout.collectives import TypeFault
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Packed, Placement, TensorType, along, parse_kind
from ...compiler.ops.infer import infer, packed_result, place_created
from ...compiler.ops.own_ops import OPS, aten
from ...compiler.ops.precision import is_narrow
from ...compiler.ops.results import changed, example, results_of
from ...compiler.ops.rules import facts, rule_for
from ...compiler.program.program import Origin
from ...compiler.torch_private import quiet, without_dispatch
from ..calls import call_of, operands_of, substitute_nodes, tensors_of
from .segments import Segment, kept_values, may_remake, node_type


class InternalTypeFault(AssertionError):
    """The error of types that contradict each other inside the compiler: parc's fault, never the user's."""


class NoDerivative(ValueError):
    """The error of an operator that has no derivative in torch, where a gradient goes through it. ``operator`` is its
    name."""

    def __init__(self, segment: Segment, operator: str) -> None:
        named = (node for node in segment.nodes if f".{operator}." in str(node.target))
        self.origin = next((noted(node).origin for node in named), noted(segment.nodes[0]).origin)
        where = f"in `{self.origin.module}`: " if self.origin.module else ""
        super().__init__(f"{where}a gradient goes through `{operator}`, of which torch has no derivative")


_UNDERIVED = re.compile(r"derivative for aten::(\w+) is not implemented")


@dataclass(slots=True)
class Joint:
    """A traced segment."""

    inputs: list[fx.Node]
    outputs: list[fx.Node]
    tangents: dict[int, fx.Node]
    """The gradients that backward gets, by the output's index."""
    gradients: dict[int, fx.Node]
    """The gradients that backward returns, by the input's index."""
    forward: list[fx.Node] = field(default_factory=list)
    backward: list[fx.Node] = field(default_factory=list)
    """The nodes of backward in order, with the nodes of forward that it recomputes."""
    saved: list[fx.Node] = field(default_factory=list)
    """The nodes of forward that backward reads."""


@dataclass(slots=True)
class _Record:
    """The notes of a segment's tracing."""

    owner: dict[fx.Node, Origin] = field(default_factory=dict)
    """The origin of each traced node."""
    maker: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The segment's node that each of forward's nodes is a part of."""
    known: dict[fx.Node, Placement] = field(default_factory=dict)
    """The placements that partition chose, of traced values and of their gradients."""
    last: fx.Node | None = None
    """The last node with an owner."""
    forward_end: fx.Node | None = None
    """The last node of forward, once it has run."""

    def claim(self, graph: fx.Graph, origin: Origin, maker: fx.Node | None = None) -> None:
        """Note ``origin``, and the ``maker``, as those of all nodes since the last claim."""
        new = list(takewhile(lambda node: node is not self.last, reversed(graph.nodes)))
        self.owner.update(dict.fromkeys(new, origin))
        if maker is not None:
            self.maker.update(dict.fromkeys(new, maker))
        self.last = new[0] if new else self.last


def trace_joint(segment: Segment, mesh: Mesh) -> Joint:
    """Trace ``outputs, gradients = segment(inputs, tangents)``. Equal segments need one trace.

    Raises:
        NoDerivative: torch has no derivative of an operator through which a gradient goes.
        InternalTypeFault: types contradict each other.
    """
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
            try:
                gradients = torch.autograd.grad([outputs[i] for i in flowing], wanted, tangents, allow_unused=True)
            except RuntimeError as error:
                if (named := _UNDERIVED.search(str(error))) is None:
                    raise
                raise NoDerivative(segment, named[1].removeprefix("_")) from None
        record.claim(recorder.graph, noted(segment.nodes[0]).origin)
    graph = recorder.finish((tuple(outputs), tuple(gradients)))
    return _typed_joint(graph, segment, record, flows, flowing, mesh)


def _execute(segment: Segment, env: dict[fx.Node, Any], record: _Record, graph: fx.Graph) -> None:
    """Run the segment's nodes. Note the origin of traced nodes, and the placement of each value's gradient when it
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
    """Fold a product's batch dims into one matrix, as torch does. Where the smaller operand needs no gradient, torch
    would expand it to batches if the larger is not contiguous, and no type says how to split the result."""

    def folded(x: torch.Tensor, other: torch.Tensor, *bias: torch.Tensor) -> Any:
        return product(x if x.dim() < 3 or other.dim() > 2 or other.requires_grad else x.contiguous(), other, *bias)

    return folded


def _rms_norm(x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Compose an RMS norm as torch does, but with an unrounded ``eps``: torch rounds it to the dtype, so that a run in
    another dtype would differ."""
    wide = x.to(torch.float32) if is_narrow(x.dtype) else x
    mean = wide.pow(2).mean([*range(-len(shape), 0)], keepdim=True)
    normed: torch.Tensor = wide * aten.add.Scalar(mean, eps).rsqrt()
    return (normed if weight is None else normed * weight).to(x.dtype)


FORMS: Mapping[Any, Callable[..., Any]] = {
    **{product: _folding(product) for product in (aten.linear.default, aten.matmul.default)},
    aten.rms_norm.default: _rms_norm,
}
"""The functions by which operators are traced whose own traces would not do."""


def _use(value: Any, operand: fx.Node, reader: fx.Node, record: _Record, graph: fx.Graph) -> Any:
    """Return an alias of a value for one reader: its gradient is then apart from those of other readers."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    alias = aten.alias.default(value)
    alias.register_hook(_arrival(operand, reader, record, graph))
    return alias


def _arrival(node: fx.Node, owner: fx.Node, record: _Record, graph: fx.Graph) -> Callable[[Any], None]:
    """Return a hook for the gradient of a node's value: it notes the gradient's placement, and ``owner`` as the origin
    of the backward nodes before it."""

    def hook(gradient: RecordedTensor | None) -> None:
        if owner is not node:
            record.claim(graph, noted(owner).origin)
        if gradient is not None:
            record.known.setdefault(gradient.node, node_type(node).placement.dual().data())

    return hook


def _typed_joint(graph: fx.Graph, segment: Segment, record: _Record, flows: Sequence[bool], flowing: Sequence[int],
                 mesh: Mesh) -> Joint:  # fmt: skip
    """Return the joint trace of a recorded graph, with the types of all nodes. ``flows`` is True for the inputs that
    get gradients; ``flowing`` are the indices of the outputs that send them."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inputs, tangents = placeholders[: len(flows)], placeholders[len(flows) :]
    for node, source in zip(inputs, map(node_type, segment.inputs), strict=True):
        noted(node).types = [_typed(noted(node).value, source.placement.data(), source.packed)]
    for node, source in zip(tangents, (node_type(segment.outputs[index]) for index in flowing), strict=True):
        noted(node).types = [_typed(noted(node).value, source.placement.dual().data(), source.packed)]
    write_functional(graph)
    backward = list(takewhile(lambda node: node is not record.forward_end, reversed(graph.nodes)))[1:]
    zeros = fold_zeros([node for node in reversed(backward) if node.op == "call_function"])
    free = free_creations(graph, record.known, record.owner, zeros)
    value: Any
    for value, placement in list(record.known.items()):  # a cast gradient has its placement before the cast too
        while facts(value.target).casts and value.args[0] not in record.known:
            value = value.args[0]
            record.known[value] = placement
    for node in graph.nodes:
        if node.op == "call_function":
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
    _split_joint(joint, graph, segment, record.maker, mesh)
    return joint


def _place_free(node: fx.Node, free: set[fx.Node], mesh: Mesh) -> None:
    """Type the created operands of a node as it needs them."""
    operands = operands_of(node)
    if free.isdisjoint(operands):
        return
    placements = [None if operand in free else node_type(operand).placement for operand in operands]
    zeros = frozenset(index for index, operand in enumerate(operands) if operand in free and operand.args[1] == 0)
    for operand, placement in zip(operands, place_created(call_of(node), placements, zeros, mesh), strict=True):
        if operand in free:
            noted(operand).types = [_typed(noted(operand).value, placement)]


def _typed(value: torch.Tensor, placement: Placement, packed: Packed = None) -> TensorType:
    return TensorType(value.dtype, tuple(value.shape), placement, packed)


def _type_node(node: Any, known: Mapping[fx.Node, Placement], mesh: Mesh) -> None:
    """Type a traced node's results from its operands. Placements that partition chose must agree.

    Raises:
        InternalTypeFault: they do not, or the operands' types do not fit the operator.
    """
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


def _split_joint(
    joint: Joint, graph: fx.Graph, segment: Segment, makers: Mapping[fx.Node, fx.Node], mesh: Mesh
) -> None:  # fmt: skip
    """Split a joint trace: forward is all that outputs need, backward the rest of what gradients need. Recomputed nodes
    stand just before their first reader."""
    inputs = {node: bool(noted(source).binding.name) for node, source in zip(joint.inputs, segment.inputs, strict=True)}
    order = {node: index for index, node in enumerate(graph.nodes)}
    computed = ancestors(joint.outputs, inputs)
    computed |= inputs.keys()
    computed |= {node for node in graph.nodes if node.target is operator.getitem and node.args[0] in computed}
    joint.forward = sorted(computed - inputs.keys(), key=order.__getitem__)
    needed = sorted(ancestors(joint.gradients.values(), computed), key=order.__getitem__)
    read = [node for node in needed if node in computed]
    shared = {node for node, source in zip(joint.inputs, segment.inputs, strict=True) if source in segment.shared}
    kept = kept_values(read, inputs, shared, lambda node: may_remake(node, makers.get(node), mesh), mesh)
    there = kept | set(joint.tangents.values())
    for node in dict.fromkeys([*(node for node in needed if node not in computed), *joint.gradients.values()]):
        added = ancestors([node], there) - there
        joint.backward.extend(sorted(added, key=order.__getitem__))
        there |= added
    joint.saved = sorted(kept, key=order.__getitem__)


# ---- the operators of a backward from autograd, rewritten in those that types and programs know


def write_functional(graph: fx.Graph) -> None:
    """Replace operators that write into a temporary of autograd by those that return the result, which later readers
    already read."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and schema.name.endswith("_"):
            form = returning_form(node.target)
            if form is None:
                raise TypeFault(f"{node.target} has no form that returns its result")
            node.target = form
            if form is aten.fill.Scalar:  # of a temporary: nothing of it is read
                shape, number = list(noted(node).value.shape), node.args[1]
                node.target, node.args, node.kwargs = aten.full.default, (shape, number), {}
        if node.target is aten.convolution_backward.default and not node.args[10][2]:
            node.update_arg(3, None)  # the bias's sizes, which may equal those of another dim by chance


def fold_zeros(backward: Sequence[fx.Node]) -> set[fx.Node]:
    """Replace what a backward computes linearly from zeros alone by zeros, and return all zeros. Such is the gradient
    of ``floor`` or ``sgn``, also once it is summed to the shape of a smaller operand, or to rows of a table."""
    zeros: set[fx.Node] = set()
    for node in backward:
        operands = [operand for operand in operands_of(node) if not _is_integral(operand)]
        if operands and zeros.issuperset(operands) and isinstance(noted(node).value, torch.Tensor):
            rule = rule_for(call_of(node))
            if node.target is OPS.convert.default or (rule is not None and rule.linear):
                node.target, node.args, node.kwargs = aten.zeros.default, (list(noted(node).value.shape),), {}
        if facts(node.target).makes_zeros(node.args):
            zeros.add(node)
    return zeros


def _is_integral(node: fx.Node) -> bool:
    value = noted(node).value
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def free_creations(graph: fx.Graph, known: Mapping[fx.Node, Any], owner: dict[fx.Node, Any],
                   zeros: Collection[fx.Node] = ()) -> set[fx.Node]:  # fmt: skip
    """Write creation nodes without a known placement, and ``zeros``, as ``full``, one for each reader, which may want
    any placement; return them."""
    free: set[fx.Node] = set()
    for node in list(graph.nodes):
        row = facts(node.target)
        if not row.creates or (node in known and node not in zeros):
            continue
        value = noted(node).value
        fill = row.number_in(node.args)
        node.target, node.args, node.kwargs = aten.full.default, (list(value.shape), fill), {"dtype": value.dtype}
        free.add(node)
        for reader in list(node.users)[1:]:
            with graph.inserting_before(node):
                copy = graph.node_copy(node)
            copy_facts(node, copy)
            if node in owner:
                owner[copy] = owner[node]
            reader.replace_input_with(node, copy)
            free.add(copy)
    return free


def simplify(graph: fx.Graph) -> None:
    """Drop operators of autograd that change neither their operand nor its type, once types are known."""
    for node in list(graph.nodes):
        same = _unchanged(node)
        if same is not None and noted(same).types == noted(node).types:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _unchanged(node: Any) -> fx.Node | None:
    """Return the operand that a node returns unchanged: of a second transpose, or of a first power."""
    if node.target is aten.t.default:
        return node.args[0].args[0] if node.args[0].target is aten.t.default else None
    return node.args[0] if node.target is aten.pow.Tensor_Scalar and node.args[1] == 1 else None


# ---- the recorder


class RecordedTensor(torch.Tensor):
    """A tensor without numbers, with its ``node`` in the graph under record and an ``example`` of its layout."""

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
    """Return True for an operator that writes an operand: other views of the same storage change too."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


class GraphRecorder(TorchDispatchMode):
    """A mode that records the graph of all operators that run in it.

    with GraphRecorder() as recorder:
        x = recorder.placeholder(torch.float32, (2, 3))
        y = (x.detach().requires_grad_() * 2).sum()
    recorder.finish(y)  # placeholder, detach, mul, sum, output

    Unlike ``make_fx``, it runs no operator again whose results are remembered: it only adds a node.
    """

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
        if results.in_place:  # later readers of the operand read this node
            if results.values is not args[0].example:
                with without_dispatch():  # sizes and strides change; there are no numbers
                    func(*args, **(kwargs or {}))
            args[0].node, args[0].example = node, results.values
            return args[0]
        return self._wrapped(node, results.values)

    def _wrapped(self, node: fx.Node, values: Any) -> Any:
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
            parts.append(self._wrapped(part, value))
        return type(values)(parts)
