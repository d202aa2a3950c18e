"""THE order of passes: from a captured graph and the plan's claims to the programs of one step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from ..compiler.analysis.samples import combination, is_one_fraction
from ..compiler.capture.capture import Captured
from ..compiler.capture.node_facts import noted
from ..compiler.layout.mesh import Mesh
from ..compiler.layout.placement import TensorType
from ..compiler.ops.precision import is_narrow
from ..compiler.program.actions import Purpose
from ..compiler.program.binding import COUNT, LOSS, Binding
from ..compiler.program.blocks import block_of
from ..compiler.program.program import Program
from ..compiler.program.roles import Programs, join_roles, with_idle
from ..compiler.program.step_values import Division
from ..compiler.resolve.experts import RoutedLayer
from ..compiler.resolve.in_graph import ContextLine
from ..compiler.resolve.requests import Choices, Claim, Levels, Request, ShardDims
from ..compiler.resolve.seeds import PlacementSeed
from .calls import ValueKey, computes, mark_packed
from .canonical.attention import drop_unread, uncounted
from .canonical.canonicalize import canonical_form, copied
from .canonical.constants import fold_constants
from .canonical.decompose import expand_unruled
from .canonical.loss import Divided, TermGraphs, count_loads, split_loss, stop_gradients
from .canonical.narrow import narrow
from .canonical.pad import pad
from .placing.heads import few_heads
from .placing.partition import Partition, Reshard, fuse_bias, lift_parameters
from .placing.propagate import Placed, check_sites, propagate
from .placing.registered import check_registered, explained
from .placing.row_terms import rows_of_logits, sum_padded_rows, sum_split_rows
from .placing.sites import names_of, site_types, site_values
from .placing.stored import Stored, store_parameters
from .placing.token_slices import heads_over, slice_tokens
from .programs.assemble import assemble
from .programs.compress import Compressor
from .programs.cut import in_stages
from .programs.offload import offload
from .programs.overlap import hide_exchanges, overlapped, sum_early
from .programs.reference import program_of, reference_program, without_training
from .programs.rings import ring_attention
from .programs.segments import mark_recomputed
from .programs.split import split_backward
from .programs.step_programs import StepMaterials, make_roles
from .programs.two_levels import TwoLevels

__all__ = ["Built", "Trials", "build_programs", "mark_blocks", "names_of", "prepare"]


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
    divisions: tuple[Division, ...] = ()
    """The division of each term of the loss."""
    averaged: tuple[int, ...] = ()
    """The numbers of the loss's terms whose mean over microbatches may not be that of the whole batch."""

    @property
    def dims(self) -> ShardDims:
        """The dims along which parameters and sums are cut, for a twin."""
        levels = self.levels.dims if self.levels is not None else {}
        return {**self.stored.dims, **self.compressor.dims, **levels}


class Pass(NamedTuple):
    """A pass: a function, and the values of a step that it reads and makes, by name. Names are those of a request's
    fields, ``mesh``, what a captured model has, and what earlier passes give.

    A pass that ``changes`` a graph does so in place. A graph that no pass of the same run has given is copied before,
    so nobody else sees the change.
    """

    name: str
    run: Callable[..., Any]
    needs: str
    """The names of its arguments, in order."""
    gives: str = ""
    """The names of its results, in order."""
    changes: str = ""
    """The names of the graphs that it changes."""
    when: str = ""
    """The name of the value without which there is nothing to do, if there is one."""


StepValues = Mapping[str, Any]
"""The values of a step by name."""
AfterPass = Callable[[Pass, StepValues], None]


def run_passes(passes: Sequence[Pass], values: StepValues, watch: AfterPass = lambda row, values: None) -> StepValues:
    """Run passes one after the other, and return the values with those that they give. ``watch`` is called after each
    pass that ran, and sees the values as they then are."""
    values, fresh = dict(values), set[str]()
    for each in passes:
        if each.when and not values[each.when]:
            continue
        changed, gives = set(each.changes.split()), each.gives.split()
        values.update((name, copied(values[name])) for name in changed - fresh if values[name] is not None)
        result = each.run(*(values[name] for name in each.needs.split()))
        values.update(zip(gives, [result] if len(gives) == 1 else result or (), strict=True))
        fresh |= changed.union(gives)
        watch(each, values)
    return values


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


@dataclass(frozen=True, slots=True)
class TermPrograms:
    """A term of the loss as programs: one that returns its value as ``LOSS``, and where it is a fraction one that
    returns the count below it as ``COUNT``, and what is done to the count before it divides."""

    term: Program
    count: Program | None
    division: Division


Measure = Callable[[Sequence[TermPrograms]], Sequence[Collection[str] | None]]
"""A function that runs a plan's module and loss, and returns for each term the words of ``Division.by`` by which the
sum over microbatches of its values becomes the whole batch's value; None where that was not measured."""


def _loss(
    graph: fx.Graph, terms: int, unbatched: frozenset[str], microbatches: int, summed: frozenset[int],
    measure: Measure | None,
) -> Divided:  # fmt: skip
    """Split the loss. What divides a term is measured where the module can be run, and else follows from the graph."""

    def decide(graphs: Sequence[TermGraphs]) -> list[Division | None]:
        programs = [_term_programs(each, unbatched) for each in graphs]
        measured: Sequence[Collection[str] | None] = [None] * len(programs)
        if measure is not None and microbatches > 1:
            measured = measure(programs)
        return [
            _division(term, {"sum", "count"} if number in summed else words, unbatched, microbatches)
            for number, (term, words) in enumerate(zip(programs, measured, strict=True), 1)
        ]

    return split_loss(graph, terms, decide)


def _term_programs(graphs: TermGraphs, unbatched: frozenset[str]) -> TermPrograms:
    term, count = program_of(graphs.term, LOSS), None
    if graphs.fraction is not None:
        fraction, floored = program_of(graphs.fraction, LOSS, COUNT), graphs.division != Division("count")
        if is_one_fraction(fraction, unbatched, graphs.token_losses, floored):
            main = fraction.main
            count = replace(fraction, functions=(main.returning({COUNT: main.returned("count")[""]}),))
    return TermPrograms(term, count, graphs.division)


def _division(
    term: TermPrograms, words: Collection[str] | None, unbatched: frozenset[str], microbatches: int
) -> Division | None:
    """Return the division of a term, one of those that hold if this was measured; None for one that is averaged though
    that may not be the whole batch's value."""
    if term.count is not None and (words is None or "count" in words):
        return term.division
    if microbatches == 1:
        return Division("mean")
    by = combination(term.term, unbatched)
    if words is None or by in words:
        return Division(by) if by is not None else None
    kinds: tuple[Literal["mean", "sum"], ...] = ("mean", "sum")
    return next((Division(kind) for kind in kinds if kind in words), None)


def _marks(graph: fx.Graph, count: fx.Graph | None, units: frozenset[str]) -> None:
    for part in (graph, count):
        if part is not None:
            mark_packed(part)
            mark_blocks(part, units)


PREPARING_PASSES = (
    Pass("operators without a rule", expand_unruled, "graph", changes="graph"),
    Pass("unread", drop_unread, "graph", changes="graph"),
)
"""The passes of every captured graph: operators without a rule become their parts, before a plan's names see them."""

GLOBAL_PASSES = (
    Pass("canonical form", lambda graph, choices: copied(canonical_form(graph, choices is not None)),
         "captured choices", gives="graph"),
    Pass("constants", fold_constants, "graph choices", changes="graph"),
    Pass("what is not trained", freeze_parameters, "graph frozen", changes="graph"),
    Pass("loss", _loss, "graph terms unbatched microbatches summed measure", gives="count counts divisions averaged",
         changes="graph"),
    Pass("loads", count_loads, "graph updates returned evaluates", changes="graph"),
    Pass("packed rows", mark_packed, "graph", changes="graph"),
    Pass("reference", reference_program, "graph count counts seed divisions microbatches experts", gives="reference"),
    Pass("precision", narrow, "graph precision", changes="graph"),
    Pass("rows of padded logits", sum_padded_rows, "graph pads", changes="graph"),
    Pass("padding", pad, "graph pads", changes="graph"),
    Pass("detached values", stop_gradients, "graph", changes="graph"),
    Pass("rows and blocks", _marks, "graph count units", changes="graph count"),
)  # fmt: skip
"""The passes before values are placed: on one device, with global shapes."""


def _claimed(graph: fx.Graph, claims: Sequence[Claim[Binding]]) -> Sequence[Claim[ValueKey]]:
    """Return the claims on the graph's values: on placeholders, and on values inside the model."""
    values = {noted(node).binding: (node, 0) for node in graph.nodes if node.op == "placeholder"}
    if any(claim.site for claim in claims):
        values |= {Binding("value", name): key for name, key in site_values(graph).items()}
    return [claim.at(values[claim.value]) for claim in claims if claim.value in values]


def _split_rows(graph: fx.Graph, mesh: Mesh, claims: Sequence[Claim[Binding]]) -> None:
    """Write rows of logits that a first round of placing splits as sums of their parts."""
    groups = rows_of_logits(graph)
    if groups:
        claimed = _claimed(graph, claims)
        sum_split_rows(graph, groups, propagate(graph, mesh, claimed), {claim.value for claim in claimed})


def _place_values(
    graph: fx.Graph, mesh: Mesh, claims: Sequence[Claim[ValueKey]],
    fused: Sequence[tuple[PlacementSeed, Sequence[str]]], context: Sequence[ContextLine],
    experts: Mapping[str, RoutedLayer], like: Placed | None = None,
) -> Placed:  # fmt: skip
    """Return where every value lies. Tokens that ranks with the same experts share out are placed in a second round."""
    gathered, heads = few_heads(graph, fused), heads_over(graph, context)
    placed = propagate(graph, mesh, claims, gathered, heads, like)
    slices, behind = slice_tokens(graph, mesh, placed, {name: layer.replicas for name, layer in experts.items()})
    if slices:
        placed = propagate(graph, mesh, [*claims, *slices], gathered | behind, heads)
    check_sites(claims, placed, mesh)
    return placed


def _converted(
    graph: fx.Graph, mesh: Mesh, placed: Placed, choices: Choices | None, levels: Levels
) -> tuple[fx.Graph, Sequence[Reshard]]:
    partition = Partition(graph, mesh, placed, choices, levels)
    return partition.run(), partition.reshards


def _cleaned(typed: fx.Graph) -> None:
    typed.eliminate_dead_code()
    typed.lint()


PLACING_PASSES = (
    Pass("rows of logits", _split_rows, "graph mesh claims", changes="graph"),
    Pass("claims", _claimed, "graph claims", gives="claimed"),
    Pass("placements", _place_values, "graph mesh claimed fused context experts like", gives="placed"),
    Pass("conversions", _converted, "graph mesh placed choices levels", gives="typed reshards"),
    Pass("parameters first", lift_parameters, "typed", changes="typed"),
    Pass("biases in products", fuse_bias, "typed", changes="typed"),
    Pass("dead code", _cleaned, "typed", changes="typed"),
)
"""The passes that say where every value lies, and insert the conversions between."""


_COUNTING = "graph count placed mesh fused context experts choices levels"


def _count_graph(*values: Any) -> fx.Graph | None:
    """Return the typed graph of the denominators, which reads its inputs placed as the forward has them."""
    known = dict(zip(_COUNTING.split(), values, strict=True))
    if known["count"] is None:
        return None
    inputs = {
        noted(node).binding: known["placed"].splits[node, 0] for node in known["graph"].find_nodes(op="placeholder")
    }
    claims = tuple(
        Claim(binding, axis, splits.get(axis), 0) for binding, splits in inputs.items() for axis in known["mesh"].names
    )
    asked = {**known, "graph": known["count"], "claims": claims, "like": None}
    typed: fx.Graph = run_passes(PLACING_PASSES, asked)["typed"]
    return typed


def _sums_in(microbatches: int, accumulate: torch.dtype) -> torch.dtype | None:
    """Return the type to which gradients are rounded before those of microbatches are added up; None where they keep
    their own."""
    return accumulate if microbatches > 1 and is_narrow(accumulate) else None


def _in_two_levels(roles: Mapping[str, Programs], step: StepMaterials, two_levels: TwoLevels) -> dict[str, Programs]:
    """Return the programs with collectives in two levels, which keep those in one level, not compressed in two."""
    split = two_levels.roles(roles)
    if two_levels.levels and step.compressor.wanted:
        two_levels.before = make_roles(replace(step, compressor=Compressor(step.compressor.wanted)))
    return split


def _for_each_role(change: Callable[..., Programs]) -> Callable[..., dict[str, Programs]]:
    """Return a pass over the programs of one role as a pass over those of all roles."""
    return lambda roles, *options: {role: change(programs, *options) for role, programs in roles.items()}


def _with_idle_stages(roles: Mapping[str, Programs], purpose: Purpose) -> dict[str, Programs]:
    return {role: with_idle(role, programs, purpose) for role, programs in roles.items()}


PROGRAM_PASSES = (
    Pass("denominators", _count_graph, _COUNTING, gives="counted"),
    Pass("sums of microbatches", _sums_in, "microbatches accumulate", gives="sums"),
    Pass("storage", store_parameters, "typed mesh shardings shard_dims", gives="stored", changes="typed"),
    Pass("no training", freeze_parameters, "typed", changes="typed", when="evaluates"),
    Pass("recomputation", mark_recomputed, "typed recompute", changes="typed"),
    Pass("stages", in_stages, "typed pipeline", gives="typed", when="pipeline"),
    Pass("segments", assemble, "typed mesh seed sums pipeline", gives="assembled"),
    Pass("levels", TwoLevels, "mesh levels shard_dims choices", gives="two_levels"),
    Pass("compression", Compressor, "compress levels shard_dims", gives="compressor"),
    Pass("parts of a step", StepMaterials, "request typed counted counts divisions assembled compressor", gives="step"),
    Pass("programs", make_roles, "step", gives="roles"),
    Pass("two levels", _in_two_levels, "roles step two_levels", gives="roles"),
    Pass("split backwards", split_backward, "roles pipeline", gives="roles", when="pipeline"),
    Pass("early sums", _for_each_role(sum_early), "roles microbatches pipeline", gives="roles", when="trains"),
    Pass("overlap", _for_each_role(overlapped), "roles bucket ahead offload", gives="roles"),
    Pass("hidden exchanges", _for_each_role(hide_exchanges), "roles", gives="roles"),
    Pass("offload", offload, "roles offload", gives="roles"),
    Pass("rings", _for_each_role(ring_attention), "roles context", gives="roles"),
    Pass("reference of an evaluation", without_training, "reference", gives="reference", when="evaluates"),
    Pass("idle stages", _with_idle_stages, "roles purpose", gives="roles", when="evaluates"),
)  # fmt: skip
"""The passes from a typed graph to the programs of every role."""

ALL_PASSES = (*GLOBAL_PASSES, *PLACING_PASSES, *PROGRAM_PASSES)
"""All passes of a build in their order."""


def prepare(captured: Captured) -> tuple[Captured, fx.Node | None]:
    """Write operators without a rule as their parts, before a plan's names and every pass see the graph. Return the
    model with the new graph, and the first operator whose random numbers no stream counts: it cannot be built."""
    graph = run_passes(PREPARING_PASSES, {"graph": captured.graph})["graph"]
    return replace(captured, graph=graph), uncounted(graph)


class GlobalResults:
    """The results of the passes before values are placed, of one captured model: requests that differ in what only
    later passes read share them."""

    def __init__(self) -> None:
        self._known: list[tuple[StepValues, StepValues]] = []

    def of(self, captured: Captured, request: Request, measure: Measure | None = None) -> StepValues:
        """Return the values of a step after these passes. Of ``measure`` counts only whether there is one: it runs the
        captured model, and is told all else."""
        values = values_of(captured, request, measure)
        names = {name for each in GLOBAL_PASSES for name in each.needs.split()} & values.keys() - {"measure"}
        read = {name: values[name] for name in names} | {"measured": measure is not None}
        results = next((results for known, results in self._known if known == read), None)
        if results is None:
            after = run_passes(GLOBAL_PASSES, values)
            results = {
                name: after[name] for each in GLOBAL_PASSES for name in (*each.gives.split(), *each.changes.split())
            }
            self._known.append((read, results))
        return {**values, **results}


def build_programs(
    captured: Captured, request: Request, measure: Measure | None = None, shared: GlobalResults | None = None
) -> Built:
    """Run every pass. ``measure`` runs the module and its loss, to find out what divides the loss's terms. Builds of
    one captured model may have results of the first passes ``shared``.

    Raises:
        RuleMisfit: a rule that the user registered is not the operator's.
    """
    check_registered(captured.graph)
    with explained(captured.graph):
        if shared is None:
            values = run_passes(ALL_PASSES, values_of(captured, request, measure))
        else:
            later = PLACING_PASSES + PROGRAM_PASSES
            values = run_passes(later, shared.of(captured, request, measure))
        placed, roles = values["placed"], values["roles"]
        sites = {claim.site for claim in request.placing.claims if claim.site}
        return Built(
            reference=values["reference"],
            programs=join_roles(roles),
            roles=roles,
            reshards=tuple(values["reshards"]),
            without_rule=tuple(sorted({str(node.target) for node in placed.without_rule})),
            stored=values["stored"],
            levels=values["two_levels"],
            compressor=values["compressor"],
            sites=site_types(values["graph"], values["mesh"], placed, sites),
            divisions=values["divisions"],
            averaged=values["averaged"],
        )


def values_of(captured: Captured, request: Request, measure: Measure | None = None) -> StepValues:
    """Return the values that the first passes read, by name."""
    asked = {each.name: getattr(group, each.name) for group in (*request.groups, request) for each in fields(group)}
    model = {"captured": captured.graph, "updates": captured.updates, "returned": captured.returned}
    purpose = {"trains": request.trains, "evaluates": not request.trains}
    return {**asked, **model, **purpose, "request": request, "measure": measure, "like": None}


class Trials:
    """The placements that builds of one captured model would give its values under requests one after the other; later
    passes are left out. The graph is made ready once for all requests that differ in placements alone."""

    def __init__(self, captured: Captured) -> None:
        self._captured, self._results = captured, GlobalResults()
        self._first: tuple[StepValues, Partition] | None = None
        """The first request's values, from which others go on that share its graph."""

    def graph(self, request: Request) -> fx.Graph:
        """Return the graph in which values are placed under a request."""
        graph: fx.Graph = self._results.of(self._captured, request)["graph"]
        return graph

    def place(self, request: Request) -> tuple[Placed, Sequence[Reshard]]:
        """Return where values lie under a request, and the conversions between them."""
        placed, conversions = self.conversions(request)
        return placed, [*conversions]

    def conversions(self, request: Request) -> tuple[Placed, Iterator[Reshard]]:
        """Return where values lie under a request, and the conversions between them as they are found, in order: who
        has seen enough need not take the others."""
        values = self._results.of(self._captured, request)
        first, like = self._first or ({}, None)
        if values["choices"] is not None or any(values[name] != first.get(name) for name in _SHARED.split()):
            like = None
        values = run_passes(_TRIED_PASSES[:_CONVERSIONS], {**values, "like": None if like is None else like.placed})
        names = _TRIED_PASSES[_CONVERSIONS].needs.split()
        graph, mesh, placed, choices, levels = (values[name] for name in names)
        partition = Partition(graph, mesh, placed, choices, levels, like)
        if like is None:
            self._first = values, partition
        return values["placed"], partition.conversions()

    def typed(self, request: Request) -> tuple[Placed, Sequence[Reshard], fx.Graph]:
        """Return where values lie under a request, the conversions between them, and the typed graph with these."""
        placing = self._run(_TRIED_PASSES, request)
        return placing["placed"], placing["reshards"], placing["typed"]

    def _run(self, passes: Sequence[Pass], request: Request) -> StepValues:
        return run_passes(passes, self._results.of(self._captured, request))


_TRIED_PASSES = [each for each in PLACING_PASSES if each.changes != "graph"]
"""The passes of a trial: all requests share the nodes of the graph."""
_CONVERSIONS = next(at for at, each in enumerate(_TRIED_PASSES) if each.run is _converted)
_SHARED = "graph mesh fused context experts choices levels"
"""The values of a step that two trials have in common if one goes on from the other."""
