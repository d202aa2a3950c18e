"""The proof of shapes over the declared ranges of sizes, before a build is made for the largest."""

from __future__ import annotations

from dataclasses import replace

from parc.compiler.directives.sizes import SizeRange
from parc.compiler.ranges import Sample, ShapeFault, prove_shapes, sample_points
from parc.driver import Compiled, capture_plan
from parc.grammar.codes_build import NO_DIVIDE
from parc.grammar.diagnostics import Diagnostic, Label
from parc.grammar.source import Span
from parc.passes.pipeline import sample


def range_errors(compiled: Compiled) -> list[Diagnostic]:
    """What does not divide at some size that the plan declares, with the line that splits it."""
    plan, request = compiled.plan, compiled.request
    points = sample_points(plan.sizes)
    samples = [Sample(points[0] if points else {}, compiled.built.values)]
    for point in points[1:]:
        fixed = replace(plan, sizes={name: SizeRange(size, size) for name, size in point.items()})
        _, captured = capture_plan(fixed, compiled.lines, compiled.folder, compiled.overrides)
        samples.append(sample(captured, compiled.mesh, request.claims, point, request.pads))
    return [_diagnostic(compiled, fault) for fault in prove_shapes(samples, plan.sizes, compiled.mesh)]


def _diagnostic(compiled: Compiled, fault: ShapeFault) -> Diagnostic:
    span = _span(compiled, fault.line)
    where = f"`{fault.value}`" + (f" of `{fault.module}`" if fault.module else "")
    declared = ", ".join(f"{name}={size}" for name, size in compiled.plan.sizes.items())
    return Diagnostic(
        NO_DIVIDE, f"{where}: {fault.message}", Label(span) if span is not None else None,
        help="declare sizes for which it holds, or leave the axis out here",
        notes=(f"the declared sizes are {declared}",),
    )  # fmt: skip


def _span(compiled: Compiled, line: int) -> Span | None:
    return next((s.span for s in compiled.plan.statements if s.span.line == line), None)
