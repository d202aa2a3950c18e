"""Lines about values inside a model, as a compilation needs them: sequences, and the refusal of claims that fail."""

from __future__ import annotations

from collections.abc import Iterable

from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import Split
from parc.compiler.plan.layouts import Fix
from parc.compiler.plan.plan import Plan
from parc.compiler.program.binding import Binding
from parc.compiler.resolve.names import PlanNames
from parc.compiler.resolve.placements import Resolved
from parc.compiling.size_ranges import line_span
from parc.grammar.codes_plan import NOT_PLACED
from parc.grammar.diagnostics import Diagnostic, Label
from parc.passes.placing.heads import Copies
from parc.passes.placing.propagate import NotPlaced


def site_claims(
    claims: Iterable[tuple[Binding, str, Split | None, int]], names: PlanNames
) -> tuple[tuple[str, str, Split | None, int], ...]:
    """Return the claims on values inside the model, by their names."""
    return tuple((value.name, axis, split, line) for value, axis, split, line in claims
                 if names.site(value.name) is not None)  # fmt: skip


def few_kept(resolved: Resolved, copies: Copies, mesh: Mesh) -> frozenset[tuple[str, str]]:
    """Return the split parameters of which ranks along an axis keep the same heads."""
    return frozenset((seed.value, axis) for seed in resolved.seeds if seed.dim is not None
                     for axis, split in copies.splits(seed, mesh).items() if split is None)  # fmt: skip


def keeping_lines(plan: Plan) -> frozenset[int]:
    """Return the lines that keep values inside the model gathered for backward."""
    lines = [line for line in plan.sequence if line.gathered]
    kept = [line for line in plan.placements if isinstance(line, Fix) and line.gathered]
    return frozenset(line.span.root.line for line in (*lines, *kept))


def not_placed(plan: Plan, resolved: Resolved, error: NotPlaced) -> Diagnostic:
    """Return the error of a value inside the model that another line splits otherwise, at the line that claims it."""
    seed = next(seed for seed in resolved.seeds if seed.value == error.name and seed.span.root.line == error.line)
    other = line_span(plan, error.other) if error.other not in (0, error.line) else None
    related = (Label(other, "this line comes first"),) if other is not None else ()
    message = f"`{error.name}` cannot also be split over `{seed.axis}` along dim {seed.dim}"
    help_ = "split it on all axes in one line, as `shard out(M) [B/dp, S/cp/tp, _]`, or change the other line"
    return Diagnostic(NOT_PLACED, message, Label(seed.span), related, help=help_)
