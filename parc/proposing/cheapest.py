"""The cheapest placements of a model over one axis of its plan, as lines: found by an integer program over the rules of
its operators, and never dearer than those that `parc init` proposes.

A person who asks for tp=N wants weights and work divided by N, with the least messages. A plan that splits nothing
sends nothing, so bytes alone cannot be the aim. What is not divided therefore has a price too: as much as sending it
would cost. A product that every rank computes as a whole costs as gathering the values that it reads and makes, in
forward and in backward, and its own time on a cluster; a weight that every rank holds as a whole costs the bytes of its
state, or the time in which an update moves them. So a weight is split where its messages cost less than that.

The plan with the lines that are found is compiled, as is the plan with the lines of `parc init`, and both are priced
from their programs. The lines of `parc init` stand unless the others cost less in all, divide no less of the work and
of the weights, send no more bytes over the axis, and take no longer on a cluster. Where `parc init` splits nothing, or
leaves attention, experts or the tables of inputs whole, more may be sent: to divide these is worth its messages.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import fx

from parc.compiler.capture.node_facts import noted
from parc.compiler.clock.cluster import Cluster
from parc.compiler.clock.links import Links
from parc.compiler.layout.placement import Split
from parc.compiler.layout.stretches import Outer, count
from parc.compiler.ops.own_ops import OPS
from parc.compiler.ops.rules import facts
from parc.compiler.plan.layouts import SplitWeights
from parc.compiler.plan.plan import Plan, read_plan
from parc.compiler.resolve.pattern import patterns_for
from parc.compiler.resolve.placements import Resolved
from parc.compiler.resolve.requests import Request
from parc.compiling.compiled import Compiled
from parc.compiling.driver import REFUSALS, Progress, compile_changed
from parc.compiling.request import ask
from parc.compiling.size_ranges import fixed
from parc.grammar.diagnostics import PlanError
from parc.passes.calls import ValueKey, computes, key_of, operands_of
from parc.passes.placing.partition import Partition
from parc.passes.placing.sites import input_dims
from parc.proposing.axis_price import AxisPrice, AxisPricing
from parc.proposing.integer_program import Limits, solve
from parc.proposing.lines import PlacingLine, lines_of
from parc.proposing.placements import Claims, Search, SplitGroup
from parc.proposing.proposal import initial_lines
from parc.proposing.ways import Prices, Ways

SOLVER_SECONDS = 10.0
"""The longest time for which the solver looks for something better."""
_PADDING = 0.01
"""The part of work and of weights by which the program may divide less: it knows them with their padding."""
_TRIES = 2
"""The most times that a program is solved, each with a lower limit of what is sent."""


@dataclass(frozen=True, slots=True)
class Placements:
    """The lines of a plan that place a model's weights over an axis, with their price ``after``, and the price
    ``before`` of those of `parc init`. ``found`` is False where the latter stand, as nothing cheaper was found."""

    lines: tuple[str, ...]
    seconds_of_solver: float
    before: AxisPrice
    after: AxisPrice
    found: bool
    initial: Compiled
    """The plan with the lines of `parc init`."""
    compiled: Compiled
    """The plan with the lines."""


def cheapest_placements(
    plan: Plan, folder: Path, compiled: Compiled, axis: str, cluster: Cluster | None = None,
    progress: Progress = lambda _: None,
) -> Placements:  # fmt: skip
    """Return the cheapest placements of a plan's model over an axis. Lines of the plan that place weights over the axis
    are left out. The model is that of the plan, ``compiled`` with any lines.

    Raises:
        PlanError: the plan without these lines is at fault, or the solver is not installed.
    """
    problem = PlacementProblem(plan, folder, compiled, axis, cluster)
    progress("the lines of `parc init`")
    lines = problem.initial() if problem.ranks > 1 else []
    initial, before = problem.priced(lines)
    if problem.ranks == 1:
        return Placements((), 0.0, before, before, False, initial, initial)
    progress("integer program")
    start = time.perf_counter()
    others = problem.found(lines)
    seconds = time.perf_counter() - start
    progress("compiling what was found")
    best, after, found = initial, before, False
    with suppress(PlanError):  # such as lines that contradict others of the plan
        changed, price = problem.priced(others)
        if found := price.cheaper(before):
            best, after, lines = changed, price, others
    return Placements(
        tuple(text for line in lines for text in line.texts()), seconds, before, after, found, initial, best
    )


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Lines with about their price, and how much this exceeds that of the lines of `parc init`."""

    lines: list[PlacingLine]
    price: AxisPrice
    excess: float

    @property
    def rank(self) -> tuple[float, float]:
        """The key by which candidates are compared: the least is best."""
        return self.excess, self.price.total


class PlacementProblem:
    """The placements of one model over one axis, for a plan that places none of its weights there."""

    def __init__(self, plan: Plan, folder: Path, compiled: Compiled, axis: str, cluster: Cluster | None) -> None:
        self.folder, self.compiled, self.axis, self.cluster = folder, compiled, axis, cluster
        self.ranks = plan.mesh.size(axis)
        self.text, self.defines = without_placements(plan, axis), dict(plan.defines)
        self.source = plan.source
        self.plan = self._plan(())
        self.request = self._ask(())[1]
        self.search = Search(compiled.captured, self.request, axis)
        moments = self.plan.moments if self.plan.trains else 0
        self.pricing = AxisPricing(self._prices(), self.search.trials, self.plan.microbatches, moments)

    def _plan(self, lines: Sequence[PlacingLine]) -> Plan:
        rows = [text for line in lines for text in line.texts()]
        return read_plan(replace(self.source, text="\n".join([self.text, *rows, ""])), self.defines)

    def _ask(self, lines: Sequence[PlacingLine]) -> tuple[Resolved, Request]:
        plan = self._plan(lines)
        largest = fixed(plan, {name: size.high for name, size in plan.sizes.items()})
        return ask(largest, self.folder, self.compiled.recorded, self.compiled.captured)

    # ---- the lines of `parc init`

    def initial(self) -> list[PlacingLine]:
        """Return the lines that `parc init` proposes."""
        lets = re.search(r"^\s*let\b.*\btp\s*=", self.text, re.M)
        return initial_lines(self.search, self.compiled.recorded, self._ask, "$tp" if lets else str(self.ranks))[1]

    # ---- the integer program

    def found(self, initial: Sequence[PlacingLine]) -> list[PlacingLine]:
        """Return the lines of the cheapest choices of ways, of those that send no more than with the ``initial`` lines
        and divide no less; or these. Where there are fewer heads than ranks, several ranks keep each: such lines are
        found for fewer ranks. Where propagation sends more than the program has in mind, that is solved again with so
        much less."""
        before = self.pricing.estimated(self._ask(initial)[1])
        whole = [max(0.0, (share - 1 / self.ranks) / (1 - 1 / self.ranks)) + _PADDING
                 for share in (before.work, before.weights)]  # fmt: skip
        first = min(divisor for divisor in range(2, self.ranks + 1) if self.ranks % divisor == 0)
        best = _Candidate([*initial], before, 0.0)
        for ranks in dict.fromkeys((self.ranks, first)):
            request, sent = self.padded(ranks), math.inf if before.lacking else float(before.wire_bytes)
            ways, search = self.ways(request), Search(self.compiled.captured, request, self.axis)
            for _ in range(_TRIES):
                splits = solve(ways, SOLVER_SECONDS, Limits(sent, *whole))
                candidate = None if splits is None else self._candidate(self.lines(splits, search), before)
                if candidate is None:
                    break
                best = min(best, self._trimmed(candidate, before), key=lambda each: each.rank)
                sent -= candidate.price.wire_bytes - before.wire_bytes
                if before.lacking or candidate.price.wire_bytes <= before.wire_bytes or sent < 0:
                    break
            if not best.price.lacking:
                break
        return best.lines

    def _candidate(self, lines: list[PlacingLine], before: AxisPrice) -> _Candidate | None:
        """Return lines with about the price of the plan with them, and how much it exceeds another one; None where they
        do not fit."""
        try:
            price = self.pricing.estimated(self._ask(lines)[1])
        except (PlanError, *REFUSALS):
            return None
        return _Candidate(lines, price, price.excess(before))

    def _trimmed(self, candidate: _Candidate, before: AxisPrice) -> _Candidate:
        """Return lines without the patterns that cost more than they save: propagation may not do all that the program
        has in mind."""
        while True:
            fewer = [each for lines in _without_one(candidate.lines) if (each := self._candidate(lines, before))]
            least = min(fewer, key=lambda each: each.rank, default=candidate)
            if least.rank >= candidate.rank:
                return candidate
            candidate = least

    def padded(self, ranks: int) -> Request:
        """Return the request in which the axis has so many ranks, and rows of a vocabulary that the real ones do not
        divide are padded."""
        request = self.request
        if uneven := [*self._uneven()]:
            with suppress(PlanError):
                padded = self._ask([PlacingLine("vocab", uneven, f"over {self.axis} pad")])[1]
                request = replace(padded, placing=request.placing)
        mesh = request.placing.mesh
        mesh = replace(mesh, axes=tuple((axis, ranks if axis == self.axis else size) for axis, size in mesh.axes))
        return replace(request, placing=replace(request.placing, mesh=mesh))

    def ways(self, request: Request) -> Ways:
        """Return the ways of all operators to be split over the axis."""
        whole = {claim.value.name for claim in request.placing.claims if claim.axis == self.axis}
        trials, mesh = self.search.trials, request.placing.mesh
        graph, (placed, _) = trials.graph(request), trials.place(request)
        ways = Ways(graph, placed, Partition(graph, mesh, placed, None, {}), self.pricing.prices,
                    self.plan.microbatches, self.pricing.moments, _samples(graph, self.plan))  # fmt: skip
        ways.begin(lambda name: name not in whole and self.search.names.use(name).kind != "other")
        return ways

    def _prices(self) -> Prices:
        if self.cluster is None:
            return Prices(self.axis, self.ranks)
        named = self.plan.node is not None and self.plan.node.verb == "node"
        node = self.plan.node.ranks if named and self.plan.node is not None else self.cluster.ranks
        mesh = self.request.placing.mesh
        return Prices(self.axis, self.ranks, Links(mesh, self.cluster.shared_by(min(mesh.world, node)), node))

    def _uneven(self) -> Iterator[str]:
        """Yield the tables and heads whose rows the ranks do not divide."""
        for name, shape in self.search.names.parameters.items():
            use = self.search.names.use(name)
            rows = 0 if use.out_dim is None or len(shape) != 2 else shape[use.out_dim]
            if use.kind in ("lookup", "linear") and rows % self.ranks and rows**2 > math.prod(shape):
                yield name

    # ---- lines of what was found

    def lines(self, splits: Mapping[fx.Node, Split], search: Search) -> list[PlacingLine]:
        """Return the lines of the splits of parameters. The ``search`` tells what is split with each."""
        names = self.search.names
        named: Claims = {noted(node).binding.name: split for node, split in splits.items()}
        weights = {name: split for name, split in named.items() if len(names.shape(name)) > 1}
        experts = [name for name, split in weights.items() if names.use(name).kind == "experts" and split == Split(0)]
        graph = next(iter(splits)).graph if splits else fx.Graph()
        vocabulary = {name: split for name, split in weights.items()
                      if name in _vocabulary(graph) and split.dim == names.use(name).out_dim}  # fmt: skip
        rest = {name: split for name, split in weights.items() if name not in {*experts, *vocabulary}}
        groups = [*_groups(rest, search)]
        if vocabulary:
            groups.append(SplitGroup(vocabulary, vocabulary, 0, False, vocab=True))
        lines = lines_of(groups, self.search)
        modules = dict.fromkeys(name.rpartition(".")[0] for name in experts)
        if modules:
            others = [module for name in names.parameters if (module := name.rpartition(".")[0])]
            where = patterns_for([*modules], others)
            lines.insert(0, PlacingLine("experts", where, f"over {self.axis} dropless", "each rank has some experts"))
        return [*lines, *self._others(rest, groups, search)]

    def _others(self, weights: Claims, groups: Sequence[SplitGroup], search: Search) -> Iterator[PlacingLine]:
        """Yield lines with a layout for weights that no other line splits, and that do not follow from one."""
        said = {name: split for group in groups for name, split in group.weights.items()}
        follows = search.group(said)
        layouts: dict[str, list[str]] = {}
        for name, split in weights.items():
            told = name in said and (self.search.begins(name, split) or self.search.ends(name, split))
            if not told and (follows is None or follows.weights.get(name) != split):
                layouts.setdefault(self._layout(name, split), []).append(name)
        for layout, alike in layouts.items():
            yield PlacingLine("shard", patterns_for(alike, self.search.names.all_parameters), layout)

    def _layout(self, name: str, split: Split) -> str:
        """Return the layout of a weight that is split over the axis, and over other axes as lines say."""
        dims = ["_"] * len(self.search.names.shape(name))
        others = {claim.axis: claim.split for claim in self.request.placing.claims
                  if claim.value.name == name and claim.split is not None}  # fmt: skip
        for axis, at in sorted({**others, self.axis: split}.items(), key=lambda item: count(item[1].outer)):
            parts = f"({at.outer} _/{axis})"
            if isinstance(at.outer, tuple):
                parts = f"({' + '.join(f'{letter}/{axis}' for letter in 'abcdefgh'[: len(at.outer)])})"
            dims[at.dim] = f"{dims[at.dim]}/{axis}" if at.outer == 1 or dims[at.dim] != "_" else parts
        return f"[{', '.join(dims)}]"

    # ---- prices

    def priced(self, lines: Sequence[PlacingLine]) -> tuple[Compiled, AxisPrice]:
        """Compile the plan with some lines, and price it.

        Raises:
            PlanError: the lines do not fit.
        """
        compiled = compile_changed(self.compiled, self._plan(lines))
        return compiled, self.pricing.of(compiled, self.cluster)


# ---- lines and names


def without_placements(plan: Plan, axis: str) -> str:
    """Return the text of a plan without the lines that place weights over an axis, and without the files that it
    includes for that."""
    inputs = {line.name for line in plan.inputs}
    text = plan.source.text
    spans = set[tuple[int, int]]()
    for line in plan.placements:
        if isinstance(line, SplitWeights):
            places = line.axis.text == axis
        else:
            over = {word.text for word in line.axes}
            weights = not any(word.text in inputs or word.text.endswith(")") for word in line.where)
            places = axis in over and (weights or line.span.source is not plan.source)
        if places:
            spans.add((line.span.root.start, line.span.root.end))
    for start, end in sorted(spans, reverse=True):
        text = text[:start] + text[text.find("\n", end) % (len(text) + 1) + 1 :]
    return text


def _samples(graph: fx.Graph, plan: Plan) -> Mapping[ValueKey, Sequence[tuple[int, Outer]]]:
    """Return the dims of values that are dims of inputs with a name: samples, and positions of sequences."""
    dims = {line.name: line.dims for line in plan.inputs}
    samples = {key: [(at.dim, at.outer) for at in found if isinstance(dims[at.input][at.input_dim], str)]
               for key, found in input_dims(graph).items()}  # fmt: skip
    for node in graph.find_nodes(op="placeholder"):
        for at, dim in enumerate(dims.get(noted(node).binding.name, ())):
            if isinstance(dim, str):
                samples.setdefault((node, 0), []).append((at, 1))
    return samples


def _vocabulary(graph: fx.Graph) -> set[str]:
    """Return the names of the tables of a graph, and of the weights whose products are logits."""
    names, pending = set[str](), list[fx.Node]()
    for node in filter(computes, graph.nodes):
        if facts(node.target).looks_up:
            pending.append(operands_of(node)[0])
        elif node.target is OPS.token_loss.default:
            logits = key_of(operands_of(node)[0])[0]
            while computes(logits) and facts(logits.target).precision != "product":
                logits = key_of(operands_of(logits)[0])[0]
            pending += operands_of(logits)[1:2] if computes(logits) else []
    for node in pending:
        node = key_of(node)[0]
        while computes(node) and len(operands_of(node)) == 1:
            node = key_of(operands_of(node)[0])[0]
        if node.op == "placeholder":
            names.add(noted(node).binding.name)
    return names


def _without_one(lines: Sequence[PlacingLine]) -> Iterator[list[PlacingLine]]:
    """Yield lines without one of their patterns, each in turn."""
    for at, line in enumerate(lines):
        for pattern in line.patterns:
            rest = [other for other in line.patterns if other != pattern]
            yield [*lines[:at], *([replace(line, patterns=rest)] if rest else []), *lines[at + 1 :]]


def _groups(weights: Claims, search: Search) -> Iterator[SplitGroup]:
    """Yield the weights that are split together, those of all layers at once."""
    names = search.names
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, split in weights.items():
        use = names.use(name)
        if search.begins(name, split) or search.ends(name, split):
            alike.setdefault((re.sub(r"\d+", "*", name), names.shape(name), use, split), []).append(name)
    covered: set[str] = set()
    kinds = sorted(alike.values(), key=lambda kind: not search.begins(kind[0], weights[kind[0]]))
    for kind in kinds:
        if covered.issuperset(kind):
            continue
        group = search.group({name: weights[name] for name in kind})
        joined = {} if group is None else group.weights
        together = {name: weights[name] for name in weights
                    if name in kind or (joined.get(name) == weights[name] and name not in covered)}  # fmt: skip
        covered.update(together)
        yield SplitGroup(together, together, 0, group is not None and group.attends)
