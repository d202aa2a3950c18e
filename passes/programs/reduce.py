"""REDUCE: what a role does once a step with its gradients and the loss, after all its microbatches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Placement, TensorType
from ...compiler.program.binding import GRAD_NORM, LOSS, SCALE, Binding
from ...compiler.program.program import Function, Line, Origin, Program, Ref, Value
from ..calls import outputs
from .cut import Pipeline
from .emit import FreshNames, identifier, size_argument
from .segments import node_type

ORIGIN = Origin()
"""Of lines that stand for no line of the model."""


def whole_type(mesh: Mesh, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> TensorType:
    """The type of a value that every rank holds whole."""
    return TensorType(dtype, shape, Placement.whole(mesh))


def reductions(
    graph: fx.Graph, mesh: Mesh, gradients: Sequence[tuple[int, str, Value]], loss: Value,
    reads: Sequence[Collection[str]], last: int, pipeline: Pipeline | None,
) -> Iterator[Program]:  # fmt: skip
    """REDUCE of every role; ``gradients`` come with their stage and the parameter's name, ``reads`` are each stage's
    parameters, ``last`` is the stage that makes the loss."""
    if pipeline is None:
        yield _reduce(graph, mesh, {name: value for _, name, value in gradients}, loss, "stage0")
        return
    ranks = mesh.size(pipeline.axis)
    types = {name: value.type for _, name, value in gradients}
    owners = {name: sorted({stage % ranks for stage, names in enumerate(reads) if name in names})
              for name in sorted(types)}  # fmt: skip
    counts = {name: min(stage % ranks for stage, made, _ in gradients if made == name) for name in types}
    for rank in range(ranks):
        own = {name: value for stage, name, value in gradients if stage % ranks == rank}
        # those of several roles first and in one order: their ranks meet in them
        tied = {name: at for name, at in owners.items() if len(at) > 1 and rank in at}
        across = Across(pipeline.axis, range(ranks), tied, {name for name in tied if counts[name] != rank})
        numerator = loss if last % ranks == rank else None
        first = {name: own.get(name, types[name]) for name in tied}
        yield _reduce(graph, mesh, {**first, **own}, numerator, f"{pipeline.axis}{rank}", across)


@dataclass(frozen=True, slots=True)
class Across:
    """How the REDUCE of one role meets the others: over all coordinates of the pipeline's axis, and for a parameter of
    several roles over theirs."""

    axis: str
    ranks: Sequence[int]
    tied: Mapping[str, Sequence[int]]
    elsewhere: Collection[str]
    """Of these parameters those that another role counts in the norm."""


@dataclass(slots=True)
class Writer:
    """The function of a program of steps while it grows; with ``across`` that of one of several roles."""

    mesh: Mesh
    across: Across | None = None
    names: FreshNames = field(default_factory=FreshNames)
    parameters: list[Value] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    def take(self, base: str, type_: TensorType, binding: Binding) -> Value:
        """A parameter."""
        self.parameters.append(Value(self.names.fresh(base), type_, binding))
        return self.parameters[-1]

    def emit(self, op: str, args: tuple[object, ...], type_: TensorType, origin: Origin = ORIGIN, name: str = "",
             **options: object) -> Value:  # fmt: skip
        """The result of one more line, named after its operator unless told otherwise."""
        value = Value(self.names.fresh(name or op.split(".")[1].strip("_")), type_)
        self.lines.append(Line((value,), op, args, tuple(options.items()), origin))
        return value

    def stacked_sum(self, values: Sequence[Value]) -> Value:
        """The sum of values of one type, each a single number."""
        row = replace(values[0].type, shape=(len(values),))
        stacked = self.emit("aten.stack.default", ([Ref(value.name) for value in values],), row)
        return self.emit("aten.sum.default", (Ref(stacked.name),), values[0].type)

    def zeros(self, type_: TensorType, origin: Origin = ORIGIN) -> Value:
        """What this role adds where it makes no part."""
        shape = [size_argument(type_, dim) for dim in range(len(type_.shape))]
        return self.emit("aten.full.default", (shape, 0.0), type_, origin, "zeros", dtype=type_.dtype)

    def total(self, value: Value, origin: Origin = ORIGIN) -> Value:
        """The sum over the axes on which a value is partial."""
        axes = value.type.placement.partial
        if not axes:
            return value
        return self.emit("parc.all_reduce", (Ref(value.name), ",".join(axes)), _summed(value.type), origin)

    def among(self, value: Value, ranks: Sequence[int], origin: Origin = ORIGIN) -> Value:
        """The sum over roles, where there are several."""
        if self.across is None:
            return value
        args = Ref(value.name), self.across.axis, list(ranks)
        return self.emit("parc.all_reduce_among", args, value.type, origin)

    def gradient(self, name: str, made: Value | TensorType, dtype: torch.dtype, origin: Origin) -> Value:
        """A gradient's sum over this role's ranks; of one whose type alone is given, zeros."""
        if isinstance(made, TensorType):  # its stages read the parameter where no gradient flows
            return self.zeros(replace(_summed(made), dtype=dtype), origin)
        value = self.take(identifier(name), made.type, Binding("gradient", name))
        if made.type.dtype != dtype:
            wide = replace(made.type, dtype=dtype)
            value = self.emit("aten._to_copy.default", (Ref(value.name),), wide, origin, "widen", dtype=dtype)
        return self.total(value, origin)

    def program(self, role: str, action: str, returns: Sequence[tuple[Binding, str]]) -> Program:
        """What was written, as the one function of an action's program."""
        function = Function(action.lower(), tuple(self.parameters), tuple(self.lines), tuple(returns))
        return Program(role, action, self.mesh, (function,))


def _summed(type_: TensorType) -> TensorType:
    return replace(type_, placement=type_.placement.replace(dict.fromkeys(type_.placement.partial, "I")))


def _reduce(
    graph: fx.Graph, mesh: Mesh, gradients: Mapping[str, Value | TensorType], loss: Value | None, role: str,
    across: Across | None = None,
) -> Program:  # fmt: skip
    """Sum gradients and the loss over the axes on which they are partial, and over the roles that have a part of them,
    once a step; and the global norm. Of a gradient that this role's stages do not make, the type is given."""
    write, returns = Writer(mesh, across), []
    stored = {noted(node).binding.name: node for node in graph.find_nodes(op="placeholder")
              if noted(node).binding.kind == "parameter"}  # fmt: skip
    squares: dict[tuple[str, ...], list[Value]] = {}
    trained = (node_type(node).dtype for node in stored.values())
    dtype = reduce(torch.promote_types, trained, torch.float32)  # of the norm, alike in all roles
    # all sums first: on a real network they run side by side
    reduced = []
    for name, gradient in gradients.items():
        origin = Origin(name, "", noted(stored[name]).line)
        reduced.append((name, write.gradient(name, gradient, node_type(stored[name]).dtype, origin), origin))
    for at, (name, value, origin) in enumerate(reduced):
        if across is not None and name in across.tied:
            reduced[at] = name, write.among(value, across.tied[name], origin), origin
    returns += [(Binding("gradient", name), value.name) for name, value, _ in reduced]
    for name, value, origin in reduced:
        if across is not None and name in across.elsewhere:
            continue
        split = value.type.placement.split_axes()
        squared = torch.promote_types(value.type.dtype, torch.float32)
        partial = replace(whole_type(mesh, squared), placement=Placement.of(mesh, dict.fromkeys(split, "P")))
        square = write.emit("parc.square_sum.default", (Ref(value.name),), partial, origin)
        if squared != dtype:
            wide = replace(partial, dtype=dtype)
            square = write.emit("aten._to_copy.default", (Ref(square.name),), wide, origin, "widen", dtype=dtype)
        squares.setdefault(split, []).append(square)
    whole = whole_type(mesh, node_type(outputs(graph)[0]).dtype)
    if loss is None:
        mean = write.zeros(whole)
    else:
        numerator = write.take("loss", loss.type, LOSS)
        scale = write.take("scale", whole_type(mesh, loss.type.dtype), SCALE)
        summed = write.total(numerator)
        mean = write.emit("aten.mul.Tensor", (Ref(summed.name), Ref(scale.name)), summed.type)
    everyone = across.ranks if across is not None else ()
    returns.append((LOSS, write.among(mean, everyone).name))
    if squares or across is not None:
        # each group of equally split gradients is summed over its axes once
        sums = [write.total(write.stacked_sum(group)) for group in squares.values()]
        square = write.among(write.stacked_sum(sums) if sums else write.zeros(whole_type(mesh, dtype)), everyone)
        root = write.emit("aten.sqrt.default", (Ref(square.name),), square.type)
        returns.append((GRAD_NORM, root.name))
    return write.program(role, "REDUCE", returns)
