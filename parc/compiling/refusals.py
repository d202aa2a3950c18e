"""Refusals of passes, as errors at lines of the plan."""

from __future__ import annotations

from collections.abc import Sequence

from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import Split
from parc.compiler.plan.directives.experts import Experts
from parc.compiler.plan.plan import Plan
from parc.compiler.resolve.placements import Resolved
from parc.compiling.size_ranges import line_span
from parc.grammar.codes_build import BAD_RULE
from parc.grammar.codes_plan import FEW_HEADS_EACH, MIXED_ROWS, NOT_PLACED, SPLIT_ALREADY, UNEVEN_TOKENS, WHOLE_SEQUENCE
from parc.grammar.diagnostics import Diagnostic, Label
from parc.grammar.syntax import size_text
from parc.passes.calls import MixedRows
from parc.passes.placing.partition import Reshard, UnevenTokens
from parc.passes.placing.propagate import FewHeads, NotPlaced
from parc.passes.placing.registered import RuleMisfit
from parc.passes.placing.stored import AlreadySplit


def not_placed(plan: Plan, resolved: Resolved, error: NotPlaced) -> Diagnostic:
    """Return the error of a value inside the model that another line splits otherwise, at the line that claims it."""
    seed = next(seed for seed in resolved.seeds if seed.value == error.name and seed.span.root.line == error.line)
    other = line_span(plan, error.other) if error.other not in (0, error.line) else None
    related = (Label(other, "this line comes first"),) if other is not None else ()
    message = f"`{error.name}` cannot also be split over `{seed.axis}` along dim {seed.dim}"
    help_ = "split it on all axes in one line, as `shard out(M) [B/dp, S/cp/tp, _]`, or change the other line"
    return Diagnostic(NOT_PLACED, message, Label(seed.span), related, help=help_)


# ---- refusals of passes, as errors at lines of the plan.


PassError = AlreadySplit | UnevenTokens | MixedRows | RuleMisfit | FewHeads | NotPlaced
REFUSALS = (AlreadySplit, UnevenTokens, MixedRows, RuleMisfit, FewHeads, NotPlaced)
"""The errors of passes that are the plan's or the model's fault."""


def whole_sequences(plan: Plan, reshards: Sequence[Reshard]) -> list[Diagnostic]:
    """Return the errors of activations that are gathered along a sequence that a ``context`` line splits."""
    errors: dict[str, Diagnostic] = {}
    for line in plan.context:
        for one in reshards:
            gathers = isinstance(one.source, Split) and not isinstance(one.result, Split)
            if one.axis != line.axis.text or not gathers or one.attends or not one.learns:
                continue
            where = f"`{one.cause.module}`" if one.cause.module else "the model"
            message = f"`{one.reader}` in {where} needs `{one.value}` whole, {size_text(one.bytes)} from each rank"
            notes = (f"at {one.cause.source}",) if one.cause.source else ()
            help_ = "avoid it along the sequence (shift targets, not outputs), or leave the line out"
            error = Diagnostic(WHOLE_SEQUENCE, message, Label(line.span), help=help_, notes=notes)
            errors.setdefault(one.cause.source, error)
    return list(errors.values())


def refusal(plan: Plan, mesh: Mesh, resolved: Resolved, error: PassError) -> Diagnostic:
    """Return the error of a plan for one of a pass."""
    model = Label(plan.model.arguments.statement.span)
    if isinstance(error, AlreadySplit):
        span = next(line.span for line in plan.zero if line.span.root.line == error.sharding.line)
        help_ = f"name other parameters with `on`, or an axis whose ranks all use the whole `{error.name}`"
        return Diagnostic(SPLIT_ALREADY, str(error), Label(span), help=help_)
    if isinstance(error, NotPlaced):
        return not_placed(plan, resolved, error)
    if isinstance(error, UnevenTokens):
        return _uneven_tokens(plan, mesh, error)
    notes = (f"at {error.origin.source}",) if error.origin.source else ()
    if isinstance(error, FewHeads):
        span = next(line.span for line in plan.context if line.axis.text == error.axis)
        help_ = "take fewer ranks, or `using zigzag`, which splits no heads"
        return Diagnostic(FEW_HEADS_EACH, str(error), Label(span), help=help_, notes=notes)
    if isinstance(error, MixedRows):
        help_ = "compute each row separately; put dropout and statistics before or after the experts"
        return Diagnostic(MIXED_ROWS, str(error), model, help=help_, notes=notes)
    return Diagnostic(BAD_RULE, str(error), model, help=error.hint, notes=notes)


def _uneven_tokens(plan: Plan, mesh: Mesh, error: UnevenTokens) -> Diagnostic:
    """Return the error of tokens that do not divide among the ranks of their experts, at the line that splits these."""
    lines = (line for line in plan.placements if isinstance(line, Experts))
    line = next((line for line in lines if not error.axes.isdisjoint(mesh.parts(line.axis.text))), None)
    axis = line.axis.text if line is not None else ",".join(error.axes)
    help_ = f"choose sizes that divide by {error.ranks} on each rank, or split experts over another axis"
    label = Label(line.span if line is not None else plan.model.span)
    return Diagnostic(UNEVEN_TOKENS, f"{error} over `{axis}`", label, help=help_)
