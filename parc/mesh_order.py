"""The order of a mesh's axes: a warning where another one makes a step shorter on the plan's cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import permutations

from parc.compiler.analysis.communication import placed_messages
from parc.compiler.clock.cluster import Cluster, ClusterError, find_cluster
from parc.compiler.clock.links import Links
from parc.compiler.layout.mesh import UnevenNodes, node_levels
from parc.compiling.compiled import Compiled
from parc.grammar.codes import NODE_ORDER
from parc.grammar.diagnostics import Diagnostic, Label, Severity
from parc.step_time import PricedStep, price, seconds_text, step_on

_LEAST_GAIN = 0.05
"""The part of a step from which another order is worth a warning."""
_MOST_AXES = 6
"""The most axes of a mesh of which all orders are tried."""


def cheaper_orders(compiled: Compiled) -> Iterator[Diagnostic]:
    """Warn of the order of the mesh's axes if another one makes a step on the plan's cluster shorter by 5 %. Of orders
    in which all groups lie on nodes alike, one is priced, and none where messages take less than that."""
    plan, build = compiled.plan, compiled.build
    if plan.cluster is None or len(plan.mesh.axes) > _MOST_AXES:
        return
    try:
        cluster = find_cluster(plan.cluster.name, compiled.folder)
        now = price(build, plan, cluster)
    except ClusterError:
        return  # `--time` says it
    best, then = best_order(compiled, now, _LEAST_GAIN)
    if then.time.seconds < (1 - _LEAST_GAIN) * now.time.seconds:
        axes = ", ".join(f"{axis}={plan.mesh.size(axis)}" for axis in best)
        yield Diagnostic(
            NODE_ORDER,
            f"a step takes {seconds_text(now.time.seconds)} on `{plan.cluster.name}`, and"
            f" {seconds_text(then.time.seconds)} in another order of the mesh",
            Label(plan.mesh_spans[best[-1]]), help=f"write `mesh {axes}`", severity=Severity.WARNING,
        )  # fmt: skip


def best_order(compiled: Compiled, now: PricedStep, least_gain: float = 0.0) -> tuple[Sequence[str], PricedStep]:
    """Return the order of the mesh's axes that makes a step shortest, and the step in this order. It is the order of
    the plan where no messages at all would gain less than a part of the step, or the mesh has too many axes."""
    order = compiled.plan.mesh.names
    free = replace(now.links, cluster=_with_free_messages(now.cluster))
    too_many = len(order) > _MOST_AXES
    if too_many or step_on(now, free).time.seconds > (1 - least_gain) * now.time.seconds:
        return order, now
    groups = {compiled.mesh.spread(placed.message.axes) for role in compiled.build.roles.values()
              for _, placed in placed_messages(role)}  # fmt: skip
    alike: dict[object, tuple[tuple[str, ...], Links]] = {}
    for other in (order, *_orders(compiled, now.node)):
        links = replace(now.links, order=compiled.mesh.spread(other))
        alike.setdefault(tuple(links.place(axes) for axes in sorted(groups)), (other, links))
    steps = [(other, step_on(now, links)) for other, links in alike.values()]
    return min(steps, key=lambda pair: pair[1].time.seconds)


def _with_free_messages(cluster: Cluster) -> Cluster:
    """Return a cluster on which messages take no time: no order of the mesh is faster there."""
    free = replace(cluster.node, bandwidth=math.inf, start=0.0, hop=0.0)
    return replace(cluster, node=free, network=free, device=replace(cluster.device, taken_by_messages=0.0))


def _orders(compiled: Compiled, node: int) -> Iterator[tuple[str, ...]]:
    """Yield the orders of axes that fit nodes, and in which the axes of each view keep theirs."""
    plan = compiled.plan
    for order in permutations(plan.mesh.names):
        sizes = tuple((axis, plan.mesh.size(axis)) for axis in order)
        with suppress(UnevenNodes):
            node_levels(type(plan.mesh)(sizes), node)
            if all([*line.view.over] == sorted(line.view.over, key=order.index) for line in plan.views):
                yield order
