"""Axes: those factored for views, and at nodes for the lines that mean nodes, and what lines ask of the passes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

from parc.compiler.capture.capture import Captured
from parc.compiler.capture.node_facts import noted
from parc.compiler.layout.mesh import Mesh, NoCommonParts, node_levels, viewed
from parc.compiler.plan.plan import Plan
from parc.compiler.resolve.placements import Resolved
from parc.grammar.codes_plan import BAD_VIEW, NOT_COMPRESSED, UNEVEN_NODES
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.passes.placing.heads import Copies
from parc.passes.placing.stored import Sharding
from parc.passes.programs.compress import Compression
from parc.passes.programs.two_levels import Levels


def finer_axes(plan: Plan, copies: Copies) -> Copies:
    """Return the factoring of axes in which they are factored for views too, and at nodes those that lines mean by
    these.

    Raises:
        PlanError: an axis is factored otherwise already.
    """
    views = [line.view for line in plan.views]
    for line in plan.views:
        for axis, cuts in line.view.cuts(plan.mesh).items():
            help_ = "choose sizes such that ranks of an axis of the view keep whole copies of heads, or parts of one"
            copies = _cut(copies, plan, axis, cuts, Diagnostic(BAD_VIEW, "parts", Label(line.span), help=help_))
    meant = {line.axis.text: line.span for line in plan.zero if line.within}
    meant |= {line.axis.text: line.span for line in plan.hierarchical}
    if plan.node is None or not meant:
        return copies
    levels = node_levels(plan.mesh, plan.node.ranks)
    for name, span in meant.items():
        for axis in next((view.over for view in views if name in dict(view.axes)), (name,)):
            help_ = "choose nodes such that the ranks of one keep whole copies of heads, or parts of one"
            error = Diagnostic(UNEVEN_NODES, "nodes", Label(span), help=help_)
            copies = _cut(copies, plan, axis, levels[axis][:1], error)
    mesh, strides, ranks = viewed(plan.mesh, views, copies.sizes), dict[str, int](), 1
    for axis, size in reversed(mesh.axes):
        strides[axis], ranks = ranks, ranks * size
    nodes = {name: sum(strides[part] >= plan.node.ranks for part in mesh.parts(name)) for name in meant
             if plan.ranks(name) > 1}  # fmt: skip
    return replace(copies, across=nodes)


def _cut(copies: Copies, plan: Plan, axis: str, cuts: Sequence[int], error: Diagnostic) -> Copies:
    """Return copies with an axis factored at other places too.

    Raises:
        PlanError: it is factored otherwise already; the ``error`` says what the places are.
    """
    try:
        return copies.cut(axis, plan.mesh.size(axis), cuts)
    except NoCommonParts:
        wanted, before = (
            " and ".join(map(str, numbers)) for numbers in (cuts, [*accumulate(copies.sizes[axis], mul)][:-1])
        )
        message = f"{wanted} {error.message} of `{axis}` neither divide its {before} heads nor are a multiple of them"
        raise PlanError([replace(error, message=message)]) from None


def shardings_of(resolved: Resolved, mesh: Mesh, copies: Copies) -> dict[str, list[Sharding]]:
    """Return the axes over which parameters are stored in parts, by the parameters' names."""
    found: dict[str, list[Sharding]] = {}
    views = resolved.views.lines if resolved.views is not None else {}
    for line in resolved.zero:
        axes = mesh.parts(line.axis)[copies.across.get(line.axis, 0) if line.within else 0 :]
        for name in line.parameters:
            viewed_there = name in views and line.axis in views[name].view.over
            found.setdefault(name, []).extend(Sharding(axis, line.level, line.line, viewed_there) for axis in axes)
    return found


def levels_of(plan: Plan, mesh: Mesh, copies: Copies) -> Levels:
    """Return the axes whose collectives are in two levels."""
    axes = {line.axis.text: copies.across.get(line.axis.text, 0) for line in plan.hierarchical}
    return {axis: across for axis, across in axes.items() if 0 < across < len(mesh.parts(axis))}


def replicas_of(routing: Iterable[str], resolved: Resolved, mesh: Mesh, copies: Copies) -> dict[str, frozenset[str]]:
    """Return the axes of a view over which the experts of a module are whole, by the module: those of its replicas."""
    found: dict[str, frozenset[str]] = {}
    views = resolved.views.lines if resolved.views is not None else {}
    for module in routing:
        inside = {name: line for name, line in views.items() if name.startswith(f"{module}.")}
        axes = {part for line in inside.values() for part in mesh.spread(line.view.over)}
        placed = [copies.splits(seed, mesh) for seed in resolved.seeds if seed.value in inside]
        split = {axis for one in placed for axis, kind in one.items() if kind is not None}
        if placed:
            found[module] = frozenset(axes - split)
    return found


def compressions_of(
    resolved: Resolved, mesh: Mesh, copies: Copies, captured: Captured, frozen: Collection[str]
) -> dict[str, Compression]:
    """Return the gradients that are summed in fewer bytes, by the parameters' names.

    Raises:
        PlanError: a line names a parameter that has no gradient.
    """
    found: dict[str, Compression] = {}
    types = {name: noted(node).value.dtype for name, node in captured.placeholders("parameter").items()}
    for line in resolved.compress:
        without = [name for name in line.parameters if name in frozen]
        if line.names_them and without:
            whole = not types[without[0]].is_floating_point if without[0] in types else False
            message = f"`{without[0]}` {'holds whole numbers' if whole else 'is frozen'}: it has no gradient"
            help_ = "name other parameters, or none: those without a gradient are left out"
            raise PlanError([Diagnostic(NOT_COMPRESSED, message, Label(line.span), help=help_)])
        for name in (name for name in line.parameters if name not in frozen):
            placed = (copies.splits(seed, mesh) for seed in resolved.seeds if seed.value == name)
            split = {axis for one in placed for axis, kind in one.items() if kind is not None}
            if axes := tuple(axis for axis in mesh.parts(line.axis) if axis not in split):
                found[name] = Compression(axes, line.format, line.span.root.line)
    return found
