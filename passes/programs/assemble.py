"""Assembly of the functions of all segments to programs: the work of every stage, COUNT and SCALE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import TensorType
from ...compiler.program.actions import BACKWARD, COUNTING, FORWARD, SCALING
from ...compiler.program.binding import COUNT, LOSS, RNG, SCALE, Binding
from ...compiler.program.program import Function, Line, Origin, Program, Ref, Value
from ...compiler.program.roles import StageWork
from ..calls import outputs
from .cut import Pipeline, StagePiece, split_lines
from .emit import BlockPair, FreshNames, emit_pair, identifier, size_argument
from .joint import trace_joint
from .segments import Segment, cut_segments, node_type
from .writer import Writer, whole_type


@dataclass(slots=True)
class _Lines:
    """A main function's lines in order, each with the stage that was current when it was added."""

    stage: int = 0
    lines: list[Line] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)

    def append(self, line: Line) -> None:
        """Add a line to the current stage."""
        self.lines.append(line)
        self.stages.append(self.stage)


@dataclass(slots=True)
class _Main:
    """The main functions of F and B under construction."""

    mesh: Mesh
    seed: int
    names: FreshNames = field(default_factory=FreshNames)
    values: dict[fx.Node, Value] = field(default_factory=dict)
    parameters: dict[Binding, Value] = field(default_factory=dict)
    forward: _Lines = field(default_factory=_Lines)
    keys: set[tuple[str, int]] = field(default_factory=set)
    """The keys of random streams, and the stages in which they are made."""
    calls: list[tuple[Segment, BlockPair, str, dict[str, Value]]] = field(default_factory=list)

    def emit(
        self, lines: _Lines, name: str, type_: TensorType, op: str, args: tuple[Any, ...], **options: Any
    ) -> Value:
        """Add a line and return its result."""
        value = Value(self.names.fresh(name), type_)
        lines.append(Line((value,), op, args, tuple(options.items())))
        return value

    def bind(self, node: fx.Node) -> Value:
        """Return the value of a placeholder or of an earlier call's result. A key is made in every stage that reads it:
        it lies on the CPU, where no message arrives."""
        binding: Binding = noted(node).binding
        kind, name = binding
        if node not in self.values:
            type_ = replace(node_type(node), placement=node_type(node).placement.data())
            if kind == "key":
                self.values[node] = Value(self.names.fresh(f"key_{identifier(name)}"), type_)
            else:
                self.values[node] = self.parameters[binding] = Value(self.names.fresh(identifier(name)), type_, binding)
        value = self.values[node]
        if kind == "key" and (value.name, self.forward.stage) not in self.keys:
            self.keys.add((value.name, self.forward.stage))
            if RNG not in self.parameters:
                type_ = whole_type(self.mesh, torch.int64, (2,))
                self.parameters[RNG] = Value(self.names.fresh("rng"), type_, RNG)
            args = (Ref(self.parameters[RNG].name), name, self.seed)
            self.forward.append(Line((value,), "parc.stream_key.default", args, (), Origin(name.rsplit(".", 1)[0])))
        return value


def call_segments(graph: fx.Graph, mesh: Mesh, seed: int) -> tuple[_Main, dict[str, BlockPair]]:
    """Write F's main function as calls of segments; equal segments are traced and emitted once."""
    segments = cut_segments(graph, mesh)
    main = _Main(mesh, seed)
    pairs: dict[str, BlockPair] = {}
    counts: dict[str, int] = {}
    for segment in segments:
        counts[segment.signature] = counts.get(segment.signature, 0) + 1
    functions = FreshNames()
    prefixes = FreshNames()
    for segment in segments:
        main.forward.stage = segment.stage
        if segment.signature not in pairs:
            stem = identifier(segment.block.rsplit(".", 1)[0]) if segment.block else "part"
            shared = segment.block if counts[segment.signature] > 1 else None
            pairs[segment.signature] = emit_pair(
                trace_joint(segment, mesh), segment, functions.fresh(stem), mesh, shared
            )
        pair = pairs[segment.signature]
        arguments = tuple(Ref(main.bind(node).name) for node in segment.inputs)
        prefix = prefixes.fresh(identifier(segment.block) if segment.block else "part")
        table = {name: main.bind(node) for name, node in zip(pair.inputs, segment.inputs, strict=True)}
        inner = pair.forward.values()
        results = []
        for _, label in pair.forward.returns:
            value = Value(main.names.fresh(f"{prefix}_{label}"), inner[label].type)
            table[label] = value
            results.append(value)
        origin = Origin(segment.block or "")
        main.forward.append(Line(tuple(results), pair.forward.name, arguments, (), origin))
        for node, label in zip(segment.outputs, pair.outputs, strict=True):
            main.values[node] = table[label]
        main.calls.append((segment, pair, prefix, table))
    return main, pairs


def _backward(main: _Main, loss: fx.Node) -> tuple[_Lines, dict[str, Value], list[tuple[int, str, Value]]]:
    """Write B's lines, segments in reverse. Return the values that B reads, and each parameter's gradient in every
    stage that has one."""
    scale = Value(main.names.fresh("scale"), whole_type(main.mesh, node_type(loss).dtype), SCALE)
    lines = _Lines()
    reads: dict[str, Value] = {scale.name: scale}
    gradients: dict[tuple[fx.Node, int], Value] = {(loss, 0): scale}
    for segment, pair, prefix, table in reversed(main.calls):
        if pair.backward is None:
            continue
        lines.stage = segment.stage
        arguments = []
        for label in pair.saved:
            reads.setdefault(table[label].name, table[label])
            arguments.append(Ref(table[label].name))
        for index in pair.tangents:
            arguments.append(Ref(_tangent(main, segment.outputs[index], gradients, lines).name))
        inner = pair.backward.values()
        results = {
            label: Value(main.names.fresh(f"{prefix}_{label}"), inner[label].type) for _, label in pair.backward.returns
        }
        lines.append(
            Line(tuple(results.values()), pair.backward.name, tuple(arguments), (), Origin(segment.block or ""))
        )
        for index, label in pair.gradients:
            node = segment.inputs[index]
            key = node, segment.stage if node.op == "placeholder" else 0
            total = results[label]
            if key in gradients:
                args = Ref(gradients[key].name), Ref(total.name)
                total = main.emit(lines, "sum", gradients[key].type, "aten.add.Tensor", args)
            gradients[key] = total
    returned = [
        (stage, noted(node).binding.name, value)
        for (node, stage), value in gradients.items()
        if node.op == "placeholder"
    ]
    if not lines.lines:  # a model without parameters
        del reads[scale.name]
    return lines, reads, returned


def _tangent(main: _Main, node: fx.Node, gradients: Mapping[tuple[fx.Node, int], Value], lines: _Lines) -> Value:
    """Return the gradient that arrived at a value; zeros if none did."""
    if (node, 0) in gradients:
        return gradients[node, 0]
    type_ = replace(node_type(node), placement=node_type(node).placement.dual().data())
    shape = [size_argument(type_, dim) for dim in range(len(type_.shape))]
    return main.emit(lines, "zeros", type_, "aten.full.default", (shape, 0.0), dtype=type_.dtype)


@dataclass(frozen=True, slots=True)
class Assembled:
    """The work of every stage, with the facts for the programs that run once a step."""

    work: tuple[StageWork, ...]
    gradients: tuple[tuple[int, str, Value], ...]
    """The gradients that work returns, by stage and parameter's name."""
    loss: Value
    last: int
    """The stage that makes the loss."""
    reads: tuple[frozenset[str], ...]
    """The parameters that each stage's forward reads and trains."""


def assemble(
    graph: fx.Graph, mesh: Mesh, seed: int, sums: torch.dtype | None = None, pipeline: Pipeline | None = None
) -> Assembled:
    """Write F and B of a typed graph whose first output is the loss's numerator.

    B's gradients have the types of the parameters as F reads them, dual, in the dtype ``sums`` in which microbatches
    are added up.
    """
    main, pairs = call_segments(graph, mesh, seed)
    loss, *updates = outputs(graph)
    lines, reads, returned = _backward(main, loss)
    gradients = []
    for stage, name, value in returned:
        lines.stage = stage
        gradients.append((stage, name, _narrowed(main, value, sums, lines)))
    buffers = noted(graph.output_node()).updates
    results = {LOSS: main.bind(loss).name}
    results |= {Binding("buffer", name): main.bind(node).name for name, node in zip(buffers, updates, strict=True)}
    for node in graph.find_nodes(op="placeholder"):
        if noted(node).binding in results:  # it has a type and a first value, also if nobody reads it
            main.bind(node)
    count = pipeline.stages if pipeline is not None else 1
    made_in = {v.name: s for line, s in zip(main.forward.lines, main.forward.stages, strict=True)
               for v in line.results if v is not None}  # fmt: skip
    read_in = {name: s for line, s in zip(main.forward.lines, main.forward.stages, strict=True) for name in line.uses()}
    # a buffer that becomes what the program is given does so where its old value is read
    lying = [made_in.get(name, read_in.get(main.parameters[key].name, 0) if key in main.parameters else 0)
             for key, name in results.items()]  # fmt: skip
    # B has the buffers that F updates as F read them, not as it left them
    backward_parameters = [
        replace(v, binding=Binding("saved", v.name)) if v.binding is None or v.binding in results else v
        for v in reads.values()
    ]
    backwards = split_lines(
        backward_parameters, lines.lines, [count - 1 - stage for stage in lines.stages],
        [[(Binding("gradient", name), value.name) for at, name, value in gradients if at == stage]
         for stage in reversed(range(count))],
    )[::-1]  # fmt: skip
    saved = [[(Binding("saved", name), name) for name in piece.function("backward").bound("saved")]
             for piece in backwards]  # fmt: skip
    forwards = split_lines(
        list(main.parameters.values()), main.forward.lines, main.forward.stages,
        [[*(pair for pair, at in zip(results.items(), lying, strict=True) if at == stage), *saved[stage]]
         for stage in range(count)],
    )  # fmt: skip
    unique = list({pair.forward.name: pair for pair in pairs.values()}.values())
    work = []
    for stage, (forward, backward) in enumerate(zip(forwards, backwards, strict=True)):
        role = f"stage{stage}"
        shared = [[pair.forward for pair in unique], [pair.backward for pair in unique if pair.backward]]
        work.append({
            action: Program(role, action, mesh, (*_called(functions, piece), piece.function(name)))
            for action, name, functions, piece in (
                (FORWARD, "forward", shared[0], forward), (BACKWARD, "backward", shared[1], backward)
            )
        })  # fmt: skip
    reads_of = (frozenset(piece.function("forward").bound("parameter")) for piece in forwards)
    return Assembled(tuple(work), tuple(gradients), main.bind(loss), lying[0], tuple(reads_of))


def _called(functions: Sequence[Function], piece: StagePiece) -> list[Function]:
    used = {line.op for line in piece.lines}
    return [function for function in functions if function.name in used]


def _narrowed(main: _Main, value: Value, sums: torch.dtype | None, lines: _Lines) -> Value:
    """Cast a gradient to the smaller dtype in which it is summed, if there is one."""
    if sums is None or sums.itemsize >= value.type.dtype.itemsize:
        return value
    narrow = replace(value.type, dtype=sums)
    return main.emit(lines, "narrow", narrow, "aten._to_copy.default", (Ref(value.name),), dtype=sums)


def assemble_count(graph: fx.Graph, mesh: Mesh, role: str) -> Program:
    """Write COUNT: the part of the loss's denominator from one microbatch, still partial on a rank."""
    main, pairs = call_segments(graph, mesh, 0)
    (count,) = outputs(graph)
    returns = ((COUNT, main.bind(count).name),)
    function = Function("count", tuple(main.parameters.values()), tuple(main.forward.lines), returns)
    return Program(role, COUNTING, mesh, (*(pair.forward for pair in pairs.values()), function))


def assemble_scale(count: TensorType | None, dtype: torch.dtype, parts: int, mesh: Mesh, role: str) -> Program:
    """Write SCALE: one over the step's whole denominator; without a count, one over the number of ``parts``
    averaged."""
    write, whole = Writer(mesh), whole_type(mesh, dtype)
    if count is None:
        scale = write.emit("aten.full.default", ([], 1.0 / parts), whole, name="scale", dtype=dtype)
    else:
        total = write.total(write.take("count", count, COUNT))
        real = write.emit("aten._to_copy.default", (Ref(total.name),), whole, dtype=dtype)
        scale = write.emit("aten.reciprocal.default", (Ref(real.name),), whole)
    return write.program(role, SCALING, [(SCALE, scale.name)])
