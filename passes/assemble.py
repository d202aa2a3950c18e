"""Assembly: the functions of all segments become the step's programs, COUNT, SCALE, F, B and REDUCE of one role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from ..compiler.mesh import Mesh
from ..compiler.placement import Placement, TensorType
from ..compiler.program import Function, Line, Origin, Program, Ref, Value
from .calls import outputs
from .emit import BlockPair, Names, emit_pair, identifier, size_argument
from .joint import trace_joint
from .segments import Segment, cut, node_type


@dataclass(slots=True)
class _Main:
    """The main functions of F and B while they grow."""

    mesh: Mesh
    seed: int
    names: Names = field(default_factory=Names)
    values: dict[fx.Node, Value] = field(default_factory=dict)
    parameters: dict[str, Value] = field(default_factory=dict)
    forward: list[Line] = field(default_factory=list)
    calls: list[tuple[Segment, BlockPair, dict[str, Value]]] = field(default_factory=list)

    def whole(self, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> TensorType:
        """The type of a value that every rank holds whole."""
        return TensorType(dtype, shape, Placement.whole(self.mesh))

    def bind(self, node: fx.Node) -> Value:
        """The value of a placeholder or of an earlier call's result."""
        if node in self.values:
            return self.values[node]
        role = node.meta["role"]
        kind, name = role.split(" ", 1)
        type_ = replace(node_type(node), placement=node_type(node).placement.data())
        if kind == "key":
            rng = self.parameters.setdefault(
                "rng", Value(self.names.fresh("rng"), self.whole(torch.int64, (2,)), "rng")
            )
            value = Value(self.names.fresh(f"key_{identifier(name)}"), type_)
            args = (Ref(rng.name), name, self.seed)
            self.forward.append(Line((value,), "parc.stream_key.default", args, (), Origin(name.rsplit(".", 1)[0])))
        else:
            value = self.parameters[role] = Value(self.names.fresh(identifier(name)), type_, role)
        self.values[node] = value
        return value


def call_segments(graph: fx.Graph, mesh: Mesh, seed: int) -> tuple[_Main, dict[str, BlockPair]]:
    """F's main function as calls of segments; equal segments are traced and emitted once."""
    segments = cut(graph, mesh)
    main = _Main(mesh, seed)
    pairs: dict[str, BlockPair] = {}
    counts: dict[str, int] = {}
    for segment in segments:
        counts[segment.signature] = counts.get(segment.signature, 0) + 1
    functions = Names()
    prefixes = Names()
    for segment in segments:
        if segment.signature not in pairs:
            stem = identifier(segment.block.rsplit(".", 1)[0]) if segment.block else "part"
            shared = segment.block if counts[segment.signature] > 1 else None
            pairs[segment.signature] = emit_pair(trace_joint(segment, mesh), functions.fresh(stem), mesh, shared)
        pair = pairs[segment.signature]
        arguments = tuple(Ref(main.bind(node).name) for node in segment.inputs)
        prefix = prefixes.fresh(identifier(segment.block) if segment.block else "part")
        table = {name: main.bind(node) for name, node in zip(pair.inputs, segment.inputs, strict=True)}
        inner = pair.forward.values()
        results = []
        for label, _ in pair.forward.returns:
            value = Value(main.names.fresh(f"{prefix}_{label}"), inner[label].type)
            table[label] = value
            results.append(value)
        origin = Origin(segment.block or "")
        main.forward.append(Line(tuple(results), pair.forward.name, arguments, (), origin))
        for node, label in zip(segment.outputs, pair.outputs, strict=True):
            main.values[node] = table[label]
        main.calls.append((segment, pair, table))
    return main, pairs


def _backward(main: _Main, loss: fx.Node) -> tuple[list[Line], dict[str, Value], dict[str, Value]]:
    """B's lines, what it reads, and each parameter's gradient, segments in reverse."""
    scale = Value(main.names.fresh("scale"), main.whole(node_type(loss).dtype), "scale")
    lines: list[Line] = []
    reads: dict[str, Value] = {scale.name: scale}
    gradients: dict[fx.Node, Value] = {loss: scale}
    for segment, pair, table in reversed(main.calls):
        if pair.backward is None:
            continue
        arguments = []
        for label in pair.saved:
            reads.setdefault(table[label].name, table[label])
            arguments.append(Ref(table[label].name))
        for index in pair.tangents:
            arguments.append(Ref(_tangent(main, segment.outputs[index], gradients, lines).name))
        inner = pair.backward.values()
        made = {
            label: Value(main.names.fresh(f"grad_{index}_{label}"), inner[label].type)
            for index, (label, _) in enumerate(pair.backward.returns)
        }
        lines.append(Line(tuple(made.values()), pair.backward.name, tuple(arguments), (), Origin(segment.block or "")))
        for index, label in pair.gradients:
            node = segment.inputs[index]
            gradients[node] = _add(main, gradients[node], made[label], lines) if node in gradients else made[label]
    found = {
        node.meta["role"].removeprefix("parameter "): value
        for node, value in gradients.items()
        if node.op == "placeholder"
    }
    if not lines:  # a model without parameters
        del reads[scale.name]
    return lines, reads, found


def _tangent(main: _Main, node: fx.Node, gradients: Mapping[fx.Node, Value], lines: list[Line]) -> Value:
    """The gradient that arrived at a value; zeros where none did."""
    if node in gradients:
        return gradients[node]
    type_ = replace(node_type(node), placement=node_type(node).placement.dual().data())
    value = Value(main.names.fresh("zeros"), type_)
    shape = [size_argument(type_, dim) for dim in range(len(type_.shape))]
    lines.append(Line((value,), "aten.full.default", (shape, 0.0), (("dtype", type_.dtype),)))
    return value


def _add(main: _Main, first: Value, second: Value, lines: list[Line]) -> Value:
    value = Value(main.names.fresh("sum"), first.type)
    lines.append(Line((value,), "aten.add.Tensor", (Ref(first.name), Ref(second.name))))
    return value


def assemble(graph: fx.Graph, mesh: Mesh, role: str, seed: int, sums: torch.dtype | None = None) -> dict[str, Program]:
    """F, B and REDUCE of a typed graph whose first output is the loss's numerator.

    B's gradients have the types of the parameters as F reads them, dual, in the dtype ``sums`` in which microbatches
    are added up; REDUCE sums what is partial, back to the parameters as they are stored.
    """
    main, pairs = call_segments(graph, mesh, seed)
    loss, *updates = outputs(graph)
    backward_lines, reads, gradients = _backward(main, loss)
    gradients = {name: _narrowed(main, value, sums, backward_lines) for name, value in gradients.items()}
    returns = [("loss", main.bind(loss).name)]
    buffers = graph.output_node().meta.get("updates", ())
    returns += [(f"buffer {name}", main.bind(node).name) for name, node in zip(buffers, updates, strict=True)]
    bound = {value.name for value in main.parameters.values()}
    returns += [(f"saved {name}", name) for name in reads if name not in bound and reads[name].role != "scale"]
    forward_main = Function("forward", tuple(main.parameters.values()), tuple(main.forward), tuple(returns))
    backward_parameters = tuple(v if v.role else replace(v, role=f"saved {v.name}") for v in reads.values())
    backward_main = Function(
        "backward", backward_parameters, tuple(backward_lines), tuple((n, v.name) for n, v in gradients.items())
    )
    unique = list({pair.forward.name: pair for pair in pairs.values()}.values())
    return {
        "F": Program(role, "F", mesh, (*(pair.forward for pair in unique), forward_main)),
        "B": Program(role, "B", mesh, (*(pair.backward for pair in unique if pair.backward), backward_main)),
        "REDUCE": _reduce(graph, main, gradients, main.bind(loss), role),
    }


def _narrowed(main: _Main, value: Value, sums: torch.dtype | None, lines: list[Line]) -> Value:
    """A gradient in a smaller dtype in which it is added up, if there is one."""
    if sums is None or sums.itemsize >= value.type.dtype.itemsize:
        return value
    made = Value(main.names.fresh("narrow"), replace(value.type, dtype=sums))
    lines.append(Line((made,), "aten._to_copy.default", (Ref(value.name),), (("dtype", sums),)))
    return made


def assemble_count(graph: fx.Graph, mesh: Mesh, role: str) -> Program:
    """COUNT: what one microbatch adds to the loss's denominator, on one rank still partial."""
    main, pairs = call_segments(graph, mesh, 0)
    (count,) = outputs(graph)
    returns = (("count", main.bind(count).name),)
    function = Function("count", tuple(main.parameters.values()), tuple(main.forward), returns)
    return Program(role, "COUNT", mesh, (*(pair.forward for pair in pairs.values()), function))


def assemble_scale(count: TensorType | None, dtype: torch.dtype, parts: int, mesh: Mesh, role: str) -> Program:
    """SCALE: one over the step's whole denominator; without a count, one over the number of ``parts`` averaged."""
    whole = TensorType(dtype, (), Placement.whole(mesh))
    names, lines = Names(), []
    parameters: tuple[Value, ...] = ()
    if count is None:
        made = Value(names.fresh("scale"), whole)
        lines.append(Line((made,), "aten.full.default", ([], 1.0 / parts), (("dtype", dtype),)))
    else:
        given = Value(names.fresh("count"), count, "count")
        parameters = (given,)
        axes = count.placement.partial
        if axes:
            total = Value(names.fresh("all_reduce"), replace(count, placement=Placement.whole(mesh)))
            lines.append(Line((total,), "parc.all_reduce", (Ref(given.name), ",".join(axes))))
            given = total
        real = Value(names.fresh("to_copy"), whole)
        lines.append(Line((real,), "aten._to_copy.default", (Ref(given.name),), (("dtype", dtype),)))
        made = Value(names.fresh("reciprocal"), whole)
        lines.append(Line((made,), "aten.reciprocal.default", (Ref(real.name),)))
    return Program(role, "SCALE", mesh, (Function("scale", parameters, tuple(lines), (("scale", made.name),)),))


def _reduce(graph: fx.Graph, main: _Main, gradients: Mapping[str, Value], loss: Value, role: str) -> Program:
    """Sum gradients and the loss over the axes on which they are partial, once a step; and the global norm."""
    mesh, names = main.mesh, Names()
    parameters, lines, returns = [], [], []
    stored = {n.meta["role"].removeprefix("parameter "): n for n in graph.nodes if n.op == "placeholder"}
    squares: dict[tuple[str, ...], list[Value]] = {}

    def emit(op: str, args: tuple[object, ...], type_: TensorType, base: str, origin: Origin,
             **options: object) -> Value:  # fmt: skip
        value = Value(names.fresh(base), type_)
        lines.append(Line((value,), op, args, tuple(options.items()), origin))
        return value

    def total(value: Value, origin: Origin) -> Value:
        axes = value.type.placement.partial
        if not axes:
            return value
        whole = replace(value.type, placement=value.type.placement.replace(dict.fromkeys(axes, "I")))
        return emit("parc.all_reduce", (Ref(value.name), ",".join(axes)), whole, "all_reduce", origin)

    # all sums first: on a real network they run side by side
    reduced = []
    for name, gradient in gradients.items():
        value = Value(names.fresh(identifier(name)), gradient.type, f"gradient {name}")
        parameters.append(value)
        origin = Origin(name, "", stored[name].meta["line"])
        dtype = node_type(stored[name]).dtype
        if gradient.type.dtype != dtype:
            wide = replace(gradient.type, dtype=dtype)
            value = emit("aten._to_copy.default", (Ref(value.name),), wide, "widen", origin, dtype=dtype)
        reduced.append((total(value, origin), origin))
        returns.append((f"gradient {name}", reduced[-1][0].name))
    for value, origin in reduced:
        split = value.type.placement.split_axes()
        partial = replace(main.whole(value.type.dtype), placement=Placement.of(mesh, dict.fromkeys(split, "P")))
        square = emit("parc.square_sum.default", (Ref(value.name),), partial, "square_sum", origin)
        squares.setdefault(split, []).append(square)
    numerator = Value(names.fresh("loss"), loss.type, "loss")
    scale = Value(names.fresh("scale"), main.whole(loss.type.dtype), "scale")
    parameters += [numerator, scale]
    origin = Origin()
    summed = total(numerator, origin)
    mean = emit("aten.mul.Tensor", (Ref(summed.name), Ref(scale.name)), summed.type, "mul", origin)
    returns.append(("loss", mean.name))
    if squares:
        norm = _norm(list(squares.values()), emit, total)
        returns.append(("grad_norm", norm.name))
    function = Function("reduce", tuple(parameters), tuple(lines), tuple(returns))
    return Program(role, "REDUCE", mesh, (function,))


def _norm(groups: Sequence[Sequence[Value]], emit: object, total: object) -> Value:
    """The root of the sum of all squares; each group of equally split gradients is summed over its axes once."""
    assert callable(emit) and callable(total)
    origin = Origin()
    sums = []
    for group in groups:
        row = replace(group[0].type, shape=(len(group),))
        stacked = emit("aten.stack.default", ([Ref(value.name) for value in group],), row, "stack", origin)
        sums.append(total(emit("aten.sum.default", (Ref(stacked.name),), group[0].type, "sum", origin), origin))
    row = replace(sums[0].type, shape=(len(sums),))
    stacked = emit("aten.stack.default", ([Ref(value.name) for value in sums],), row, "stack", origin)
    together = emit("aten.sum.default", (Ref(stacked.name),), sums[0].type, "sum", origin)
    norm: Value = emit("aten.sqrt.default", (Ref(together.name),), sums[0].type, "sqrt", origin)
    return norm
