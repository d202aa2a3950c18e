"""The cheapest placements of a model over one axis of its plan, as lines: found by an integer program over the rules of
its operators, and never dearer than those that `parc init` proposes.

A person who asks for tp=N wants weights and work divided by N, with the least messages. A plan that splits nothing
sends nothing, so bytes alone cannot be the aim. What is not divided therefore has a price too: as much as sending it
would cost. A product that every rank computes as a whole costs as gathering the values that it reads and makes, in
forward and in backward, and its own time on a cluster; a weight that every rank holds as a whole costs the bytes of its
state, or the time in which an update moves them. So a weight is split where its messages cost less than that.

Of what is found, the plan with its lines is compiled, as is the plan with the lines of `parc init`, and both are priced
from their programs. The lines of `parc init` stand where they split something and the others send more bytes over the
axis, take more seconds on the cluster, or cost more in all.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import fx

from parc.compiler.analysis.communication import communication_table
from parc.compiler.capture.node_facts import noted
from parc.compiler.clock.cluster import Cluster
from parc.compiler.clock.links import Links
from parc.compiler.layout.placement import Split
from parc.compiler.layout.stretches import Outer
from parc.compiler.ops.own_ops import OPS
from parc.compiler.ops.rules import facts
from parc.compiler.plan.layouts import SplitWeights
from parc.compiler.plan.plan import Plan, read_plan
from parc.compiler.resolve.placements import Resolved
from parc.compiler.resolve.requests import Request
from parc.compiling.compiled import Compiled
from parc.compiling.driver import Progress, compile_changed
from parc.compiling.request import ask
from parc.compiling.size_ranges import fixed
from parc.grammar.diagnostics import PlanError
from parc.passes.calls import ValueKey, call_of, computes, fake, key_of, operands_of
from parc.passes.pipeline import Trials
from parc.passes.placing.partition import Partition
from parc.passes.placing.sites import input_dims
from parc.proposing.integer_program import Prices, Ways, solve
from parc.proposing.lines import PlacingLine, lines_of, patterns_for
from parc.proposing.placements import Claims, Search, SplitGroup
from parc.proposing.proposal import initial_lines
from parc.step_time import price

SOLVER_SECONDS = 60.0
"""The longest time for which the solver looks for something better."""


@dataclass(frozen=True, slots=True)
class AxisPrice:
    """The price of a plan over one axis, from its programs: the bytes that a rank sends over it in a step, in how many
    messages; the shares of all ranks' work, and of the entries of weights, that a rank has; and the price of both, with
    what is not divided, in bytes. ``seconds`` are those of a whole step on a cluster."""

    wire_bytes: int
    messages: int
    work: float
    weights: float
    undivided: float
    seconds: float | None = None

    @property
    def total(self) -> float:
        """The price of what is sent and of what is not divided, in bytes."""
        return self.wire_bytes + self.undivided

    def dearer(self, other: AxisPrice) -> bool:
        """Return whether a plan is dearer than another one that splits something."""
        slower = self.seconds is not None and other.seconds is not None and self.seconds > other.seconds
        return self.wire_bytes > other.wire_bytes or slower or self.total > other.total


@dataclass(frozen=True, slots=True)
class Placements:
    """The lines of a plan that place a model's weights over an axis: those that were found, with their price
    ``after``, and the price ``before`` of those of `parc init`. ``found`` is False where the latter stand."""

    lines: tuple[str, ...]
    seconds_of_solver: float
    before: AxisPrice
    after: AxisPrice
    found: bool
    plan: Plan
    """The plan with the lines."""


def cheapest_placements(
    plan: Plan, folder: Path, compiled: Compiled, axis: str, cluster: Cluster | None = None,
    progress: Progress = lambda _: None,
) -> Placements:  # fmt: skip
    """Return the cheapest placements of a plan's model over an axis. Lines of the plan that place weights over the axis
    are left out. The model is that of the plan, ``compiled`` with any lines.

    Raises:
        PlanError: the plan without these lines is at fault.
        NoSolver: the solver is not installed.
    """
    problem = _Problem(plan, folder, compiled, axis, cluster)
    progress("the lines of `parc init`")
    initial = problem.initial()
    before = problem.priced(initial)
    splits_something = before[1].weights < 1
    progress("integer program")
    start = time.perf_counter()
    splits = solve(problem.ways(), SOLVER_SECONDS, before[1].wire_bytes if splits_something else float("inf"))
    seconds = time.perf_counter() - start
    progress("compiling what was found")
    try:
        lines = problem.lines(splits or {})
        after = problem.priced(lines)
    except PlanError:  # such as heads that do not divide
        lines, after = initial, before
    found = not (splits_something and after[1].dearer(before[1])) and lines != initial
    if not found:
        lines, after = initial, before
    texts = tuple(text for line in lines for text in line.texts())
    return Placements(texts, seconds, before[1], after[1], found, after[0].plan)


class _Problem:
    """The placements of one model over one axis, for a plan that places none of its weights there."""

    def __init__(self, plan: Plan, folder: Path, compiled: Compiled, axis: str, cluster: Cluster | None) -> None:
        self.folder, self.compiled, self.axis, self.cluster = folder, compiled, axis, cluster
        self.ranks = plan.mesh.size(axis)
        self.text, self.defines = without_placements(plan, axis), dict(plan.defines)
        self.source = plan.source
        self.plan = self._plan(())
        self.moments = self.plan.moments if self.plan.trains else 0
        self.request = self._ask(())[1]
        self.search = Search(compiled.captured, self.request, axis)

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

    def ways(self) -> Ways:
        """Return the ways of all operators to be split over the axis. Rows of a vocabulary that do not divide are
        padded."""
        request = self.request
        if uneven := [*self._uneven()]:
            try:
                padded = self._ask([PlacingLine("vocab", uneven, f"over {self.axis} pad")])[1]
                request = replace(padded, placing=request.placing)
            except PlanError:
                pass
        trials = Trials(self.compiled.captured)
        graph, (placed, _) = trials.graph(request), trials.place(request)
        mesh = request.placing.mesh
        ways = Ways(graph, placed, Partition(graph, mesh, placed, None, {}), self._prices(), self.plan.microbatches,
                    self.moments, _samples(graph, self.plan))  # fmt: skip
        fixed_names = {claim.value.name for claim in request.placing.claims if claim.axis == self.axis}
        for node in graph.find_nodes(op="placeholder"):
            kind, name = noted(node).binding
            if kind in ("parameter", "frozen") and name not in fixed_names:
                if self.search.names.use(name).kind != "other":
                    ways.begin(node)
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
            if use.kind in ("lookup", "linear") and len(shape) == 2 and use.out_dim is not None:
                if shape[use.out_dim] % self.ranks and shape[use.out_dim] > shape[1 - use.out_dim]:
                    yield name

    # ---- lines of what was found

    def lines(self, splits: Mapping[fx.Node, Split]) -> list[PlacingLine]:
        """Return the lines of the splits of parameters."""
        names, search = self.search.names, self.search
        named: Claims = {noted(node).binding.name: split for node, split in splits.items()}
        weights = {name: split for name, split in named.items() if len(names.shape(name)) > 1}
        experts = [name for name, split in weights.items() if names.use(name).kind == "experts" and split == Split(0)]
        graph = next(iter(splits)).graph if splits else fx.Graph()
        vocabulary = {name: split for name, split in weights.items()
                      if name in _vocabulary(graph) and split.dim == names.use(name).out_dim}  # fmt: skip
        rest = {name: split for name, split in weights.items() if name not in {*experts, *vocabulary}}
        groups = [*self._groups(rest)]
        if vocabulary:
            groups.append(SplitGroup(vocabulary, vocabulary, 0, False, vocab=True))
        lines = lines_of(groups, search)
        modules = dict.fromkeys(name.rpartition(".")[0] for name in experts)
        if modules:
            others = [module for name in names.parameters if (module := name.rpartition(".")[0])]
            where = patterns_for([*modules], others)
            lines.insert(0, PlacingLine("experts", where, f"over {self.axis} dropless", "each rank has some experts"))
        return [*lines, *self._others(rest, groups)]

    def _groups(self, weights: Claims) -> Iterator[SplitGroup]:
        """Yield the weights that are split together, those of all layers at once."""
        names = self.search.names
        alike: dict[tuple[object, ...], list[str]] = {}
        for name, split in weights.items():
            use = names.use(name)
            if self.search.begins(name, split) or self.search.ends(name, split):
                alike.setdefault((re.sub(r"\d+", "*", name), names.shape(name), use, split), []).append(name)
        covered: set[str] = set()
        kinds = sorted(alike.values(), key=lambda kind: not self.search.begins(kind[0], weights[kind[0]]))
        for kind in kinds:
            if covered.issuperset(kind):
                continue
            group = self.search.group({name: weights[name] for name in kind})
            joined = {} if group is None else group.weights
            together = {name: weights[name] for name in weights
                        if name in kind or (joined.get(name) == weights[name] and name not in covered)}  # fmt: skip
            covered.update(together)
            yield SplitGroup(together, together, 0, group is not None and group.attends)

    def _others(self, weights: Claims, groups: Sequence[SplitGroup]) -> Iterator[PlacingLine]:
        """Yield lines with a layout for weights that no other line splits, and that do not follow from one."""
        said = {name: split for group in groups for name, split in group.weights.items()}
        follows = self.search.group(said)
        layouts: dict[str, list[str]] = {}
        for name, split in weights.items():
            told = name in said and (self.search.begins(name, split) or self.search.ends(name, split))
            if not told and (follows is None or follows.weights.get(name) != split):
                layouts.setdefault(_layout(split, len(self.search.names.shape(name)), self.axis), []).append(name)
        for layout, alike in layouts.items():
            yield PlacingLine("shard", patterns_for(alike, self.search.names.all_parameters), layout)

    # ---- prices

    def priced(self, lines: Sequence[PlacingLine]) -> tuple[Compiled, AxisPrice]:
        """Compile the plan with some lines, and price it.

        Raises:
            PlanError: the lines do not fit.
        """
        compiled = compile_changed(self.compiled, self._plan(lines))
        return compiled, axis_price(compiled, self.axis, self.cluster, self.moments)


def axis_price(compiled: Compiled, axis: str, cluster: Cluster | None, moments: int) -> AxisPrice:
    """Return the price of a compiled plan over an axis."""
    mesh, request = compiled.mesh, compiled.request
    sent: list[tuple[int, int]] = []
    for role in (build := compiled.build).roles.values():
        rows = [row for row in communication_table(role)
                if axis in mesh.joined(mesh.spread(row["axis"].split(",")))]  # fmt: skip
        sent.append((sum(row["count_per_step"] * row["wire_bytes"] for row in rows),
                     sum(row["count_per_step"] for row in rows if row["message"] == row["number"])))  # fmt: skip
    trials = Trials(compiled.captured)
    graph, (placed, _) = trials.graph(request), trials.place(request)
    parts = mesh.parts(axis)
    ways = Ways(graph, placed, Partition(graph, mesh, placed, None, {}), Prices(axis, mesh.declared.size(axis)),
                compiled.plan.microbatches, moments, {})  # fmt: skip
    work = whole_work = weights = whole_weights = undivided = 0.0
    for node in graph.nodes:
        if node.op == "placeholder" and noted(node).binding.kind in ("parameter", "frozen"):
            split = [name for name in parts if name in placed.splits[node, 0]]
            entries, ranks = fake((node, 0)).numel(), math.prod(mesh.size(name) for name in split)
            whole_weights, weights = whole_weights + entries, weights + entries / ranks
            undivided += 0.0 if split else ways.of(node)[0].price
        elif computes(node) and ways.works(node):
            count = facts(node.target).flops
            done = 0 if count is None else count(call_of(node))
            split = [name for name in parts if name in placed.parts[node]]
            whole_work, work = whole_work + done, work + done / math.prod(mesh.size(name) for name in split)
            undivided += 0.0 if split else ways.of(node)[0].price
    seconds = None if cluster is None else price(build, compiled.plan, cluster).time.seconds
    bytes_, messages = max(sent)
    return AxisPrice(
        bytes_, messages, work / whole_work if whole_work else 1.0, weights / whole_weights, undivided, seconds
    )


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


def _layout(split: Split, rank: int, axis: str) -> str:
    """Return the layout of a value of some dims that is split over the axis alone."""
    parts = f"_/{axis}" if split.outer == 1 else f"({split.outer} _/{axis})"
    if isinstance(split.outer, tuple):
        parts = f"({' + '.join(f'{letter}/{axis}' for letter in 'abcdefgh'[: len(split.outer)])})"
    return f"[{', '.join(parts if at == split.dim else '_' for at in range(rank))}]"
