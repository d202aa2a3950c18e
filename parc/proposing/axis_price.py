"""The price of a plan over one axis: from its programs, and before it is compiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import fx

from parc.compiler.analysis.communication import communication_table
from parc.compiler.capture.node_facts import noted
from parc.compiler.clock.cluster import Cluster
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import parse_kind
from parc.compiler.ops.own_ops import OPS
from parc.compiler.ops.rules import facts
from parc.compiler.resolve.requests import Request
from parc.compiling.compiled import Compiled
from parc.passes.calls import computes
from parc.passes.pipeline import Trials
from parc.passes.placing.heads import Follower
from parc.passes.placing.partition import Partition
from parc.passes.placing.propagate import Placed
from parc.passes.programs.segments import node_type
from parc.proposing.placements import contracting
from parc.proposing.ways import MESSAGE_START, Prices, Ways, WireBytes, whole_bytes
from parc.step_time import price


@dataclass(frozen=True, slots=True)
class AxisPrice:
    """The price of a plan over one axis, from its programs: the bytes that a rank sends over it in a step, in how many
    messages; the shares of all work, and of the entries of weights, that a rank has; and the price of what is not
    divided. ``seconds`` are those of a whole step on a cluster."""

    wire_bytes: int
    messages: int
    work: float
    weights: float
    undivided: float
    """Bytes; seconds on a cluster."""
    lacking: bool = False
    """True where nothing is divided, or not all attention, experts and tables of inputs."""
    seconds: float | None = None

    @property
    def total(self) -> float:
        """The price of what is sent, or of the step on a cluster, with what is not divided."""
        sent = self.wire_bytes + MESSAGE_START * self.messages
        return self.undivided + (sent if self.seconds is None else self.seconds)

    def excess(self, limit: AxisPrice) -> float:
        """Return how much a plan sends more than another one, or divides less, in parts of that; 0 where it does
        neither. A plan that lacks something is no limit of what is sent."""
        sent = 0.0 if limit.lacking else self.wire_bytes / max(1, limit.wire_bytes) - 1
        later = 0.0
        if self.seconds is not None and limit.seconds is not None and not limit.lacking:
            later = self.seconds / limit.seconds - 1
        over = (sent, later, self.work / limit.work - 1, self.weights / limit.weights - 1)
        return sum(part for part in over if part > _ROUNDING)

    def cheaper(self, other: AxisPrice) -> bool:
        """Return whether a plan costs less than another one, sends no more and divides no less."""
        return not self.excess(other) and self.total < other.total


_ROUNDING = 1e-9


@dataclass
class _Share:
    """The share of a count that a rank has."""

    whole: float = 0.0
    of_rank: float = 0.0

    def add(self, count: float, ranks: int) -> None:
        self.whole += count
        self.of_rank += count / ranks

    @property
    def share(self) -> float:
        return self.of_rank / self.whole if self.whole else 1.0


@dataclass(frozen=True, slots=True)
class AxisPricing:
    """Prices of plans of one captured model over an axis."""

    prices: Prices
    trials: Trials
    microbatches: int
    moments: int

    def of(self, compiled: Compiled, cluster: Cluster | None) -> AxisPrice:
        """Return the price of a compiled plan."""
        build, mesh = compiled.build, compiled.mesh
        sent: list[tuple[int, int]] = []
        for role in build.roles.values():
            rows = [row for row in communication_table(role)
                    if self.prices.axis in mesh.joined(mesh.spread(row["axis"].split(",")))]  # fmt: skip
            sent.append((sum(row["count_per_step"] * row["wire_bytes"] for row in rows),
                         sum(row["count_per_step"] for row in rows if row["message"] == row["number"])))  # fmt: skip
        placed, _, _ = self.trials.typed(compiled.request)
        work, weights, undivided, lacking = self._divided(self.trials.graph(compiled.request), placed, mesh)
        seconds = None if cluster is None else price(build, compiled.plan, cluster).time.seconds
        lacking = lacking or weights.share == 1
        return AxisPrice(*max(sent), work.share, weights.share, undivided, lacking, seconds)

    def estimated(self, request: Request) -> AxisPrice:
        """Return about the price of a request, before it is compiled: the conversions between its values, and what is
        not divided. Its seconds are those of messages alone."""
        placed, _, typed = self.trials.typed(request)
        mesh = request.placing.mesh
        work, weights, undivided, lacking = self._divided(self.trials.graph(request), placed, mesh)
        messages = [*_messages(typed, mesh, self.prices.axis, self.microbatches)]
        sent, both = (sum(each(prices) for each in messages) for prices in (self.wires, self.starting))
        seconds = None if self.prices.links is None else sum(each(self.prices) for each in messages)
        count = round((both - sent) / MESSAGE_START)
        return AxisPrice(int(sent), count, work.share, weights.share, undivided, lacking, seconds)

    @property
    def wires(self) -> Prices:
        """The bytes that are sent alone."""
        return WireBytes(self.prices.axis, self.prices.ranks)

    @property
    def starting(self) -> Prices:
        """The bytes that are sent, with those that messages cost beside."""
        return Prices(self.prices.axis, self.prices.ranks)

    def _divided(self, graph: fx.Graph, placed: Placed, mesh: Mesh) -> tuple[_Share, _Share, float, bool]:
        """Return the shares of work and of weights that a rank has, the price of the rest, and whether attention,
        experts or tables of inputs are whole."""
        partition = Partition(graph, mesh, placed, None, {})
        ways = Ways(graph, placed, partition, self.prices, self.microbatches, self.moments, {})
        work, weights, undivided, lacking = _Share(), _Share(), 0.0, False
        inner, parts = {*contracting(graph, Follower(graph))}, mesh.parts(self.prices.axis)
        for node in graph.nodes:
            if node.op == "placeholder" and noted(node).binding.kind in ("parameter", "frozen"):
                axes = [name for name in parts if name in placed.splits[node, 0]]
                weights.add(ways.amount(node), math.prod(map(mesh.size, axes)))
            elif computes(node) and ways.works(node):
                axes = [name for name in parts if name in placed.parts[node]]
                work.add(ways.amount(node), math.prod(map(mesh.size, axes)))
                lacking = lacking or ((node in inner or facts(node.target).looks_up) and not axes)
            else:
                continue
            undivided += 0.0 if axes else ways.of(node)[0].price
        return work, weights, undivided, lacking


def _messages(typed: fx.Graph, mesh: Mesh, axis: str, microbatches: int) -> Iterator[Callable[[Prices], float]]:
    """Yield the conversions of a typed graph over an axis, each as its price by some prices."""
    for node in typed.nodes:
        if node.op == "placeholder" and noted(node).binding.kind == "parameter":  # its gradient is summed once a step
            parts = [name for name in mesh.parts(axis) if node_type(node).placement[name] == "R"]
            yield from _conversion(node, parts, "I", "R", mesh, 1)
        elif node.target is OPS.row_max.default and node.args[1]:
            yield partial(_peaks, whole_bytes(node_type(node), mesh, []) * microbatches)
        elif node.target is OPS.convert.default:
            source, over, have, want = node.args[:4]
            parts = [name for name in over.split(",") if name in mesh.parts(axis)]
            yield from _conversion(source, parts, have, want, mesh, microbatches)


def _conversion(
    node: fx.Node, parts: Sequence[str], have: str, want: str, mesh: Mesh, times: int
) -> Iterator[Callable[[Prices], float]]:
    """Yield the conversion of a value over parts of the axis, if there are any."""
    if parts:
        size, grads = whole_bytes(node_type(node), mesh, parts), node_type(node).dtype.is_floating_point
        kinds = parse_kind(have), parse_kind(want)
        yield lambda prices: times * (prices.conversion(size, *kinds, grads) or 0.0)


def _peaks(size: float, prices: Prices) -> float:
    """Return the price of the largest logit of each row."""
    return prices.message("row_max", size)
