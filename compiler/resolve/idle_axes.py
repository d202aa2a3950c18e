"""Axes of several ranks that no line of a plan uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...grammar.codes_plan import IDLE_AXIS
from ...grammar.diagnostics import Diagnostic, Label, Severity
from ..plan.directives.experts import Experts
from ..plan.plan import Plan
from ..sizes.size_range import BATCH
from .seeds import PlacementSeed


def idle_axes(plan: Plan, seeds: Iterable[PlacementSeed]) -> Iterator[Diagnostic]:
    """Return a warning for every axis of several ranks that splits nothing, or experts alone, and has no stages."""
    seeds = tuple(seeds)
    lines = {(line.span.source, line.span.line) for line in plan.placements if isinstance(line, Experts)}
    by_experts = {seed: (seed.span.source, seed.span.line) in lines for seed in seeds}
    axes = {seed.axis: {plan.refined.owner(part) for part in plan.refined.parts(seed.axis)} for seed in seeds}
    experts = {axis for seed, by in by_experts.items() if by for axis in axes[seed.axis]}
    used = {axis for seed, by in by_experts.items() if seed.dim is not None and not by for axis in axes[seed.axis]}
    used |= {line.axis.text for line in plan.stages}
    batch = next((line for line in plan.inputs if BATCH in line.dims), None)
    placed = {seed.value for seed in seeds}
    for axis, size in plan.mesh.axes:
        if size == 1 or axis in used:
            continue
        help_ = "name it in a line that places weights or inputs"
        if batch is not None and batch.name not in placed:
            dims = ", ".join(f"{BATCH}/{axis}" if dim == BATCH else "_" for dim in batch.dims)
            help_ = f"write `shard {batch.name} [{dims}]`"
        message = f"the axis `{axis}` splits nothing: its {size} ranks do the same work"
        if axis in experts:
            message = f"the axis `{axis}` splits only experts: its {size} ranks all do the same other work"
        label = Label(plan.mesh_spans[axis])
        yield Diagnostic(IDLE_AXIS, message, label, help=f"{help_}, or leave the axis out", severity=Severity.WARNING)
