"""Assembly: segments, traced once for equal work, as functions that the programs of every stage call; and COUNT."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from ...compiler.capture.node_facts import StoredAs, noted
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import TensorType
from ...compiler.ops.rules import facts, registered
from ...compiler.program.actions import BACKWARD, FORWARD
from ...compiler.program.binding import LOSS, RNG, SCALE, Binding
from ...compiler.program.blocks import starred
from ...compiler.program.program import Function, Line, Origin, Program, Ref, Value
from ...compiler.program.rewriter import FreshNames, LineWriter
from ...compiler.program.roles import StageWork
from ...compiler.resolve.requests import Pipeline
from ..calls import outputs
from .cut import split_lines
from .emit import BlockPair, emit_pair, identifier, name_of, size_argument
from .joint import trace_joint
from .segments import Segment, cut_segments, data_type, node_type
from .writer import emit_conversions, weight_of, whole_type

_MOST_PAIRS = 256
"""The number of pairs in the cache, which keeps the last used."""
_PAIRS: dict[Hashable, BlockPair] = {}
"""The functions of segments, for equal work in all builds of a process."""


def pair_of(segment: Segment, name: str, mesh: Mesh, shared: str | None) -> BlockPair:
    """Return the functions ``name`` and ``name_backward`` of a segment. ``shared`` is the path of its block, if several
    blocks use them. Segments of equal work, origins and names of inputs share them."""
    origins = tuple(noted(node).origin for node in segment.nodes)
    read = tuple(noted(node).binding for node in segment.inputs)
    rules = tuple(registered().items())  # a person may give an operator its rule between two builds
    key = segment.signature, segment.block, origins, read, name, mesh, shared, rules
    pair = _PAIRS.pop(key, None) or emit_pair(trace_joint(segment, mesh), segment, name, mesh, shared)
    _PAIRS[key] = pair  # the last of a dict is the newest
    if len(_PAIRS) > _MOST_PAIRS:
        _PAIRS.pop(next(iter(_PAIRS)), None)
    return pair


class _Lines(LineWriter):
    """A main function's lines in order, each with the stage that was current when it was added."""

    def __init__(self, mesh: Mesh, names: FreshNames) -> None:
        super().__init__(mesh, names)
        self.stage, self.stages = 0, list[int]()
        self.unsharded: dict[tuple[fx.Node, int], Value] = {}
        """The parameters as the lines gathered them, by the stage that reads them."""

    def add(self, line: Line) -> None:
        """Add a line to the current stage."""
        super().add(line)
        self.stages.append(self.stage)


@dataclass(slots=True)
class _Main:
    """The main functions of F and B under construction."""

    mesh: Mesh
    seed: int
    names: FreshNames = field(default_factory=FreshNames)
    values: dict[fx.Node, Value] = field(default_factory=dict)
    parameters: dict[Binding, Value] = field(default_factory=dict)
    forward: _Lines = field(init=False)
    keys: set[tuple[str, int]] = field(default_factory=set)
    """The keys of random streams, with the stages that compute them."""
    calls: list[tuple[Segment, BlockPair, str, dict[str, Value]]] = field(default_factory=list)
    gathered: dict[str, fx.Node] = field(default_factory=dict)
    """The stored parameters, by the names of the values that F gathers of them."""
    trained: dict[Binding, str] = field(default_factory=dict)
    """The names of the trained parameters, by the bindings under which programs read them."""

    def __post_init__(self) -> None:
        self.forward = _Lines(self.mesh, self.names)

    def held(self, node: fx.Node) -> Value:
        """Return a stored parameter in the type in which F and B get it."""
        storage, binding = noted(node).storage, noted(node).binding
        assert storage is not None
        name = binding.name if binding.kind == "parameter" else ""
        if storage.step != storage.rest:
            binding = weight_of(storage)
        return self.parameter(binding, storage.name, storage.step, name)

    def parameter(self, binding: Binding, label: str, type_: TensorType, trained: str) -> Value:
        """Return F's parameter of a binding; ``trained`` is the name of the trained parameter that it stands for."""
        if binding not in self.parameters:
            self.parameters[binding] = self.forward.take(identifier(label), type_, binding)
            if trained:
                self.trained[binding] = trained
        return self.parameters[binding]

    def weight(self, node: fx.Node, lines: _Lines) -> Value:
        """Return a stored parameter as its readers want it. If it is sharded during a step, the lines gather it."""
        storage, held = noted(node).storage, self.held(node)
        assert storage is not None
        if (node, lines.stage) not in lines.unsharded:
            value = emit_conversions(lines, held, data_type(node), storage.origin)
            lines.unsharded[node, lines.stage] = value
            if value is not held:
                self.gathered[value.name] = node
        return lines.unsharded[node, lines.stage]

    def bind(self, node: fx.Node) -> Value:
        """Return the value of a placeholder or of an earlier call's result. Every stage computes the keys that it
        reads: they are on the CPU, and no message carries them."""
        binding: Binding = noted(node).binding
        kind, name = binding
        if noted(node).storage is not None:
            return self.weight(node, self.forward)
        if node not in self.values:
            type_ = data_type(node)
            if kind == "key":
                self.values[node] = Value(self.names.fresh(f"key_{identifier(name)}"), type_)
            else:
                trained = name if kind == "parameter" else ""
                self.values[node] = self.parameter(binding, name_of(binding), type_, trained)
        value = self.values[node]
        if kind == "key" and (value.name, self.forward.stage) not in self.keys:
            self.keys.add((value.name, self.forward.stage))
            if RNG not in self.parameters:
                self.parameters[RNG] = self.forward.take("rng", whole_type(self.mesh, torch.int64, (2,)), RNG)
            args = (Ref(self.parameters[RNG].name), name, self.seed)
            self.forward.add(Line((value,), "parc.stream_key.default", args, (), Origin(name.rsplit(".", 1)[0])))
        return value


def call_segments(graph: fx.Graph, mesh: Mesh, seed: int) -> tuple[_Main, dict[tuple[str, str], BlockPair]]:
    """Write F's main function as calls of segments; equal segments are traced and emitted once."""
    segments = cut_segments(graph, mesh)
    main = _Main(mesh, seed)
    pairs: dict[tuple[str, str], BlockPair] = {}
    counts = Counter(map(_kind, segments))
    functions = FreshNames()
    prefixes = FreshNames()
    for segment in segments:
        main.forward.stage = segment.stage
        kind = _kind(segment)
        if kind not in pairs:
            shared = segment.block if counts[kind] > 1 else None
            name = functions.fresh(identifier(kind[0].replace(".*", "") or "part"))
            pairs[kind] = pair_of(segment, name, mesh, shared)
        pair = pairs[kind]
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
        main.forward.add(Line(tuple(results), pair.forward.name, arguments, (), origin))
        for node, label in zip(segment.outputs, pair.outputs, strict=True):
            main.values[node] = table[label]
        main.calls.append((segment, pair, prefix, table))
    return main, pairs


def _kind(segment: Segment) -> tuple[str, str]:
    """Return the key of segments that share a function: their block's name without numbers, and their signature with
    the lines of the plan that place them, which a function's lines name."""
    lines = "".join(f" {noted(node).origin.plan}" for node in segment.nodes)
    return starred(segment.block or ""), segment.signature + lines


def _backward(main: _Main, loss: fx.Node | None) -> tuple[_Lines, dict[str, Value], list[tuple[int, str, Value]]]:
    """Write B's lines, segments in reverse. Return them, the values that B reads, and the gradients by stage and
    parameter's name. Without a loss all are empty."""
    if loss is None:
        return _Lines(main.mesh, main.names), {}, []
    scale = Value(main.names.fresh("scale"), whole_type(main.mesh, node_type(loss).dtype), SCALE)
    lines = _Lines(main.mesh, main.names)
    reads: dict[str, Value] = {scale.name: scale}
    gradients: dict[tuple[fx.Node, int], Value] = {(loss, 0): scale}
    left = Counter((segment.inputs[index], segment.stage) for segment, pair, *_ in main.calls
                   for index, _ in pair.gradients)  # fmt: skip
    for segment, pair, prefix, table in reversed(main.calls):
        if pair.backward is None:
            continue
        lines.stage = segment.stage
        arguments = []
        for label in pair.saved:
            value = table[label]
            if value.name in main.gathered:
                node = main.gathered[value.name]
                value, held = main.weight(node, lines), main.held(node)
                reads.setdefault(held.name, held)
            else:
                reads.setdefault(value.name, value)
            arguments.append(Ref(value.name))
        for index in pair.tangents:
            arguments.append(Ref(_tangent(main, segment.outputs[index], gradients, lines).name))
        inner = pair.backward.values()
        results = {
            label: Value(main.names.fresh(f"{prefix}_{label}"), inner[label].type) for _, label in pair.backward.returns
        }
        lines.add(Line(tuple(results.values()), pair.backward.name, tuple(arguments), (), Origin(segment.block or "")))
        for index, label in pair.gradients:
            node = segment.inputs[index]
            key = node, segment.stage if node.op == "placeholder" else 0
            total = results[label]
            if key in gradients:
                args = Ref(gradients[key].name), Ref(total.name)
                total = lines.emit("aten.add.Tensor", args, gradients[key].type, name="sum")
            left[node, segment.stage] -= 1
            if not left[node, segment.stage] and (storage := noted(node).storage) is not None:
                total = _stored_gradient(lines, total, storage)
            gradients[key] = total
    returned: dict[tuple[int, str], Value] = {}
    for (node, stage), value in gradients.items():
        if node.op == "placeholder":
            name = noted(node).binding.name
            if (stage, name) in returned:  # the parameter is read in a second type
                lines.stage, first = stage, returned[stage, name]
                value = lines.emit("aten.add.Tensor", (Ref(first.name), Ref(value.name)), first.type, name="sum")
            returned[stage, name] = value
    if not lines.lines:  # a model without parameters
        del reads[scale.name]
    return lines, reads, [(stage, name, value) for (stage, name), value in returned.items()]


def _stored_gradient(lines: _Lines, gradient: Value, storage: StoredAs) -> Value:
    """Return a whole gradient in its parameter's storage dtype, reduce-scattered over the axes over which every
    backward does that."""
    parts = {axis: storage.rest.placement[axis] for axis in storage.reduced}
    shape = storage.rest.shape if parts else gradient.type.shape
    wanted = TensorType(storage.rest.dtype, shape, gradient.type.placement.replace(parts))
    return emit_conversions(lines, gradient, wanted, storage.origin)


def _tangent(main: _Main, node: fx.Node, gradients: Mapping[tuple[fx.Node, int], Value], lines: _Lines) -> Value:
    """Return the gradient of a segment's output; zeros if none arrived."""
    if (node, 0) in gradients:
        return gradients[node, 0]
    type_ = replace(node_type(node), placement=node_type(node).placement.dual().data())
    shape = [size_argument(type_, dim) for dim in range(len(type_.shape))]
    return lines.emit("aten.full.default", (shape, 0.0), type_, name="zeros", dtype=type_.dtype)


@dataclass(frozen=True, slots=True)
class Assembled:
    """F and B of every stage, with the facts for the programs that run once a step."""

    work: tuple[StageWork, ...]
    gradients: tuple[tuple[int, str, Value], ...]
    """The gradients that work returns, by stage and parameter's name."""
    loss: Value | None
    """The loss's numerator; None where there is no loss."""
    last: int
    """The stage that makes the loss."""
    reads: tuple[frozenset[str], ...]
    """The parameters that each stage's forward reads and trains."""


def assemble(
    graph: fx.Graph, mesh: Mesh, seed: int, sums: torch.dtype | None = None, pipeline: Pipeline | None = None
) -> Assembled:
    """The pass that writes F and B of every stage. It takes the typed graph, staged where there is a pipeline, whose
    first output is the loss's numerator, if there is a loss. The graph stays as it is.

    B's gradients have the dual types of the parameters as F reads them, in the dtype ``sums`` in which microbatches are
    added up.
    """
    main, pairs = call_segments(graph, mesh, seed)
    returned = dict(zip(noted(graph.output_node()).results, outputs(graph), strict=True))
    lines, reads, gradients = _backward(main, returned.get(LOSS))
    if sums is not None:
        gradients = _cast_gradients(lines, gradients, sums)
    results = {key: main.bind(node).name for key, node in returned.items()}
    for node in graph.find_nodes(op="placeholder"):
        if noted(node).binding in results:  # an updated buffer is an input, also if nobody reads it
            main.bind(node)
    count = pipeline.stages if pipeline is not None else 1
    forward = main.forward.function("forward")
    result_stages = [_stage_of(main, forward, key, name) for key, name in results.items()]
    # B reads updated buffers as they were before F
    lines.parameters = {
        v.name: replace(v, binding=Binding("saved", v.name)) if v.binding is None or v.binding in results else v
        for v in reads.values()
    }
    backwards = split_lines(
        lines.function("backward"), [count - 1 - stage for stage in lines.stages],
        [[(Binding("gradient", name), value.name) for at, name, value in gradients if at == stage]
         for stage in reversed(range(count))],
    )[::-1]  # fmt: skip
    saved = [[(Binding("saved", name), name) for name in piece.bound("saved")] for piece in backwards]
    forwards = split_lines(
        forward, main.forward.stages,
        [[*(pair for pair, at in zip(results.items(), result_stages, strict=True) if at == stage), *saved[stage]]
         for stage in range(count)],
    )  # fmt: skip
    unique = list({pair.forward.name: pair for pair in pairs.values()}.values())
    work = []
    shared = [[pair.forward for pair in unique], [pair.backward for pair in unique if pair.backward]]
    for stage, mains in enumerate(zip(forwards, backwards, strict=True)):
        work.append({
            action: Program(f"stage{stage}", action, mesh, (*_called(functions, one), one))
            for action, functions, one in zip((FORWARD, BACKWARD), shared, mains, strict=True)
        })  # fmt: skip
    reads_of = (frozenset(main.trained[key] for key in piece.bindings if key in main.trained)
                for piece in forwards)  # fmt: skip
    loss = main.bind(returned[LOSS]) if LOSS in returned else None
    return Assembled(tuple(work), tuple(gradients), loss, result_stages[0], tuple(reads_of))


def _stage_of(main: _Main, forward: Function, key: Binding, name: str) -> int:
    """Return the stage of F that computes a result. A buffer whose new value is a parameter of F belongs to the stage
    that reads its old value."""
    line = forward.makers.get(name)
    if line is None and key in main.parameters:
        line = next(iter(forward.readers.get(main.parameters[key].name, ())[::-1]), None)
    return 0 if line is None else main.forward.stages[forward.at(line)]


def _called(functions: Sequence[Function], main: Function) -> list[Function]:
    used = {line.op for line in main.lines}
    return [function for function in functions if function.name in used]


def _cast_gradients(
    lines: _Lines, gradients: Sequence[tuple[int, str, Value]], sums: torch.dtype
) -> list[tuple[int, str, Value]]:
    """Cast gradients to the dtype in which microbatches are summed, where it is narrower, behind the lines that compute
    them. Where such a line only widens its operand, the operand is used instead."""
    wide = {value.name for _, _, value in gradients if sums.itemsize < value.type.dtype.itemsize}
    backward, stages = lines.function("backward"), lines.stages
    lines.lines, lines.stages, narrow = [], [], dict[str, Value]()

    def cast(value: Value, origin: Origin) -> Value:
        if value.type.dtype == sums:
            return value
        type_ = replace(value.type, dtype=sums)
        return lines.emit("aten._to_copy.default", (Ref(value.name),), type_, origin, "narrow", dtype=sums)

    for lines.stage, line in zip(stages, backward.lines, strict=True):
        first = line.made[0]
        casts = facts(line.op).casts and first.name in wide and not backward.uses[first.name]
        source = backward.values().get(line.uses[0]) if casts else None
        if source is not None and source.type.dtype.itemsize < first.type.dtype.itemsize:
            narrow[first.name] = cast(source, line.origin)
            continue
        lines.add(line)
        narrow.update((value.name, cast(value, line.origin)) for value in line.made if value.name in wide)
    return [(stage, name, narrow.get(value.name, value)) for stage, name, value in gradients]
