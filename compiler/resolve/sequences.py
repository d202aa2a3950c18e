"""The inputs that ``context`` lines of a plan split along a sequence."""

from __future__ import annotations

from collections.abc import Iterator

from ...grammar.codes_plan import UNEVEN_SHARD
from ...grammar.diagnostics import Diagnostic, Label
from ..layout.stretches import zigzag
from ..plan.layouts import multiples
from ..plan.plan import Plan
from .seeds import PlacementSeed, Seeds


def split_inputs(plan: Plan, seeds: Seeds) -> tuple[dict[str, set[str]], list[Diagnostic]]:
    """Add the splits of ``context`` lines to the seeds. Return their axes for each input, which a layout may then leave
    out, and the errors."""
    axes: dict[str, set[str]] = {}
    errors: list[Diagnostic] = []
    for result in _seeds_of(plan):
        error = result if isinstance(result, Diagnostic) else seeds.add(result)
        if error is not None:
            errors.append(error)
        elif isinstance(result, PlacementSeed):
            axes.setdefault(result.value, set()).add(result.axis)
    return axes, errors


def _seeds_of(plan: Plan) -> Iterator[PlacementSeed | Diagnostic]:
    """Yield the splits of inputs along the sequences of ``context`` lines, or the error of a length that does not
    divide."""
    position: dict[str, int] = {}  # the parts into which earlier lines cut a sequence
    for line in plan.context:
        axis, name, halves = line.axis.text, line.dim.text, 2 if line.method == "zigzag" else 1
        outer = position.get(name, 1) * halves
        position[name] = unit = outer * plan.mesh.size(axis)
        size = plan.sizes[name]
        step = size.low if size.fixed else size.step
        if step % unit and plan.mesh.size(axis) > 1:
            parts = f"{halves} parts for each rank" if halves > 1 else "a part for each rank"
            what = f"`{name}` is {step}" if size.fixed else f"`{name}` has steps of {step}"
            message = f"{what}, which does not divide by {unit}: {parts}"
            near = " or ".join(map(str, multiples(step, unit)))
            related = (Label(plan.mesh_spans[axis], "declared here"),)
            help_ = f"choose a multiple of {unit}, such as {near}"
            yield Diagnostic(UNEVEN_SHARD, message, Label(line.dim.span), related, help=help_)
            continue
        dealt = zigzag(outer) if halves > 1 else outer
        for given in plan.inputs:
            for dim in (at for at, called in enumerate(given.dims) if called == name):
                yield PlacementSeed(given.name, axis, dim, dealt, line.span, fixed=False)
