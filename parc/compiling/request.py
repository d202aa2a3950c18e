"""The request of a plan to the passes, for one captured model: its lines, resolved on names and on axes as these are
factored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path

import torch

from parc.compiler.capture.capture import Captured
from parc.compiler.capture.node_facts import noted
from parc.compiler.initial.recipes import Recorded
from parc.compiler.layout.mesh import Mesh, NoCommonParts, node_levels
from parc.compiler.layout.placement import Split, along
from parc.compiler.ops.precision import regions
from parc.compiler.plan.directives.schedule import ACCUMULATE
from parc.compiler.plan.plan import Plan
from parc.compiler.program.actions import FORWARD
from parc.compiler.program.binding import Binding
from parc.compiler.resolve.experts import RoutedLayer, routing_of
from parc.compiler.resolve.in_graph import context_lines, units_of
from parc.compiler.resolve.names import PlanNames
from parc.compiler.resolve.placements import Resolved, resolve
from parc.compiler.resolve.requests import (
    Choices,
    Claim,
    Compression,
    Computing,
    Levels,
    Messaging,
    Pipeline,
    Placing,
    PlanAxes,
    Request,
    Sharding,
    Storing,
)
from parc.compiler.resolve.seeds import PlacementSeed
from parc.compiler.resolve.stage_cuts import cuts_of
from parc.compiler.resolve.storage import named_parameters
from parc.compiler.schedules import kinds_of_stages, places_of
from parc.compiling.compiled import Compiled
from parc.grammar.codes import BAD_VIEW, NOT_COMPRESSED, NOTHING_TRAINED, UNEVEN_NODES
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.passes.pipeline import names_of
from parc.passes.placing.heads import factored_axes


def ask(
    plan: Plan, folder: Path, recorded: Recorded, captured: Captured, like: Compiled | None = None,
    declared: Plan | None = None, choices: Choices | None = None, smaller: bool = False, evaluates: bool = False,
) -> tuple[Resolved, Request]:  # fmt: skip
    """Return the plan resolved, and the request that ``compile_captured`` gives to the passes: that of a plan ``like``
    a larger one, whose twin this is, or of the evaluation beside the step that it is like.

    Raises:
        PlanError: the plan is at fault.
    """
    names, step = replace(names_of(captured), smaller=smaller), like if evaluates else None
    pipeline = _pipeline(plan, folder, names, captured) if step is None else step.request.pipeline
    longer, axes = (like.resolved.pads, like.resolved.axes) if like is not None else (None, None)
    pipeline = choices.make("stages", pipeline) if choices is not None else pipeline
    if axes is None:  # what must divide depends on what several ranks keep
        first = resolve(plan, names, longer, loose=True)
        axes = finer_axes(plan, factored_axes(captured, plan, first.seeds, first.pads))
    if declared is not None:  # of a range, the step must divide
        resolve(declared, names, longer, axes)
    resolved, mesh = resolve(plan, names, longer, axes), axes.mesh(plan)
    frozen = _frozen_parameters(plan, recorded, captured, resolved) if step is None else step.request.computing.frozen
    bound = {name: Binding("frozen", name) for name in frozen}
    bound |= {line.name: Binding("input", line.name) for line in plan.inputs}

    def binding(name: str) -> Binding:
        return bound.get(name, Binding("parameter" if names.site(name) is None else "value", name))

    claims = [
        Claim(binding(seed.value), axis, split, seed.span.root.line,
              site=seed.value if names.site(seed.value) is not None else "",
              few=split is None and seed.dim is not None, gathered=seed.gathered)
        for seed in resolved.seeds for axis, split in _seed_splits(seed, axes, mesh)
    ]  # fmt: skip
    split = dict[str, set[str]]()
    for claim in claims:
        split.setdefault(claim.value.name, set()).update([claim.axis] if claim.split is not None else [])
    fused = [(seed, mesh.parts(seed.axis)[axes.fused[seed.value, seed.axis] :])
             for seed in resolved.seeds if (seed.value, seed.axis) in axes.fused]  # fmt: skip
    experts = _with_replicas(routing_of(plan, names, captured), resolved, mesh, split)
    if step is not None:
        claims += _buffers_of(step)
    return resolved, Request(
        Placing(mesh, tuple(claims), fused, context_lines(plan, names, captured), experts),
        Computing(
            plan.microbatches, plan.seed, getattr(torch, ACCUMULATE[plan.accumulate]), frozen,
            {binding(name): rows for name, rows in resolved.pads.items()}, regions(resolved.precision),
            plan.loss_scale if step is None else None, len(plan.loss.terms), plan.unbatched, plan.loss.summed,
        ),
        Storing(
            {name: [*_over_mesh(demands, mesh, axes)] for name, demands in resolved.shardings.items()},
            {word: line.span.root.line for word, line in plan.offloaded.items()}, units_of(plan, names, captured),
            resolved.recompute if step is None else (),
        ),
        Messaging(
            plan.bucket, plan.prefetch, _levels(plan, mesh, axes),
            _compressions(plan, names, resolved, mesh, split, captured, frozen) if step is None else {},
        ),
        pipeline, choices, None if like is None else like.built.dims,
        "evaluation" if step is not None else "training" if plan.trains else "inference",
    )  # fmt: skip


def _frozen_parameters(plan: Plan, recorded: Recorded, captured: Captured, resolved: Resolved) -> frozenset[str]:
    """Return the parameters that are not trained: the plan's, and those that the model itself does not train; all in
    a plan for inference.

    Raises:
        PlanError: none is left.
    """
    if not plan.trains:
        return frozenset(captured.placeholders("parameter"))
    frozen = resolved.frozen | {name for name, one in recorded.module.named_parameters() if not one.requires_grad}
    if not captured.trainable() - frozen:
        message = "every parameter that the loss depends on is frozen" if frozen else "the loss depends on no parameter"
        help_ = (
            "freeze fewer: a step trains at least one parameter" if plan.frozen else "look at the model's return value"
        )
        span = plan.frozen[0].span if plan.frozen else plan.model.span
        raise PlanError([Diagnostic(NOTHING_TRAINED, message, Label(span), help=help_)])
    return frozen


def _pipeline(plan: Plan, folder: Path, names: PlanNames, captured: Captured) -> Pipeline | None:
    """Return the cut of the step into stages that the plan asks for; None where it is one stage.

    Raises:
        PlanError: the cuts do not fit the model, or the schedule's file is none of these stages.
    """
    cuts, schedule = cuts_of(plan, folder, names, captured), plan.schedule
    if not cuts or schedule is None:
        return None
    places = tuple((cut.module, cut.after) for cut in cuts)
    origins = (noted(node).origin.module for node in captured.graph.nodes if node.op == "call_function")
    table = schedule.table_of(folder, len(cuts) + 1)
    sizes = schedule.name, len(cuts) + 1, plan.microbatches, schedule.chunks
    ranks, kinds = places_of(*sizes, text=table), kinds_of_stages(*sizes, text=table)
    return Pipeline(plan.stages[0].axis.text, schedule.chunks, places, ranks, tuple(dict.fromkeys(origins)), kinds)


# ---- axes, factored


def finer_axes(plan: Plan, axes: PlanAxes) -> PlanAxes:
    """Return the factoring of axes in which they are factored for views too, and at nodes those that lines mean by
    these.

    Raises:
        PlanError: an axis is factored otherwise already.
    """
    views = [line.view for line in plan.views]
    for line in plan.views:
        for axis, cuts in line.view.cuts(plan.mesh).items():
            help_ = "choose sizes such that ranks of an axis of the view keep whole copies of heads, or parts of one"
            axes = _cut_axis(axes, plan, axis, cuts, Diagnostic(BAD_VIEW, "parts", Label(line.span), help=help_))
    meant = {line.axis.text: line.span for line in plan.zero if line.within}
    meant |= {line.axis.text: line.span for line in plan.hierarchical}
    if plan.node is None or not meant:
        return axes
    levels = node_levels(plan.mesh, plan.node.ranks)
    for name, span in meant.items():
        for axis in next((view.over for view in views if name in dict(view.axes)), (name,)):
            help_ = "choose nodes such that the ranks of one keep whole copies of heads, or parts of one"
            error = Diagnostic(UNEVEN_NODES, "nodes", Label(span), help=help_)
            axes = _cut_axis(axes, plan, axis, levels[axis][:1], error)
    mesh, strides, ranks = axes.mesh(plan), dict[str, int](), 1
    for axis, size in reversed(mesh.axes):
        strides[axis], ranks = ranks, ranks * size
    nodes = {name: sum(strides[part] >= plan.node.ranks for part in mesh.parts(name)) for name in meant
             if plan.ranks(name) > 1}  # fmt: skip
    return replace(axes, across=nodes)


def _cut_axis(axes: PlanAxes, plan: Plan, axis: str, cuts: Sequence[int], error: Diagnostic) -> PlanAxes:
    """Return axes of which one is factored at other places too.

    Raises:
        PlanError: it is factored otherwise already; the ``error`` says what the places are.
    """
    try:
        return axes.cut(axis, plan.mesh.size(axis), cuts)
    except NoCommonParts:
        wanted, before = (
            " and ".join(map(str, numbers)) for numbers in (cuts, [*accumulate(axes.sizes[axis], mul)][:-1])
        )
        message = f"{wanted} {error.message} of `{axis}` neither divide its {before} heads nor are a multiple of them"
        raise PlanError([replace(error, message=message)]) from None


def _levels(plan: Plan, mesh: Mesh, axes: PlanAxes) -> Levels:
    """Return the axes whose collectives are in two levels."""
    across = {line.axis.text: axes.across.get(line.axis.text, 0) for line in plan.hierarchical}
    return {axis: parts for axis, parts in across.items() if 0 < parts < len(mesh.parts(axis))}


# ---- what lines say of values and parameters, over the axes of the mesh


def _seed_splits(seed: PlacementSeed, axes: PlanAxes, mesh: Mesh) -> Iterable[tuple[str, Split | None]]:
    """Return the split, or None for whole, that a seed asks for on each sub-axis of its axis."""
    parts = mesh.parts(seed.axis)
    splits: dict[str, Split | None] = dict.fromkeys(parts)
    if seed.dim is not None:
        kept = parts[: axes.kept.get((seed.value, seed.axis), len(parts))]
        splits |= along(kept, Split(seed.dim, seed.outer), mesh)
    return splits.items()


def _buffers_of(step: Compiled) -> Iterator[Claim[Binding]]:
    """Yield the claims of an evaluation on buffers that steps change: they lie as a step leaves them. All else lies as
    the evaluation wants it."""
    lying = step.built.programs[FORWARD].main.bound("buffer")
    for name in (name for name in step.captured.updates if name in lying):
        for axis, kind in lying[name].type.placement.items():
            yield Claim(Binding("buffer", name), axis, kind if isinstance(kind, Split) else None, 0)


def _with_replicas(
    routing: Mapping[str, RoutedLayer], resolved: Resolved, mesh: Mesh, split: Mapping[str, Collection[str]]
) -> dict[str, RoutedLayer]:
    """Return layers of experts with their replicas: the axes of a view over which their parameters are whole, which are
    ``split`` over others."""
    views, layers = resolved.views.lines if resolved.views is not None else {}, dict(routing)
    for module in routing:
        inside = [name for name in views if name.startswith(f"{module}.")]
        axes = {part for name in inside for part in mesh.spread(views[name].view.over)}
        if placed := [split[name] for name in inside if name in split]:
            layers[module] = layers[module]._replace(replicas=frozenset(axes.difference(*placed)))
    return layers


def _over_mesh(shardings: Iterable[Sharding], mesh: Mesh, axes: PlanAxes) -> Iterator[Sharding]:
    """Yield the shardings of a parameter over the mesh's axes."""
    for one in shardings:
        parts = mesh.parts(one.axis)[axes.across.get(one.axis, 0) if one.within else 0 :]
        yield from (replace(one, axis=part) for part in parts)


def _compressions(
    plan: Plan, names: PlanNames, resolved: Resolved, mesh: Mesh, split: Mapping[str, Collection[str]],
    captured: Captured, frozen: Collection[str],
) -> dict[str, Compression]:  # fmt: skip
    """Return the gradients that are summed in fewer bytes, by the parameters' names, over the axes that do not split
    them.

    Raises:
        PlanError: a line names a parameter that has no gradient.
    """
    for line in (line for line in plan.compress if line.where and plan.ranks(line.axis.text) > 1):
        name = next((name for name in named_parameters(line.where, names)[0] if name in frozen), None)
        if name is not None:
            node = captured.placeholders("parameter").get(name)
            whole = node is not None and not noted(node).value.dtype.is_floating_point
            message = f"`{name}` {'holds whole numbers' if whole else 'is frozen'}: it has no gradient"
            help_ = "name other parameters, or none: those without a gradient are left out"
            raise PlanError([Diagnostic(NOT_COMPRESSED, message, Label(line.span), help=help_)])
    compressions: dict[str, Compression] = {}
    for name, compression in resolved.compressions.items():
        parts = (part for axis in compression.axes for part in mesh.parts(axis))
        axes = tuple(axis for axis in parts if axis not in split.get(name, ()))
        if axes and name not in frozen:
            compressions[name] = replace(compression, axes=axes)
    return compressions
