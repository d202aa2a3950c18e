"""THE order of passes: from a captured graph and the plan's claims to the programs of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import fx

from ..compiler.capture.capture import Captured
from ..compiler.capture.node_facts import noted
from ..compiler.layout.mesh import Mesh
from ..compiler.layout.placement import Split, TensorType
from ..compiler.ops.precision import PrecisionRegions
from ..compiler.ops.recompute import RecomputeLine
from ..compiler.program.actions import Purpose
from ..compiler.program.binding import Binding
from ..compiler.program.blocks import block_of
from ..compiler.program.evaluations import with_idle
from ..compiler.program.loads import Bias
from ..compiler.program.loss_scale import LossScale
from ..compiler.program.program import Program
from ..compiler.program.roles import SINGLE as ROLE
from ..compiler.program.roles import Programs, join_roles
from ..compiler.resolve.context_lines import ContextLine
from ..compiler.resolve.seeds import PlacementSeed
from ..compiler.verify.samples import averaged_terms, combination, is_one_fraction
from .calls import computes, mark_packed
from .canonical.canonicalize import canonical_form, copied
from .canonical.constants import fold_constants
from .canonical.draws import drop_unread, uncounted
from .canonical.loads import count_loads
from .canonical.loss import SplitLoss, split_loss, stop_gradients
from .canonical.unruled import expand_unruled
from .choices import Choices, ShardDims
from .narrow import narrow
from .pad import BoundPads, pad
from .placing.contexts import heads_over
from .placing.fuse import fuse_bias
from .placing.heads import few_heads
from .placing.lift import lift_parameters
from .placing.partition import Partition
from .placing.propagate import Claim, Placed, check_sites, propagate
from .placing.registered import check_registered, explained
from .placing.reshards import Reshard
from .placing.sites import site_types, site_values
from .placing.stored import Sharding, Stored, store_parameters
from .placing.token_slices import slice_tokens
from .placing.weight_uses import names_of
from .programs.assemble import assemble
from .programs.compress import Compression, Compressor
from .programs.cut import Pipeline, in_stages
from .programs.early import sum_early
from .programs.hide import hide_exchanges
from .programs.kept import mark_recomputed
from .programs.makers import StepParts, make_roles
from .programs.model_program import fraction_program, reference_program, without_training
from .programs.offload import offload
from .programs.overlap import OverlapChoices, overlapped
from .programs.rings import ring_attention
from .programs.two_levels import Levels, TwoLevels

__all__ = [
    "ROLE",
    "Built",
    "Choices",
    "Request",
    "Trials",
    "build_programs",
    "mark_blocks",
    "names_of",
    "prepare",
]


@dataclass(frozen=True, slots=True)
class Request:
    """The demands of a plan on the passes, beside the mesh: claims, by the binding of the value they speak of, and the
    facts below."""

    claims: tuple[tuple[Binding, str, Split | None, int], ...]
    """The claims ``(binding, axis, split or None for whole, line)``, in the order of the plan's lines."""
    microbatches: int
    seed: int
    frozen: frozenset[str] = frozenset()
    accumulate: torch.dtype = torch.float32
    fused: Sequence[tuple[PlacementSeed, Sequence[str]]] = ()
    """Splits of parameters that hold few heads beside more, with the axes over which the few heads are gathered."""
    pads: BoundPads = field(default_factory=dict)
    """Dims of parameters that are longer in programs than in the model."""
    precision: PrecisionRegions = ()
    pipeline: Pipeline | None = None
    shardings: Mapping[str, Sequence[Sharding]] = field(default_factory=dict)
    """The axes over which parameters are stored in parts, by the parameters' names."""
    loss_scale: LossScale = None
    unbatched: frozenset[str] = frozenset()
    """The inputs whose first dim is not the batch."""
    choices: Choices | None = None
    """The choices made at the largest sizes, where the plan has ranges of sizes."""
    overlap: OverlapChoices = field(default_factory=lambda: OverlapChoices(25_000_000, 1))
    offload: Mapping[str, int] = field(default_factory=dict)
    """The number of the plan's line for each part of the state of training that is kept away from memory."""
    levels: Levels = field(default_factory=dict)
    """The axes whose collectives are in two levels."""
    compress: Mapping[str, Compression] = field(default_factory=dict)
    """The gradients that are summed in fewer bytes, by the parameters' names."""
    shard_dims: ShardDims | None = None
    """The dims along which the parameters and the sums of a larger model are cut, whose twin this is."""
    units: frozenset[str] = frozenset()
    """The modules that are called as one, beside numbered modules outside them."""
    terms: int = 1
    """The number of the loss's terms."""
    biases: Mapping[str, Bias] = field(default_factory=dict)
    """The biases that balance experts, by the module of these."""
    recompute: Sequence[RecomputeLine] = ()
    """The modules whose values backward makes again."""
    sites: tuple[tuple[str, str, Split | None, int], ...] = ()
    """The claims on values inside the model, by their names."""
    few: frozenset[tuple[str, str]] = frozenset()
    """The parameters of which ranks along an axis keep the same heads, though a line splits them."""
    gathered: frozenset[int] = frozenset()
    """The lines whose values inside the model are kept gathered for backward, where products gather them."""
    replicas: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The axes of views along which ranks hold the same experts, by the module of these."""
    context: tuple[ContextLine, ...] = ()
    """The axes that split sequences, and how attention works across them."""
    purpose: Purpose = "training"
    """The purpose of the programs: only those of training have a backward."""

    @property
    def trains(self) -> bool:
        """True for the programs of training."""
        return self.purpose == "training"


@dataclass(frozen=True)
class Built:
    """The programs of a step, the reference, and the decisions that no line asked for."""

    reference: Program
    programs: dict[str, Program]
    """The programs of the whole step: those of its one role, or those of all roles joined."""
    roles: dict[str, Programs]
    reshards: tuple[Reshard, ...]
    without_rule: tuple[str, ...]
    stored: Stored = field(default_factory=Stored)
    levels: TwoLevels | None = None
    compressor: Compressor = field(default_factory=Compressor)
    sites: Mapping[str, TensorType] = field(default_factory=dict)
    """The values inside the model that lines place, by their names."""
    averaged: tuple[int, ...] = ()
    """The numbers of the loss's terms whose mean over microbatches may not be that of the whole batch."""

    @property
    def dims(self) -> ShardDims:
        """The dims along which parameters and sums are cut, for a twin."""
        levels = self.levels.dims if self.levels is not None else {}
        return {**self.stored.dims, **self.compressor.dims, **levels}


def prepare(graph: fx.Graph) -> fx.Node | None:
    """Write operators without a rule as their parts, in place, before a plan's names and every pass see the graph.
    Return the first operator whose random numbers no stream counts: it cannot be built."""
    drop_unread(graph)
    expand_unruled(graph)
    return uncounted(graph)


def build_programs(captured: Captured, mesh: Mesh, request: Request) -> Built:
    """Run every pass.

    Raises:
        RuleMisfit: a rule that the user registered is not the operator's.
    """
    check_registered(captured.graph)
    with explained(captured.graph):
        return _build(captured, mesh, request)


class Trials:
    """The placements that builds of one captured model would give its values under requests one after the other; later
    passes are left out. The graph is made ready once for all requests that differ in placements alone."""

    _PLACING = frozenset(("claims", "fused", "sites", "few", "gathered", "replicas", "context", "shardings"))
    """The fields of a request that say where values lie, which no pass before reads."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._ready: list[tuple[list[Any], fx.Graph]] = []

    def graph(self, request: Request) -> fx.Graph:
        """Return the graph in which values are placed under a request."""
        asked = [getattr(request, each.name) for each in fields(Request) if each.name not in self._PLACING]
        graph = next((graph for known, graph in self._ready if known == asked), None)
        if graph is None:
            graph = _forward(self._captured, request)[0].graph
            self._ready.append((asked, graph))
        return graph

    def place(self, mesh: Mesh, request: Request) -> tuple[Placed, Sequence[Reshard]]:
        """Return where values lie under a request, and the conversions between them."""
        return _place(self.graph(request), mesh, request)[1:]


def _forward(captured: Captured, request: Request) -> tuple[SplitLoss, Program]:
    """Return the graph to place, with its loss taken apart, and the reference."""
    graph = copied(canonical_form(captured.graph, request.choices is not None))
    fold_constants(graph, request.choices)
    freeze_parameters(graph, request.frozen)
    loss = split_loss(
        graph, request.terms, lambda part, known: is_one_fraction(fraction_program(part), request.unbatched, known)
    )
    count_loads(loss.graph, captured.updates, captured.returned, not request.trains)
    mark_packed(loss.graph)
    reference = reference_program(loss.graph, loss.count, loss.counts, request.seed)
    narrow(loss.graph, request.precision)
    pad(loss.graph, request.pads)
    stop_gradients(loss.graph)
    for part in (loss.graph, loss.count):
        if part is not None:
            mark_packed(part)
            mark_blocks(part, request.units)
    return loss, reference


def _build(captured: Captured, mesh: Mesh, request: Request) -> Built:
    loss, reference = _forward(captured, request)
    typed, placed, reshards = _place(loss.graph, mesh, request)
    counted = None
    if loss.count is not None:
        # what the count reads is placed as the forward has it
        inputs = {noted(n).binding: placed.splits[n, 0] for n in loss.graph.nodes if n.op == "placeholder"}
        claims = tuple((binding, axis, at.get(axis), 0) for binding, at in inputs.items() for axis in mesh.names)
        counted, _, _ = _place(loss.count, mesh, replace(request, claims=claims))
    adds = combination(reference, request.unbatched) if request.microbatches > 1 else "sum"
    parts = 1 if adds == "sum" else request.microbatches
    sums = request.accumulate if request.microbatches > 1 else None
    stored = store_parameters(typed, mesh, request.shardings, request.shard_dims)
    if not request.trains:  # each is stored as a step stores it, which depends on whether it is trained
        freeze_parameters(typed)
    mark_recomputed(typed, request.recompute)
    if request.pipeline is not None:
        results = noted(typed.output_node()).results
        typed = in_stages(typed, request.pipeline)
        noted(typed.output_node()).results = results
    assembled = assemble(typed, mesh, request.seed, sums, request.pipeline)
    levels = TwoLevels(mesh, request.levels, request.shard_dims, request.choices)
    compressor = Compressor(request.compress, request.levels, request.shard_dims)
    step = StepParts(
        mesh,
        typed,
        counted,
        loss.counts,
        parts,
        request.microbatches,
        assembled,
        request.pipeline,
        request.loss_scale,
        compressor,
        request.biases,
    )
    roles = levels.roles(make_roles(step, request.purpose))
    if request.levels and request.compress:
        levels.before = make_roles(replace(step, compressor=Compressor(request.compress)))
    if request.trains:
        roles = {role: sum_early(programs, request.microbatches) for role, programs in roles.items()}
    roles = {role: hide_exchanges(overlapped(programs, request.overlap)) for role, programs in roles.items()}
    roles = offload(roles, request.offload)
    roles = {role: ring_attention(programs, request.context) for role, programs in roles.items()}
    if not request.trains:
        reference = without_training(reference)
        roles = {role: with_idle(role, own, request.purpose) for role, own in roles.items()}
    missing = tuple(sorted({str(node.target) for node in placed.without_rule}))
    return Built(
        reference,
        join_roles(roles),
        roles,
        tuple(reshards),
        missing,
        stored,
        levels,
        compressor,
        site_types(loss.graph, mesh, placed, {name for name, *_ in request.sites}),
        averaged_terms(reference, request.unbatched) if request.microbatches > 1 else (),
    )


def _place(graph: fx.Graph, mesh: Mesh, request: Request) -> tuple[fx.Graph, Placed, Sequence[Reshard]]:
    nodes = {noted(node).binding: node for node in graph.nodes if node.op == "placeholder"}
    claims = [Claim((nodes[key], 0), axis, split, line, few=(key.name, axis) in request.few)
              for key, axis, split, line in request.claims if key in nodes]  # fmt: skip
    sites = site_values(graph) if request.sites else {}
    claims += [
        Claim(sites[name], axis, split, line, name) for name, axis, split, line in request.sites if name in sites
    ]
    gathered, heads = few_heads(graph, request.fused), heads_over(graph, request.context)
    placed = propagate(graph, mesh, claims, gathered, heads)
    slices, behind = slice_tokens(graph, mesh, placed, request.replicas)
    if slices:
        placed = propagate(graph, mesh, [*claims, *slices], gathered | behind, heads)
    check_sites(claims, placed, mesh)
    placed.keeps = request.gathered
    partition = Partition(graph, mesh, placed, request.choices, request.levels)
    typed = partition.run()
    lift_parameters(typed)
    fuse_bias(typed)
    typed.eliminate_dead_code()
    typed.lint()
    return typed, placed, partition.reshards


def freeze_parameters(graph: fx.Graph, names: frozenset[str] | None = None) -> None:
    """Bind parameters that are not trained, or all, as ``frozen``, a kind to which no gradient flows."""
    for node in graph.nodes:
        if node.op == "placeholder":
            kind, name = noted(node).binding
            if kind == "parameter" and (names is None or name in names):
                noted(node).binding = Binding("frozen", name)


def mark_blocks(graph: fx.Graph, units: frozenset[str] = frozenset()) -> None:
    """Note on every operator the block of the model that it belongs to."""
    for node in graph.nodes:
        if computes(node):
            noted(node).block = block_of(noted(node).origin.module, units)
