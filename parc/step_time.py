"""The time of a build's step on a cluster, beside the figures that a run would show, in words and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parc.compiler.analysis.flops import product_type, step_flops
from parc.compiler.build.build import Build
from parc.compiler.clock.cluster import Cluster, ClusterError, find_cluster
from parc.compiler.clock.lines import Habits
from parc.compiler.clock.links import Links
from parc.compiler.clock.programs import STEP_PARTS
from parc.compiler.clock.step import StepClock, StepTime
from parc.compiler.layout.sweep import Amount, greatest
from parc.compiler.plan.plan import Plan
from parc.compiler.program.roles import Role
from parc.grammar.syntax import size_text
from parc.report import memory_of, states_of
from parc.runtime.observe.observer import work_per_step

_MOST_LINES = 10
"""The most lines of the plan that a table shows."""
NO_CLUSTER = 'add `--cluster h100-sxm`, or a line `cluster "h100-sxm"` to the plan; `parc cluster list` names all'
"""The way to seconds."""
_DAY = 24 * 3600.0


@dataclass(frozen=True)
class PricedStep:
    """A step of a build with its time on a cluster."""

    build: Build
    plan: Plan
    cluster: Cluster
    node: int
    time: StepTime
    links: Links
    flops: int
    """Model FLOPs of a step on its whole batch, as in a run's ``mfu``."""
    dtype: str
    groups: int
    """The groups of ranks that a rank talks in."""
    updates: Mapping[str, float]
    """The seconds of each role's update."""

    @property
    def world(self) -> int:
        """The ranks."""
        return self.build.mesh.world

    @property
    def mfu(self) -> float:
        """The share of what all devices can do that the model's own operations take."""
        return self.flops / (self.time.seconds * self.cluster.peak_of(self.dtype) * self.world)


def price(build: Build, plan: Plan, cluster: Cluster, habits: Habits | None = None) -> PricedStep:
    """Price a step of a build on a cluster.

    Raises:
        ClusterError: the cluster has too few nodes, or no peak for the type of the plan's products.
    """
    named = plan.node is not None and plan.node.verb == "node"
    node = plan.node.ranks if named and plan.node is not None else cluster.ranks
    world = build.mesh.world
    if cluster.nodes is not None and world > node * cluster.nodes:
        message = f"the plan has {world} ranks, and the cluster `{cluster.name}` {cluster.nodes} nodes of {node}"
        raise ClusterError(message, f"make the mesh smaller, or `node.count` {math.ceil(world / node)} in its file")
    type_ = product_type(program for role in build.roles.values() for program in role.programs.values())
    dtype = "float32" if type_ is None else str(type_.dtype).removeprefix("torch.")
    cluster.peak_of(dtype)
    cluster = cluster.shared_by(min(world, node))
    links = Links(build.mesh, cluster, node)
    updates = {name: update_seconds(build, plan, role, cluster) for name, role in build.roles.items()}
    clock = StepClock(build.roles, links, habits or Habits(), updates, _stage_line(build, plan))
    flops = step_flops(build.reference, build.microbatches) if build.trains else 0
    time = clock.run()
    return PricedStep(build, plan, cluster, node, time, links, flops, dtype, links.groups, updates)


def step_on(step: PricedStep, links: Links) -> PricedStep:
    """Return a priced step, of parc's own habits, on other links."""
    line = _stage_line(step.build, step.plan)
    time = StepClock(step.build.roles, links, Habits(), step.updates, line, step.time).run()
    return replace(step, links=links, time=time)


def _stage_line(build: Build, plan: Plan) -> int:
    """Return the line by which a plan has stages, in the file that a person wrote; 0 if it has none. The plan that a
    build holds has other lines."""
    if not plan.stages:
        return 0
    span = plan.stages[0].span
    held = plan.source.text == build.texts.get("plan.parc") and "written" in build.report
    return int(build.report["written"][span.line - 1]["line"]) if held else span.root.line


def cluster_of(plan: Plan, folder: Path, name: str | None = None) -> Cluster | None:
    """Return the cluster that a command names, or else the plan; None if neither does.

    Raises:
        ClusterError: there is none of that name, or its file is wrong.
    """
    if name is not None:
        return find_cluster(name)
    return None if plan.cluster is None else find_cluster(plan.cluster.name, folder)


def update_seconds(build: Build, plan: Plan, role: Role, cluster: Cluster) -> Amount:
    """Return the time of an update on a rank: it reads gradients, and reads and writes parameters and moments."""
    if not build.trains:
        return 0.0
    moments, seconds = plan.moments, 0.0
    moved, away = 0.0, 0.0
    for sizes in states_of(build, plan, role).values():
        own = sizes["optimizer"] / moments if moments else float(sizes["parameters"])
        moved += 3 * own + 2 * sizes["optimizer"]
        away += 2 * sizes["optimizer"] if "optimizer" in plan.offloaded else 0.0
    if "optimizer" in plan.offloaded:
        host = plan.offloaded["optimizer"].host
        seconds += away / (cluster.storage.host if host else cluster.storage.disk)
    return seconds + greatest(moved / (cluster.bandwidth(moved) * cluster.device.update), cluster.device.launch)


# ---- JSON


def step_json(step: PricedStep, tokens: float | None = None) -> dict[str, Any]:
    """Return the time of a step as JSON has it."""
    what, count = work_per_step(step.build)
    time, seconds = step.time, step.time.seconds
    form: dict[str, Any] = {
        "cluster": step.cluster.name, "node": step.node, "step_s": seconds, "mfu": step.mfu,
        "mfu_convention": MFU_WORDS, "peak_flops": step.cluster.peak_of(step.dtype), "dtype": step.dtype,
        "model_flops": step.flops, what: count, f"{what}_per_s": count / seconds,
        f"{what}_per_s_per_gpu": count / seconds / step.world, "longest": time.longest,
        "parts": time.parts(time.longest), "roles": {name: time.parts(name) for name in time.roles},
        "exposed": [{"axis": axis, "line": line, "s": wait} for (axis, line), wait in exposed_rows(step)],
        "lines": [{"line": line, "s": spent} for line, spent in _lines(step)],
        "framework_bytes": framework_bytes(step),
    }  # fmt: skip
    if tokens is not None:
        form["for_tokens"] = {what: tokens, "days": _days(step, tokens), "gpu_hours": _days(step, tokens) * 24
                              * step.world}  # fmt: skip
    return form


MFU_WORDS = "model FLOPs of products forward and backward, attention in full (a causal mask halves nothing)"


def exposed_rows(step: PricedStep) -> list[tuple[tuple[str, int], float]]:
    """Return the waits of the role that waits least for others, by axis and line of the plan, the longest first."""
    waits = step.time.roles[step.time.longest].exposed
    return sorted(waits.items(), key=lambda pair: -pair[1])


def _lines(step: PricedStep) -> list[tuple[int, float]]:
    spent = step.time.roles[step.time.longest].lines
    return sorted(spent.items(), key=lambda pair: -pair[1])[:_MOST_LINES]


def _days(step: PricedStep, tokens: float) -> float:
    _, count = work_per_step(step.build)
    return tokens / count * step.time.seconds / _DAY


def framework_bytes(step: PricedStep) -> int:
    """Return the framework's own bytes on a device: its context, and buffers of each group that a rank is in."""
    return int(step.cluster.framework.context + step.groups * step.cluster.framework.communicator)


# ---- words


def time_rows(step: PricedStep, tokens: float | None = None) -> Iterator[tuple[str, str]]:
    """Yield the rows of a step's time, as names and sentences."""
    what, count = work_per_step(step.build)
    time, seconds = step.time, step.time.seconds
    nodes = math.ceil(step.world / step.node)
    where = f"{nodes} node{'s' * (nodes != 1)} of {min(step.node, step.world)}"
    yield "cluster", f"{step.cluster.name}: {step.world} rank{'s' * (step.world != 1)} on {where}"
    rate = f"{count / seconds:,.0f} {what}/s, {count / seconds / step.world:,.1f} a rank"
    yield "step", f"{seconds_text(seconds)}: {rate}"
    if step.flops:
        peak = f"{step.cluster.peak_of(step.dtype) / 1e12:,.0f} TFLOP/s in {step.dtype}"
        yield "MFU", f"{step.mfu:.1%} of {peak}; {MFU_WORDS}"
    if tokens is not None:
        days = _days(step, tokens)
        yield "training", f"{tokens:,.0f} {what}: {days:,.1f} days, {days * 24 * step.world:,.0f} GPU hours"
    parts = time.parts(time.longest)
    words = ", ".join(f"{part} {seconds_text(parts[part])} ({parts[part] / seconds:.0%})" for part in STEP_PARTS)
    yield "parts", f"{f'{time.longest}: ' if len(time.roles) > 1 else ''}{words}"
    for name, _ in step.build.mesh.declared.axes:
        place = step.links.place((name,)) if step.build.mesh.size(name) > 1 else None
        if place is not None:
            waits = sum(wait for (axis, _), wait in exposed_rows(step) if name in axis.split(","))
            yield f"axis {name}", f"{place.ranks} ranks {place.words}: {seconds_text(waits)} of waits"
    own = f"context {size_text(int(step.cluster.framework.context))}, buffers of groups {{}}"
    groups = framework_bytes(step) - int(step.cluster.framework.context)
    yield (
        "framework",
        f"{size_text(framework_bytes(step))} a rank beside the memory above ({own.format(size_text(groups))})",
    )


def plan_line_rows(step: PricedStep, texts: Mapping[int, str]) -> list[tuple[str, ...]]:
    """Return the table of the most expensive lines of the plan: number, seconds, share, and the line; the last row is
    the bubble."""
    bubble = step.time.parts(step.time.longest)["bubble"]
    rows = [(str(line or "-"), spent, texts.get(line, "no line")) for line, spent in _lines(step)]
    rows += [("-", bubble, "bubble: waits for the work of other stages")] * (bubble > 0)
    return [(line, seconds_text(spent), f"{spent / step.time.seconds:.1%}", text) for line, spent, text in rows]


def seconds_text(seconds: float) -> str:
    """Return a time with a unit.

    >>> seconds_text(1.234), seconds_text(0.0123), seconds_text(4.2e-5), seconds_text(0)
    ('1.23 s', '12.3 ms', '42 us', '0 s')
    """
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            digits = f"{seconds / scale:.3g}" if seconds < 1000 * scale else f"{seconds / scale:,.0f}"
            return f"{digits} {unit}"
    return "0 s" if seconds < 1e-9 else f"{seconds * 1e6:.2g} us"


def memory_words(step: PricedStep) -> Iterator[str]:
    """Yield the roles whose peak, with the framework's own bytes, is more than the device's memory."""
    for name, role in step.build.roles.items():
        peak = memory_of(step.build, step.plan, role).peak_bytes + framework_bytes(step)
        if peak > step.cluster.device.memory:
            have = size_text(int(step.cluster.device.memory))
            yield f"{name} needs {size_text(peak)} with the framework's own, and a device has {have}"
