"""Makers: the functions that make the programs of each kind of action, of the materials of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import takewhile

import torch
from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Placement, Split, TensorType
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
    StageRanks,
    step_kinds,
)
from ...compiler.program.binding import GRAD_NORM, LOSS, SCALE, UNSCALE, Binding
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
    Division,
    residual,
)
from ...compiler.resolve.requests import Claim, Request
from ..calls import outputs
from .assemble import Assembled, call_segments
from .compress import Compressor
from .emit import identifier
from .scaling import write_moved_bias, write_scale
from .segments import node_type
from .writer import Across, Writer, stored_type, summed_type, unshard, whole_type


@dataclass(frozen=True, slots=True)
class StepMaterials:
    """The materials of a step's programs: the plan's request, the typed graphs of the forward and of the count of
    targets, where there is one, and the work of every stage."""

    request: Request
    graph: fx.Graph
    count: fx.Graph | None
    counts: tuple[Binding, ...]
    """The denominators that ``count`` makes."""
    divisions: tuple[Division, ...]
    """The division of each term of the loss."""
    assembled: Assembled
    compressor: Compressor = field(default_factory=Compressor)

    @property
    def mesh(self) -> Mesh:
        """The mesh on which the programs run."""
        return self.request.placing.mesh

    @property
    def axis(self) -> str:
        """The axis over which the stages lie; empty where there is one stage."""
        return self.request.pipeline.axis if self.request.pipeline is not None else ""

    @property
    def stage_ranks(self) -> StageRanks:
        """The number of the role that has each stage."""
        return self.request.pipeline.ranks if self.request.pipeline is not None else (0,)

    @property
    def roles(self) -> Sequence[str]:
        """The names of the roles."""
        return [f"{self.axis}{rank}" for rank in range(self.mesh.size(self.axis))] if self.axis else [SINGLE]

    @property
    def scaled(self) -> bool:
        """True where the loss is multiplied by a loss scale."""
        return self.request.computing.loss_scale is not None

    def writer(self) -> Writer:
        """Return the writer of one role's program, which can sum over all roles."""
        return Writer(self.mesh, Across(self.axis, range(len(self.roles)), {}, ()) if self.axis else None)


Maker = Callable[[StepMaterials], Iterable[Program]]
"""A function that makes the programs of a kind: one for the whole step, or for each stage, or for each role, as its row
says; none where the step does not have the kind."""


# ---- LOADS


def load_programs(step: StepMaterials) -> Iterator[Program]:
    """Write LOADS of every role, where the model routes tokens to experts: once a step, the tokens that each expert got
    in the whole batch, and the biases that balance them.

    Every role returns the loads of all layers, one behind the other, as a metric. The role of a layer with a bias moves
    it.
    """
    by_role: list[dict[str, TensorType]] = [{} for _ in step.roles]
    for rank, work in zip(step.stage_ranks, step.assembled.work, strict=True):
        main = work[FORWARD].main
        values = main.values()
        by_role[rank].update((module, values[name].type) for module, name in main.returned("load").items())
    types = {module: type_ for role_types in by_role for module, type_ in role_types.items()}
    order = [key.name for key in noted(step.graph.output_node()).results if key.kind == "load"]
    nodes, experts = step.graph.find_nodes(op="placeholder"), step.request.placing.experts
    buffers = {noted(node).binding.name: node_type(node) for node in nodes if noted(node).binding.kind == "buffer"}
    for role, role_types in zip(step.roles, by_role, strict=True) if order else ():
        write = step.writer()
        loads = _summed_loads(write, role_types)
        pieces = [loads[module] if module in loads else write.zeros(summed_type(types[module])) for module in order]
        returns = [(LOAD, write.among(_concatenated(write, pieces), range(len(by_role))).name)]
        for module in role_types:
            if module in experts and (bias := experts[module].bias) is not None:
                returns.append(write_moved_bias(write, bias, loads[module], buffers[bias.buffer]))
        yield write.program(role, LOADS, returns)


def _summed_loads(write: Writer, types: Mapping[str, TensorType]) -> dict[str, Value]:
    """Add the sums over the ranks that route different tokens: one for all layers with the same ones."""
    loads: dict[str, Value] = {}
    for placement in dict.fromkeys(type_.placement for type_ in types.values()):
        taken = {
            module: write.take(f"load_{identifier(module)}", type_, Binding("load", module))
            for module, type_ in types.items() if type_.placement == placement
        }  # fmt: skip
        total, start = write.total(_concatenated(write, list(taken.values()))), 0
        for module, value in taken.items():
            size = value.type.shape[0]
            args = Ref(total.name), 0, start, start + size, 1
            loads[module] = total if len(taken) == 1 else write.emit("aten.slice.Tensor", args, summed_type(value.type))
            start += size
    return loads


def _concatenated(write: Writer, values: Sequence[Value]) -> Value:
    if len(values) == 1:
        return values[0]
    row = replace(values[0].type, shape=(sum(value.type.shape[0] for value in values),))
    return write.emit("aten.cat.default", ([Ref(value.name) for value in values],), row)


# ---- SCALE and RESCALE


def scale_programs(step: StepMaterials) -> Iterator[Program]:
    """Write SCALE: the scale of a step's loss. If there is a loss scale, it is this times the loss scale, and one over
    the loss scale is a second result. The weights of terms are further ones."""
    write = Writer(step.mesh)
    scale, returns = write_scale(write, step.graph, step.count, step.counts, step.divisions,
                                 step.request.computing.microbatches)  # fmt: skip
    if step.scaled:
        loss_scale = write.take(LOSS_SCALE.name, whole_type(step.mesh, torch.float32), LOSS_SCALE)
        unscale = write.emit("aten.reciprocal.default", (Ref(loss_scale.name),), loss_scale.type, name="unscale")
        scale = write.emit("aten.mul.Tensor", (Ref(scale.name), Ref(loss_scale.name)), scale.type)
        returns.insert(0, (UNSCALE, unscale.name))
    yield write.program(SINGLE, SCALING, [(SCALE, scale.name), *returns])


def rescale_programs(step: StepMaterials) -> Iterator[Program]:
    """Write RESCALE, where the loss scale is dynamic: its state after the step. Every rank has the same norm and the
    same state, so all come to the same scale, and skip the same steps."""
    if step.request.computing.loss_scale != DYNAMIC:
        return
    write = Writer(step.mesh)
    read = [write.take(GRAD_NORM.kind, whole_type(step.mesh, norm_dtype(step.graph)), GRAD_NORM)]
    read += [write.take(key.name, whole_type(step.mesh, getattr(torch, row.dtype)), key) for key, row in SCALER.items()]
    results = tuple(Value(write.names.fresh(f"next_{value.name}"), value.type) for value in read[1:])
    args = (*(Ref(value.name) for value in read), GROWTH, BACKOFF, INTERVAL)
    write.add(Line(results, NEXT_SCALE, args, (), ORIGIN))
    yield write.program(SINGLE, RESCALE, [(key, value.name) for key, value in zip(SCALER, results, strict=True)])


# ---- LOSS and REDUCE


def loss_programs(step: StepMaterials) -> Iterator[Program]:
    """Write LOSS of every role: the sum of the loss's numerators over the axes on which they are partial, and over the
    roles, times one over the count. Where gradients are scaled, the loss scale is taken out of that first, since the
    loss times its scale may be infinite."""
    loss = step.assembled.loss
    assert loss is not None
    for rank, role in enumerate(step.roles):
        write = step.writer()
        if step.stage_ranks[step.assembled.last] == rank:
            numerator = write.take("loss", loss.type, LOSS)
            scale = write.take("scale", whole_type(step.mesh, loss.type.dtype), SCALE)
            if step.scaled:
                unscale = write.take("unscale", whole_type(step.mesh, torch.float32), UNSCALE)
                scale = write.emit("aten.mul.Tensor", (Ref(scale.name), Ref(unscale.name)), scale.type)
            summed = write.total(numerator)
            mean = write.emit("aten.mul.Tensor", (Ref(summed.name), Ref(scale.name)), summed.type)
        else:
            mean = write.zeros(whole_type(step.mesh, loss.type.dtype))
        yield write.program(role, AVERAGING, [(LOSS, write.among(mean, range(len(step.roles))).name)])


def reduce_programs(step: StepMaterials) -> Iterator[Program]:
    """Write REDUCE of every role: it sums partial gradients, and converts them to the placements in which the
    parameters are stored. It divides them by the loss scale, if there is one."""
    assembled, ranks = step.assembled, step.stage_ranks
    trained = sorted({name for _, name, _ in assembled.gradients})
    owners = {name: sorted({ranks[stage] for stage, names in enumerate(assembled.reads) if name in names})
              for name in trained}  # fmt: skip
    counts = {name: min(ranks[stage] for stage, other, _ in assembled.gradients if other == name) for name in trained}
    for rank, role in enumerate(step.roles):
        gradients = {name: value for stage, name, value in assembled.gradients if ranks[stage] == rank}
        # those of several roles first and in one order: their ranks meet in them
        tied = {name: at for name, at in owners.items() if len(at) > 1 and rank in at}
        elsewhere = {name for name in tied if counts[name] != rank}
        across = Across(step.axis, range(len(step.roles)), tied, elsewhere) if step.axis else None
        yield _reduce(step, role, {**{name: gradients.get(name) for name in tied}, **gradients}, across)


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


def _splitting_lines(request: Request, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return, by parameter and axis, the line of the plan that splits the samples or the sequence over it, so that
    every rank has a part of the gradient: the line of an input, else of a context, else of a value inside the model. Of
    several lines of the last kind that of the nearest module counts, for a parameter near none that of the one before.
    """
    placing = request.placing
    claims = [claim for claim in placing.claims if claim.split is not None]
    everywhere = {axis: one.line for one in placing.context for axis in placing.mesh.parts(one.axis)}
    everywhere.update((claim.axis, claim.line) for claim in reversed(claims) if claim.value.kind == "input")
    inside: dict[str, list[Claim[Binding]]] = {}
    for claim in claims:
        if claim.site and claim.axis not in everywhere:
            inside.setdefault(claim.axis, []).append(claim)
    lines = {name: dict(everywhere) for name in names}
    for axis, of_axis in inside.items():
        several = len({claim.line for claim in of_axis}) > 1
        near = {name: max(of_axis, key=lambda claim: _shared_path(claim.site, name)) for name in lines if several}
        beside = {name: claim.line for name, claim in near.items() if _shared_path(claim.site, name)}
        last = next(iter(beside.values()), of_axis[0].line)
        for name, by_axis in lines.items():
            by_axis[axis] = last = beside.get(name, last)
    return lines


def _shared_path(site: str, name: str) -> int:
    """Return how many modules around a parameter are around a value such as ``out(blocks.0)`` too."""
    pairs = zip(site.rstrip(")").partition("(")[2].split("."), name.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _causes(request: Request, name: str, stored: TensorType, splitting: Mapping[str, int]) -> dict[str, int]:
    """Return, by axis, the line of the plan that causes the sum of a gradient over it: the ``zero`` line by which each
    rank stores a part of the parameter, else the line by which each rank has a part of the gradient."""
    zero = {one.axis: one.line for one in request.storing.shardings.get(name, ())}
    sharded = {axis: line for axis, line in zero.items() if isinstance(stored.placement[axis], Split)}
    return {**splitting, **sharded}


def _reduce(step: StepMaterials, role: str, gradients: Mapping[str, Value | None], across: Across | None) -> Program:
    """Write the sums of gradients over the axes on which they are partial, and over the roles that have a part of
    them; and the global norm. A gradient that this role's stages do not make is None."""
    write, returns = Writer(step.mesh, across), []
    stored = {noted(node).binding.name: node for node in step.graph.find_nodes(op="placeholder")
              if noted(node).binding.kind == "parameter"}  # fmt: skip
    squares: dict[tuple[str, ...], list[Value]] = {}
    types = {name: stored_type(node) for name, node in stored.items()}
    dtype = norm_dtype(step.graph)
    divides = step.scaled and any(value is not None for value in gradients.values())
    unscale = write.take("unscale", whole_type(step.mesh, torch.float32), UNSCALE) if divides else None
    # all sums first: on a real network they run side by side
    reduced, splitting = [], _splitting_lines(step.request, gradients)
    for name, gradient in gradients.items():
        origin = Origin(name, "", noted(stored[name]).line)
        tied = gradient is None or (across is not None and name in across.tied)
        value, *left = step.compressor.sums(write, name, None if tied else gradient, types[name], unscale, origin) or [
            write.gradient(
                name, gradient, types[name], origin, _causes(step.request, name, types[name], splitting[name])
            )
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
        square = write.among(write.stacked_sum(sums) if sums else write.zeros(whole_type(step.mesh, dtype)), everyone)
        root = write.emit("aten.sqrt.default", (Ref(square.name),), square.type)
        returns.append((GRAD_NORM, root.name))
    return write.program(role, REDUCE, returns)


# ---- the programs of every kind


def unshard_programs(step: StepMaterials) -> Sequence[Program]:
    """Return UNSHARD of every role, if any role has something to make in it."""
    read: dict[str, set[Binding]] = {name: set() for name in step.roles}
    for rank, work in zip(step.stage_ranks, step.assembled.work, strict=True):
        for program in work.values():
            read[step.roles[rank]].update(program.main.bindings)
    programs = [unshard(step.graph, step.mesh, name, keys) for name, keys in read.items()]
    return programs if any(program.main.lines for program in programs) else []


def count_programs(step: StepMaterials) -> Sequence[Program]:
    """Return COUNT, where a count divides the loss: its denominators from one microbatch, still partial over ranks."""
    if step.count is None:
        return []
    main, pairs = call_segments(step.count, step.mesh, 0)
    main.forward.returns = {key: main.bind(one).name for key, one in zip(step.counts, outputs(step.count), strict=True)}
    blocks = (pair.forward for pair in pairs.values())
    return [Program(SINGLE, COUNTING, step.mesh, (*blocks, main.forward.function("count")))]


MAKERS: dict[str, Maker] = {
    COUNTING: count_programs,
    SCALING: scale_programs,
    UNSHARD: unshard_programs,
    FORWARD: lambda step: [work[FORWARD] for work in step.assembled.work],
    BACKWARD: lambda step: [work[BACKWARD] for work in step.assembled.work],
    AVERAGING: loss_programs,
    REDUCE: reduce_programs,
    LOADS: load_programs,
    RESCALE: rescale_programs,
}


def make_roles(step: StepMaterials) -> dict[str, Programs]:
    """Return the programs of every role that serve the request's purpose: those that all share, its stages' work and
    its own."""
    roles: dict[str, dict[str, Program]] = {name: {} for name in step.roles}
    for row in step_kinds():
        if not row.serves(step.request.purpose) or row.instead_of:  # phases are made of what they stand for
            continue
        for at, program in enumerate(MAKERS[row.kind](step) if row.program else ()):
            key = f"{at}{row.kind}" if row.program == "stage" and step.axis else row.kind
            rank = step.stage_ranks[at] if row.program == "stage" else at
            for name in step.roles if row.program == "step" else (step.roles[rank],):
                roles[name][key] = program
    return dict(roles)
