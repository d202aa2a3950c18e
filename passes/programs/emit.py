"""Emission: typed graphs become functions of programs, with every operator made local by its rule; and the reference,
the canonical graph as a program of one rank, with which all checks compare."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.layout.collectives import lower
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.packed_rows import EXCHANGE
from ...compiler.layout.placement import Placement, TensorType
from ...compiler.ops.factors import OpCall, fill_operands
from ...compiler.ops.own_ops import OPS
from ...compiler.ops.rules import facts, localize, operator_name
from ...compiler.program.binding import RNG, Binding
from ...compiler.program.blocks import starred
from ...compiler.program.program import Function, Line, LocalSize, Origin, Ref, Value
from ...compiler.program.program import operator as torch_operator
from ...compiler.program.rewriter import FreshNames, LineWriter
from ..calls import call_of, operands_of, outputs, tensors_of
from .joint import Joint
from .segments import Segment, node_type

_DEVICE_WORDS = {"device", "layout", "pin_memory", "memory_format", "non_blocking"}


def identifier(text: str) -> str:
    """Return a Python name for a path."""
    name = re.sub(r"\W", "_", text.replace(".*", ""))
    return name if name and not name[0].isdigit() else f"x{name}"


def name_of(binding: Binding) -> str:
    """Return a Python name for a bound value: the binding's name, or the whole binding where that is a number."""
    return identifier(str(binding) if binding.name.isdigit() else binding.name)


def cut_argument(whole: Any, local: Any, axes: Mapping[tuple[int, int], tuple[str, ...]]) -> Any:
    """Return a call's argument with a ``LocalSize`` for each size that is smaller on a rank."""
    if isinstance(whole, bool) or not isinstance(whole, (int, list, tuple)):
        return whole
    if isinstance(whole, int):
        if whole == local:
            return whole
        return LocalSize(whole, axes[whole, local] if (whole, local) in axes else _by_ratio(whole, local, axes))
    return type(whole)(cut_argument(w, x, axes) for w, x in zip(whole, local, strict=True))


def _by_ratio(whole: int, local: int, axes: Mapping[tuple[int, int], tuple[str, ...]]) -> tuple[str, ...]:
    """Return the axes of a dim that is cut into as many pieces as ``whole`` is into ``local``."""
    for (size, piece), names in axes.items():
        if size * local == whole * piece:
            return names
    raise ValueError(f"no dim is cut as {whole} is to {local}")


def dim_axes(types: Iterable[TensorType], mesh: Mesh, named: int = 0) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return the axes, major first, of every split dim, by its sizes ``(global, local)``. Of several dims of these
    sizes the one ``named`` by the operator counts: at other sizes of a range they may differ."""
    cut: list[tuple[bool, int, int, TensorType, int]] = []
    for index, type_ in enumerate(types):
        pairs = enumerate(zip(type_.shape, type_.local(mesh), strict=True))
        cut += [
            (dim != named % len(type_.shape), index, dim, type_, local) for dim, (size, local) in pairs if size != local
        ]
    axes: dict[tuple[int, int], tuple[str, ...]] = {}
    for _, _, dim, type_, local in sorted(cut, key=lambda entry: entry[:3]):
        axes.setdefault((type_.shape[dim], local), tuple(axis for _, axis in type_.placement.splits(dim)))
    return axes


@dataclass(slots=True)
class Emitter:
    """The writer of typed nodes, on global shapes, as lines on local shapes, with fresh names."""

    mesh: Mesh
    names: FreshNames = field(default_factory=FreshNames)
    value_of: dict[fx.Node, Value] = field(default_factory=dict)
    results: dict[fx.Node, tuple[Value | None, ...]] = field(default_factory=dict)
    titles: dict[fx.Node, str] = field(default_factory=dict)
    """Names for the values of some nodes, in place of their operators' names."""
    differentiated: bool = False
    """True where autograd will run over the lines, so that ``detach`` counts."""

    def define(self, node: fx.Node, base: str, binding: Binding | None = None) -> Value:
        """Name the value of a node with one tensor, and return it. A recomputed value keeps its name."""
        if node not in self.value_of:
            name = self.names.fresh(self.titles.get(node, base))
            self.value_of[node] = Value(name, node_type(node), binding)
        return self.value_of[node]

    def lines(self, nodes: Sequence[fx.Node]) -> list[Line]:
        """The lines of nodes in order."""
        return [line for node in nodes for line in self._line(node)]

    def _line(self, node: fx.Node) -> list[Line]:
        if node.target is operator.getitem:
            return []
        row = facts(node.target)
        if row.moves == "copy" and not (self.differentiated and row.stops_gradient):
            self.value_of[node] = self.value_of[node.args[0]]  # type: ignore[index]
            return []
        origin = noted(node).origin
        if node.target is OPS.convert.default:
            before, after = node_type(node.args[0]).placement, node_type(node).placement  # type: ignore[arg-type]
            lowered = lower(str(node.args[1]), before, after, self.mesh)
            if lowered is None:
                self.value_of[node] = self.value_of[node.args[0]]  # type: ignore[index]
                return []
            op, options = lowered
            source, *chosen = (Ref(self.value_of[operand].name) for operand in operands_of(node))
            op = EXCHANGE if chosen else op
            name = op.removeprefix("parc.")
            return [Line((self.define(node, name),), op, (source, *options, *chosen), (), origin)]
        if node.target is OPS.row_max.default:
            source = Ref(self.value_of[node.args[0]].name)  # type: ignore[index]
            return [Line((self.define(node, "row_max"),), "parc.row_max", (source, node.args[1]), (), origin)]
        op, args, kwargs = self._localized(node)
        return [Line(self._results(node), op, args, kwargs, origin)]

    def _results(self, node: fx.Node) -> tuple[Value | None, ...]:
        """Return the values of a node's results. Those of a recomputed node keep their names."""
        base = operator_name(node.target).split(".")[1].strip("_") or "value"
        if not isinstance(noted(node).value, (tuple, list)):
            return (self.define(node, base),)
        if node in self.results:
            return self.results[node]
        getitems = [user for user in node.users if user.target is operator.getitem]
        parts = {user.args[1]: user for user in getitems}
        results: list[Value | None] = []
        for index, type_ in enumerate(noted(node).types):
            if type_ is None:
                results.append(None)
            elif index in parts:
                results.append(self.define(parts[index], base))
            else:
                results.append(Value(self.names.fresh(base), type_))
        for user in getitems:
            if user is not (first := parts[user.args[1]]):
                self.value_of[user] = self.value_of[first]
        self.results[node] = tuple(results)
        return self.results[node]

    def _localized(self, node: fx.Node) -> tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        """Return a node's operator, arguments and options on local shapes."""
        call = call_of(node)
        operands = operands_of(node)
        types = [node_type(operand) for operand in operands]
        results = [type_ for type_ in noted(node).types if type_ is not None]
        if facts(node.target).moves == "shape":
            call = replace(call, op="aten.reshape.default", args=(call.args[0], list(results[0].shape)), kwargs={})
        call = replace(call, kwargs={key: item for key, item in call.kwargs.items() if key not in _DEVICE_WORDS})
        shapes = tuple(type_.local(self.mesh) for type_ in types), tuple(type_.local(self.mesh) for type_ in results)
        # both by the same rule, so that dims and ends counted from the back do not differ
        whole_args, whole_kwargs = localize(call, call.operands, call.results)
        local_args, local_kwargs = localize(call, *shapes)
        named_dim = whole_kwargs.get("dim", _dim_argument(call))
        axes = dim_axes([*results, *types], self.mesh, named_dim if isinstance(named_dim, int) else 0)
        args = tuple(self._argument(w, x, axes, results) for w, x in zip(whole_args, local_args, strict=True))
        named = tuple((key, cut_argument(item, local_kwargs[key], axes)) for key, item in whole_kwargs.items())
        refs = [Ref(self.value_of[operand].name) for operand in operands]
        return call.op, fill_operands(args, refs), fill_operands(named, refs)

    def _argument(self, whole: Any, local: Any, axes: Any, results: Sequence[TensorType]) -> Any:
        """Return one argument; a list equal to the result's shape is cut as the result is."""
        shapes = [(r.shape, r.local(self.mesh)) for r in results[:1]]
        if isinstance(whole, list) and (tuple(whole), tuple(local)) in shapes:
            return [size_argument(results[0], dim) for dim in range(len(whole))]
        return cut_argument(whole, local, axes)


def _dim_argument(call: OpCall) -> Any:
    """Return the dim that a call's arguments name, if they name one."""
    pairs = zip(torch_operator(call.op)._schema.arguments, call.args, strict=False)
    return next((value for argument, value in pairs if argument.name == "dim"), 0)


def size_argument(type_: TensorType, dim: int) -> int | LocalSize:
    """Return the size of a dim as an argument."""
    axes = tuple(axis for _, axis in type_.placement.splits(dim))
    return LocalSize(type_.shape[dim], axes) if axes else type_.shape[dim]


@dataclass(frozen=True, slots=True)
class BlockPair:
    """The two functions of a segment, with the names of their values."""

    forward: Function
    backward: Function | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    saved: tuple[str, ...]
    """The forward values, inputs included, that backward reads."""
    tangents: tuple[int, ...]
    """The indices of the outputs whose gradients backward reads."""
    gradients: tuple[tuple[int, str], ...]
    """The indices of inputs, with their gradients in backward."""


def emit_pair(joint: Joint, segment: Segment, name: str, mesh: Mesh, shared: str | None) -> BlockPair:
    """Write the functions ``name`` and ``name_backward`` of a segment. ``shared`` is the path of its block, if several
    blocks use them."""
    emitter = Emitter(mesh)
    for node in (source for saved in joint.saved for source in _named_with(saved)):
        emitter.titles[node] = _saved_title(node, segment.block)
    inputs = [
        emitter.define(node, _input_title(source, segment.block))
        for node, source in zip(joint.inputs, segment.inputs, strict=True)
    ]
    for index, node in joint.gradients.items():
        emitter.titles.setdefault(node, f"grad_{emitter.value_of[joint.inputs[index]].name}")
    forward_lines = emitter.lines(joint.forward)
    outputs = tuple(emitter.value_of[node].name for node in joint.outputs)
    kept: dict[str, Value] = {}
    for node in joint.saved:
        value = emitter.value_of[node]
        kept[value.name] = value
    known = tuple(value.name for value in inputs)
    returns = dict.fromkeys([*outputs, *(label for label in kept if label not in known)])
    forward = Function(name, tuple(inputs), tuple(_starred_origins(forward_lines, shared)), _given_back(returns))
    if not joint.gradients:
        return BlockPair(forward, None, known, outputs, (), (), ())
    tangents = [emitter.define(node, "grad") for node in joint.tangents.values()]
    backward_lines = emitter.lines(joint.backward)
    gradients = tuple((index, emitter.value_of[node].name) for index, node in joint.gradients.items())
    labels = dict.fromkeys(label for _, label in gradients)
    backward = Function(
        f"{name}_backward",
        (*kept.values(), *tangents),
        tuple(_starred_origins(backward_lines, shared)),
        _given_back(labels),
    )
    return BlockPair(forward, backward, known, outputs, tuple(kept), tuple(joint.tangents), gradients)


def _input_title(source: fx.Node, block: str | None) -> str:
    """Return the name of a segment's input: ``mlp_up_weight`` for ``blocks.0.mlp.up.weight``, ``x`` for an
    activation."""
    kind, name = noted(source).binding
    return (
        identifier(f"key.{_path_inside(name, block)}" if kind == "key" else _path_inside(name, block)) if name else "x"
    )


def _named_with(node: Any) -> Iterator[fx.Node]:
    """Yield a node, and its operands through copies and conversions, which may have no line of their own. Inputs have
    names already."""
    while node.op != "placeholder":
        yield node
        if facts(node.target).moves != "copy" and node.target is not OPS.convert.default:
            break
        node = node.args[0]


def _saved_title(node: fx.Node, block: str | None) -> str:
    """Return the name of a value that backward reads, from its module and its operator, as ``mlp_up_addmm``."""
    maker: Any = node.args[0] if node.target is operator.getitem else node
    module, op = _path_inside(noted(maker).origin.module, block), str(maker.target).split(".")[1].strip("_")
    return identifier(f"{module}.{op}" if module and module != block else op)


def _path_inside(path: str, block: str | None) -> str:
    """Return the part of a path inside its block."""
    return path.removeprefix(f"{block}.") if block else path


def _given_back(labels: Iterable[str]) -> tuple[tuple[Binding, str], ...]:
    """Return the returns of a block's function: each value under its own name."""
    return tuple((Binding("value", label), label) for label in labels)


def _starred_origins(lines: Sequence[Line], block: str | None) -> list[Line]:
    """Return the lines of a function that several blocks use, with modules as ``layers.*.mlp``."""
    if block is None:
        return list(lines)

    def general(origin: Origin) -> Origin:
        if origin.module == block or origin.module.startswith(f"{block}."):
            return replace(origin, module=f"{starred(block)}{origin.module[len(block) :]}")
        return origin

    return [replace(line, origin=general(line.origin)) for line in lines]


# ---- the whole graph as one function


def graph_function(name: str, graph: fx.Graph, keys: tuple[Binding, ...], seed: int) -> Function:
    """Return a graph as a function that returns its outputs under these keys."""
    emitter = Emitter(Mesh(), differentiated=True)
    writer, nodes = LineWriter(emitter.mesh, emitter.names), []
    rng: Value | None = None
    for node in graph.nodes:
        if node.op in ("placeholder", "call_function"):
            noted(node).types = [
                None
                if value is None
                else TensorType(value.dtype, tuple(value.shape), Placement(()), noted(node).packed)
                for value in tensors_of(node)
            ]
        if node.op == "call_function":
            nodes.append(node)
        elif node.op == "placeholder" and (node.users or noted(node).binding in keys):
            binding: Binding = noted(node).binding
            path = binding.name
            if binding.kind != "key":
                value = emitter.define(node, name_of(binding), binding)
                writer.parameters[value.name] = value
                continue
            if rng is None:
                rng = writer.take("rng", TensorType(noted(node).value.dtype, (2,), Placement(())), RNG)
            key = emitter.define(node, f"key_{identifier(path)}")
            args = (Ref(rng.name), path, seed)
            writer.add(Line((key,), "parc.stream_key.default", args, (), Origin(path.rsplit(".", 1)[0])))
    writer.lines += emitter.lines(nodes)
    writer.returns = {key: emitter.value_of[node].name for key, node in zip(keys, outputs(graph), strict=True)}
    return writer.function(name)
