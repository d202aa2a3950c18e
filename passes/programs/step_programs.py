"""Makers: the functions that make the programs of each kind of action."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Placement, TensorType
from ...compiler.program.actions import (
    AVERAGING,
    BACKWARD,
    COUNTING,
    FORWARD,
    LOADS,
    REDUCE,
    RESCALE,
    SCALING,
    UNSHARD,
    Purpose,
    StageRanks,
    step_kinds,
)
from ...compiler.program.binding import COUNT, GRAD_NORM, LOSS, SCALE, UNSCALE, Binding
from ...compiler.program.program import Line, Origin, Program, Ref, Value
from ...compiler.program.rewriter import ORIGIN
from ...compiler.program.roles import SINGLE, Programs
from ...compiler.program.step_values import (
    BACKOFF,
    DYNAMIC,
    GROWTH,
    INTERVAL,
    LOAD,
    LOSS_SCALE,
    NEXT_SCALE,
    SCALER,
    Bias,
    LossScale,
    residual,
    term_count,
)
from ..calls import outputs
from .assemble import Assembled, assemble_count
from .compress import Compressor
from .cut import Pipeline
from .emit import identifier
from .segments import node_type
from .writer import Across, Writer, stored_type, summed_type, unshard, whole_type

# ---- lOADS: once a step, the tokens that each expert got in the whole batch, and the biases that balance them.


def load_programs(
    made: Sequence[Mapping[str, TensorType]], order: Sequence[str], biases: Mapping[str, Bias],
    buffers: Mapping[str, TensorType], mesh: Mesh, roles: Sequence[str], axis: str,
) -> Sequence[Program]:  # fmt: skip
    """Write LOADS of every role; ``made`` are the loads that each role's F makes, by the module of the experts, of
    which ``order`` is that of the model.

    Every role returns the loads of all layers, one behind the other, as a metric. The role of a layer with a bias adds
    its ``rate`` to the biases of experts with fewer tokens than the mean, and takes it from those with more (Wang et
    al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024).
    """
    types = {module: type_ for own in made for module, type_ in own.items()}
    layers = {module: types[module] for module in order}
    if not layers:
        return []
    programs, everyone = [], range(len(roles))
    for role, own in zip(roles, made, strict=True):
        write = Writer(mesh, Across(axis, everyone, {}, ()) if axis else None)
        loads = _summed(write, own)
        pieces = [
            loads[module] if module in loads else write.zeros(summed_type(type_)) for module, type_ in layers.items()
        ]
        returns = [(LOAD, write.among(_joined(write, pieces), everyone).name)]
        for module in own:
            if (bias := biases.get(module)) is not None:
                returns.append(_moved(write, bias, loads[module], buffers[bias.buffer]))
        programs.append(write.program(role, LOADS, returns))
    return programs


def _summed(write: Writer, own: Mapping[str, TensorType]) -> dict[str, Value]:
    """Add the sums over the ranks that route different tokens: one for all layers with the same ones."""
    loads: dict[str, Value] = {}
    for placement in dict.fromkeys(type_.placement for type_ in own.values()):
        given = {
            module: write.take(f"load_{identifier(module)}", type_, Binding("load", module))
            for module, type_ in own.items() if type_.placement == placement
        }  # fmt: skip
        total, start = write.total(_joined(write, list(given.values()))), 0
        for module, value in given.items():
            size = value.type.shape[0]
            args = Ref(total.name), 0, start, start + size, 1
            loads[module] = total if len(given) == 1 else write.emit("aten.slice.Tensor", args, summed_type(value.type))
            start += size
    return loads


def _joined(write: Writer, values: Sequence[Value]) -> Value:
    if len(values) == 1:
        return values[0]
    row = replace(values[0].type, shape=(sum(value.type.shape[0] for value in values),))
    return write.emit("aten.cat.default", ([Ref(value.name) for value in values],), row)


def _moved(write: Writer, bias: Bias, load: Value, stored: TensorType) -> tuple[Binding, str]:
    """Add the new value of a bias. Float64 holds any number of tokens exactly."""
    key, wide = Binding("buffer", bias.buffer), torch.float64
    old, row = write.take(identifier(bias.buffer), stored, key), whole_type(write.mesh, wide, load.type.shape)
    tokens = write.emit("aten._to_copy.default", (Ref(load.name),), row, dtype=wide)
    mean = write.emit("aten.mean.default", (Ref(tokens.name),), whole_type(write.mesh, wide))
    flags, moves = replace(row, dtype=torch.bool), []
    for op in ("lt", "gt"):  # what is compared is rounded to no other type
        flag = write.emit(f"aten.{op}.Tensor", (Ref(tokens.name), Ref(mean.name)), flags)
        moves.append(write.emit("aten._to_copy.default", (Ref(flag.name),), stored, dtype=stored.dtype))
    step = write.emit("aten.sub.Tensor", tuple(Ref(move.name) for move in moves), stored)
    step = write.emit("aten.mul.Tensor", (Ref(step.name), bias.rate), stored)
    return key, write.emit("aten.add.Tensor", (Ref(old.name), Ref(step.name)), stored, name="moved").name


# ---- sCALE and RESCALE: the work of a step, before and after all else, with the numbers that multiply its loss.


def scale_program(
    counts: Mapping[Binding, TensorType],
    terms: Sequence[Binding],
    microbatches: int,
    dtype: torch.dtype,
    parts: int,
    mesh: Mesh,
    role: str,
    scaled: bool,
) -> Program:
    """Write SCALE: one over the step's whole denominator; without a count, one over the number of ``parts`` averaged.
    If the loss is ``scaled``, it is this times the loss scale, and one over the loss scale is a second result.

    ``terms`` are the weights of the loss's other terms: the denominator over a term's own, or over the number of
    ``microbatches``, of which it is averaged.
    """
    write, whole = Writer(mesh), whole_type(mesh, dtype)
    totals = {}
    for key, type_ in counts.items():
        total = write.total(write.take(f"count_{key.name}".rstrip("_"), type_, key))
        totals[key] = write.emit("aten._to_copy.default", (Ref(total.name),), whole, dtype=dtype)
    if not totals:
        scale = write.emit("aten.full.default", ([], 1.0 / parts), whole, name="scale", dtype=dtype)
    else:
        scale = write.emit("aten.reciprocal.default", (Ref(totals[COUNT].name),), whole)
    results = []
    for key in terms:
        own = totals.get(term_count(key.name))
        by = microbatches if own is None else Ref(own.name)
        name = f"term_{key.name}"
        results.append((key, write.emit("aten.div.Tensor", (Ref(totals[COUNT].name), by), whole, name=name).name))
    if not scaled:
        return write.program(role, SCALING, [(SCALE, scale.name), *results])
    loss_scale = write.take(LOSS_SCALE.name, whole_type(mesh, torch.float32), LOSS_SCALE)
    unscale = write.emit("aten.reciprocal.default", (Ref(loss_scale.name),), loss_scale.type, name="unscale")
    scale = write.emit("aten.mul.Tensor", (Ref(scale.name), Ref(loss_scale.name)), whole)
    return write.program(role, SCALING, [(SCALE, scale.name), (UNSCALE, unscale.name), *results])


def rescale_program(norm: torch.dtype, mesh: Mesh, role: str) -> Program:
    """Write RESCALE: the state of a dynamic loss scale after the step. Every rank has the same norm and the same state,
    so all come to the same scale, and skip the same steps."""
    write = Writer(mesh)
    given = [write.take(GRAD_NORM.kind, whole_type(mesh, norm), GRAD_NORM)]
    given += [write.take(key.name, whole_type(mesh, getattr(torch, row.dtype)), key) for key, row in SCALER.items()]
    made = tuple(Value(write.names.fresh(f"next_{value.name}"), value.type) for value in given[1:])
    args = (*(Ref(value.name) for value in given), GROWTH, BACKOFF, INTERVAL)
    write.add(Line(made, NEXT_SCALE, args, (), ORIGIN))
    return write.program(role, RESCALE, [(key, value.name) for key, value in zip(SCALER, made, strict=True)])


# ---- lOSS and REDUCE: the work of a role once a step, after all microbatches, with the loss and with its


def reductions(
    graph: fx.Graph, mesh: Mesh, made: Assembled, pipeline: Pipeline | None, scaled: bool, compressor: Compressor
) -> Iterator[Program]:
    """Write REDUCE of every role: it sums partial gradients, and converts them to the placements in which the
    parameters are stored. It divides them by the loss scale, if the loss is ``scaled``."""
    if pipeline is None:
        gradients = {name: value for _, name, value in made.gradients}
        yield _reduce(graph, mesh, gradients, SINGLE, scaled, compressor)
        return
    ranks, everyone = pipeline.ranks, range(mesh.size(pipeline.axis))
    trained = sorted({name for _, name, _ in made.gradients})
    owners = {name: sorted({ranks[stage] for stage, names in enumerate(made.reads) if name in names})
              for name in trained}  # fmt: skip
    counts = {name: min(ranks[stage] for stage, other, _ in made.gradients if other == name) for name in trained}
    for rank in everyone:
        own = {name: value for stage, name, value in made.gradients if ranks[stage] == rank}
        # those of several roles first and in one order: their ranks meet in them
        tied = {name: at for name, at in owners.items() if len(at) > 1 and rank in at}
        across = Across(pipeline.axis, everyone, tied, {name for name in tied if counts[name] != rank})
        first = {name: own.get(name) for name in tied}
        yield _reduce(graph, mesh, {**first, **own}, f"{pipeline.axis}{rank}", scaled, compressor, across)


def losses(mesh: Mesh, made: Assembled, pipeline: Pipeline | None, scaled: bool) -> Iterator[Program]:
    """Write LOSS of every role: the sum of the loss's numerators over the axes on which they are partial, and over the
    roles, times one over the count. Where gradients are ``scaled``, the loss scale is taken out of that first, since
    the loss times its scale may be infinite."""
    assert made.loss is not None
    for rank in range(mesh.size(pipeline.axis)) if pipeline is not None else (0,):
        across = Across(pipeline.axis, range(mesh.size(pipeline.axis)), {}, ()) if pipeline is not None else None
        write = Writer(mesh, across)
        if pipeline is None or pipeline.ranks[made.last] == rank:
            numerator = write.take("loss", made.loss.type, LOSS)
            scale = write.take("scale", whole_type(mesh, made.loss.type.dtype), SCALE)
            if scaled:
                unscale = write.take("unscale", whole_type(mesh, torch.float32), UNSCALE)
                scale = write.emit("aten.mul.Tensor", (Ref(scale.name), Ref(unscale.name)), scale.type)
            summed = write.total(numerator)
            mean = write.emit("aten.mul.Tensor", (Ref(summed.name), Ref(scale.name)), summed.type)
        else:
            mean = write.zeros(whole_type(mesh, made.loss.type.dtype))
        role = f"{pipeline.axis}{rank}" if pipeline is not None else SINGLE
        yield write.program(role, AVERAGING, [(LOSS, write.among(mean, across.ranks if across else ()).name)])


def norm_dtype(graph: fx.Graph) -> torch.dtype:
    """Return the type of the gradients' norm, alike in all roles."""
    parameters = (n for n in graph.find_nodes(op="placeholder") if noted(n).binding.kind == "parameter")
    return reduce(torch.promote_types, (stored_type(node).dtype for node in parameters), torch.float32)


def _squared(write: Writer, value: Value, dtype: torch.dtype, origin: Origin) -> Value:
    """Add the sum of a gradient's squares on this rank, in the type of the norm."""
    squared = torch.promote_types(value.type.dtype, torch.float32)
    placement = Placement.of(write.mesh, dict.fromkeys(value.type.placement.split_axes(), "P"))
    partial = replace(whole_type(write.mesh, squared), placement=placement)
    square = write.emit("parc.square_sum.default", (Ref(value.name),), partial, origin)
    if squared == dtype:
        return square
    wide = replace(partial, dtype=dtype)
    return write.emit("aten._to_copy.default", (Ref(square.name),), wide, origin, "widen", dtype=dtype)


def _reduce(
    graph: fx.Graph, mesh: Mesh, gradients: Mapping[str, Value | None], role: str, scaled: bool,
    compressor: Compressor, across: Across | None = None,
) -> Program:  # fmt: skip
    """Write the sums of gradients over the axes on which they are partial, and over the roles that have a part of
    them; and the global norm. A gradient that this role's stages do not make is None."""
    write, returns = Writer(mesh, across), []
    stored = {noted(node).binding.name: node for node in graph.find_nodes(op="placeholder")
              if noted(node).binding.kind == "parameter"}  # fmt: skip
    squares: dict[tuple[str, ...], list[Value]] = {}
    types = {name: stored_type(node) for name, node in stored.items()}
    dtype = norm_dtype(graph)
    divides = scaled and any(value is not None for value in gradients.values())
    unscale = write.take("unscale", whole_type(mesh, torch.float32), UNSCALE) if divides else None
    # all sums first: on a real network they run side by side
    reduced = []
    for name, gradient in gradients.items():
        origin = Origin(name, "", noted(stored[name]).line)
        tied = gradient is None or (across is not None and name in across.tied)
        value, *left = compressor.sums(write, name, None if tied else gradient, types[name], unscale, origin) or [
            write.gradient(name, gradient, types[name], origin)
        ]
        reduced.append((name, value, origin))
        returns += [(residual(name), one.name) for one in left]
    kept = {key for key, _ in returns}
    for at, (name, value, origin) in enumerate(reduced):
        if unscale is not None and gradients[name] is not None and residual(name) not in kept:
            value = write.times(value, unscale, origin)
            reduced[at] = name, value, origin
        if across is not None and name in across.tied:
            reduced[at] = name, write.among(value, across.tied[name], origin), origin
    returns += [(Binding("gradient", name), value.name) for name, value, _ in reduced]
    for name, value, origin in reduced:
        if across is not None and name in across.elsewhere:
            continue
        squares.setdefault(value.type.placement.split_axes(), []).append(_squared(write, value, dtype, origin))
    everyone = across.ranks if across is not None else ()
    if squares or across is not None:
        # each group of equally split gradients is summed over its axes once
        sums = [write.total(write.stacked_sum(group)) for group in squares.values()]
        square = write.among(write.stacked_sum(sums) if sums else write.zeros(whole_type(mesh, dtype)), everyone)
        root = write.emit("aten.sqrt.default", (Ref(square.name),), square.type)
        returns.append((GRAD_NORM, root.name))
    return write.program(role, REDUCE, returns)


# ---- makers: the functions that make the programs of each kind of action.


@dataclass(frozen=True, slots=True)
class StepParts:
    """The materials of a step's programs: the typed graphs of the forward and of the count of targets, where there is
    one, and the work of every stage."""

    mesh: Mesh
    graph: fx.Graph
    count: fx.Graph | None
    counts: tuple[Binding, ...]
    """The denominators that ``count`` makes."""
    averaged: int
    """The number of parts of which the loss is the mean, where no count divides it."""
    microbatches: int
    made: Assembled
    pipeline: Pipeline | None
    loss_scale: LossScale = None
    compressor: Compressor = field(default_factory=Compressor)
    biases: Mapping[str, Bias] = field(default_factory=dict)
    """The biases that balance experts, by the module of these."""

    @property
    def ranks(self) -> StageRanks:
        """The number of the role that has each stage."""
        return self.pipeline.ranks if self.pipeline is not None else (0,)

    @property
    def roles(self) -> Sequence[str]:
        """The names of the roles."""
        axis = self.pipeline.axis if self.pipeline is not None else ""
        return [f"{axis}{rank}" for rank in range(self.mesh.size(axis))] if axis else [SINGLE]


Maker = Callable[[StepParts], Sequence[Program]]
"""A function that makes the programs of a kind: one for the whole step, or for each stage, or for each role, as its row
says; none where the step does not have the kind."""


def _count(parts: StepParts) -> Sequence[Program]:
    return [] if parts.count is None else [assemble_count(parts.count, parts.counts, parts.mesh, SINGLE)]


def _scale(parts: StepParts) -> Sequence[Program]:
    made = outputs(parts.count) if parts.count is not None else []
    counts = {key: node_type(node) for key, node in zip(parts.counts, made, strict=True)}
    weights = [noted(node).binding for node in parts.graph.find_nodes(op="placeholder")]
    terms = [key for key in weights if key.kind == "term"]
    dtype: torch.dtype = node_type(outputs(parts.graph)[0]).dtype
    scaled = parts.loss_scale is not None
    return [scale_program(counts, terms, parts.microbatches, dtype, parts.averaged, parts.mesh, SINGLE, scaled)]


def _rescale(parts: StepParts) -> Sequence[Program]:
    """Return RESCALE, where the loss scale is dynamic."""
    return [rescale_program(norm_dtype(parts.graph), parts.mesh, SINGLE)] if parts.loss_scale == DYNAMIC else []


def _work(kind: str) -> Maker:
    return lambda parts: [work[kind] for work in parts.made.work]


def _unshard(parts: StepParts) -> Sequence[Program]:
    """Return UNSHARD of every role, if any role has something to make in it."""
    read: dict[str, set[Binding]] = {name: set() for name in parts.roles}
    for at, work in enumerate(parts.made.work):
        for program in work.values():
            read[parts.roles[parts.ranks[at]]].update(program.main.bindings)
    programs = [unshard(parts.graph, parts.mesh, name, keys) for name, keys in read.items()]
    return programs if any(program.main.lines for program in programs) else []


def _loads(parts: StepParts) -> Sequence[Program]:
    """Return LOADS of every role, where the model routes tokens to experts."""
    made: list[dict[str, TensorType]] = [{} for _ in parts.roles]
    for rank, work in zip(parts.ranks, parts.made.work, strict=True):
        main = work[FORWARD].main
        values = main.values()
        made[rank].update((module, values[name].type) for module, name in main.returned("load").items())
    nodes = parts.graph.find_nodes(op="placeholder")
    buffers = {noted(node).binding.name: node_type(node) for node in nodes if noted(node).binding.kind == "buffer"}
    axis = parts.pipeline.axis if parts.pipeline is not None else ""
    order = [key.name for key in noted(parts.graph.output_node()).results if key.kind == "load"]
    return load_programs(made, order, parts.biases, buffers, parts.mesh, parts.roles, axis)


MAKERS: dict[str, Maker] = {
    LOADS: _loads,
    COUNTING: _count,
    SCALING: _scale,
    UNSHARD: _unshard,
    FORWARD: _work(FORWARD),
    BACKWARD: _work(BACKWARD),
    AVERAGING: lambda parts: [*losses(parts.mesh, parts.made, parts.pipeline, parts.loss_scale is not None)],
    REDUCE: lambda parts: [
        *reductions(parts.graph, parts.mesh, parts.made, parts.pipeline, parts.loss_scale is not None, parts.compressor)
    ],
    RESCALE: _rescale,
}


def make_roles(parts: StepParts, purpose: Purpose = "training") -> dict[str, Programs]:
    """Return the programs of every role that serve a purpose: those that all share, its stages' work and its own."""
    roles: dict[str, dict[str, Program]] = {name: {} for name in parts.roles}
    for row in step_kinds():
        if not row.serves(purpose):
            continue
        for at, program in enumerate(MAKERS[row.kind](parts) if row.program else ()):
            key = f"{at}{row.kind}" if row.program == "stage" and parts.pipeline is not None else row.kind
            for name in _holders(row.program, at, parts):
                roles[name][key] = program
    return dict(roles)


def _holders(program: str, at: int, parts: StepParts) -> Sequence[str]:
    """Return the roles that have the program of number ``at`` of a kind."""
    if program == "step":
        return parts.roles
    return [parts.roles[parts.ranks[at] if program == "stage" else at]]
