"""Axes: those factored at nodes for the lines that mean nodes, and what these lines ask of the passes."""

from __future__ import annotations

from collections.abc import Collection

from parc.compiler.capture.capture import Captured
from parc.compiler.capture.node_facts import noted
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.nodes import UnevenNodes, node_levels
from parc.compiler.plan.plan import Plan
from parc.compiler.resolve.resolve import Resolved
from parc.grammar.codes_placement import NOT_COMPRESSED, UNEVEN_NODES
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.passes.placing.heads import Copies
from parc.passes.placing.stored import Sharding
from parc.passes.programs.compress import Compression
from parc.passes.programs.two_levels import Levels


def at_nodes(plan: Plan, copies: Copies) -> Copies:
    """Return the factoring of axes in which those that lines mean by their nodes are factored at them too.

    Raises:
        PlanError: an axis is factored otherwise already.
    """
    meant = {line.axis.text: line.span for line in plan.zero if line.within}
    meant |= {line.axis.text: line.span for line in plan.hierarchical}
    levels = node_levels(plan.mesh, plan.node.ranks) if plan.node is not None and meant else {}
    for axis, span in meant.items():
        try:
            copies = copies.with_nodes(axis, *levels[axis])
        except UnevenNodes as error:
            help_ = "choose nodes such that the ranks of one keep whole copies of heads, or parts of one"
            raise PlanError([Diagnostic(UNEVEN_NODES, str(error), Label(span), help=help_)]) from None
    return copies


def shardings_of(resolved: Resolved, mesh: Mesh, copies: Copies) -> dict[str, list[Sharding]]:
    """Return the axes over which parameters are stored in parts, by the parameters' names."""
    found: dict[str, list[Sharding]] = {}
    for line in resolved.zero:
        axes = mesh.parts(line.axis)[copies.across.get(line.axis, 0) if line.within else 0 :]
        for name in line.parameters:
            found.setdefault(name, []).extend(Sharding(axis, line.level, line.line) for axis in axes)
    return found


def levels_of(plan: Plan, mesh: Mesh, copies: Copies) -> Levels:
    """Return the axes whose collectives are in two levels."""
    axes = {line.axis.text: copies.across.get(line.axis.text, 0) for line in plan.hierarchical}
    return {axis: across for axis, across in axes.items() if 0 < across < len(mesh.parts(axis))}


def compressions_of(
    resolved: Resolved, mesh: Mesh, captured: Captured, frozen: Collection[str]
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
        one = Compression(mesh.parts(line.axis), line.format, line.span.root.line)
        found |= dict.fromkeys((name for name in line.parameters if name not in frozen), one)
    return found
