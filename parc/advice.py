"""Warnings of a build: what it does that no line asked for, and what it costs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from parc.compiler.placement import Split
from parc.compiler.precision import is_narrow
from parc.compiler.task import forward_text, passed_on
from parc.driver import Compiled
from parc.grammar.codes_build import AVERAGED, ROUNDED_UPDATES, UNASKED_RESHARD, WITHOUT_RULE
from parc.grammar.codes_model import PASSED_ON
from parc.grammar.diagnostics import Diagnostic, Label, Severity
from parc.grammar.nearest import did_you_mean
from parc.grammar.syntax import size_text
from parc.passes.partition import Reshard
from parc.runtime.holders import parameters_of
from parc.size_ranges import line_span


def warnings_of(compiled: Compiled) -> tuple[Diagnostic, ...]:
    """Every warning of a compiled plan: of its lines, reshards, operators without a rule, loss, and weights."""
    found = (*_reshards(compiled), *_rules(compiled), *_averaged(compiled), *_rounded(compiled))
    found = (*compiled.copies.notes, *_passed_on(compiled), *found)
    return (*compiled.plan.warnings, *compiled.resolved.warnings, *found)


def _reshards(compiled: Compiled) -> Iterator[Diagnostic]:
    """Gathers and exchanges, equal ones of repeated blocks together."""
    groups: dict[tuple[str, str, str, int], list[Reshard]] = {}
    for reshard in compiled.built.reshards:
        if isinstance(reshard.source, Split) and not reshard.heads:
            key = (reshard.cause.source, str(reshard.source), str(reshard.result), reshard.cause.plan)
            groups.setdefault(key, []).append(reshard)
    for (place, source, result, line), found in groups.items():
        first = found[0]
        op = "all_to_all" if isinstance(first.result, Split) else "all_gather"
        many = f"{len(found)} times, first " if len(found) > 1 else ""
        inside = f"`{first.cause.module}`" if first.cause.module else "the model itself"
        where = f"in {inside}" + (f" at {place}" if place else "")
        what = f"{op} over `{first.axis}` of `{first.value}`"
        message = f"{what} ({source} to {result}, {size_text(first.bytes)} a rank) {many}{where}"
        span = line_span(compiled.plan, line)
        yield Diagnostic(
            UNASKED_RESHARD, message, Label(span) if span else None,
            help="split both sides alike, or leave the axis out where it does not divide, or leave it as it is if it is"
            " meant", severity=Severity.WARNING,
        )  # fmt: skip


def _rules(compiled: Compiled) -> Iterator[Diagnostic]:
    for op in compiled.built.without_rule:
        cost = sum(r.bytes for r in compiled.built.reshards if r.reader == op)
        yield Diagnostic(
            WITHOUT_RULE, f"`{op}` has no sharding rule: its operands are gathered whole, {size_text(cost)} a rank",
            help=f'parc.register_rule("{op}", "...") in the module of the model', severity=Severity.WARNING,
        )  # fmt: skip


def _passed_on(compiled: Compiled) -> Iterator[Diagnostic]:
    """Inputs that go into ``**kwargs``, of which only the model's code tells whether it takes them."""
    module = compiled.recorded.module
    parameters = inspect.signature(module.forward).parameters
    read = {name for name, node in compiled.captured.placeholders("input").items() if node.users}
    free = parameters.keys() - {line.parameter for line in compiled.plan.inputs}
    for name, place in passed_on(module, compiled.lines).items():
        line = next(line for line in compiled.plan.inputs if line.name == name)
        message = f"`{name}` is passed as `{place}=`, which {forward_text(module)} does not name"
        unread = name not in read
        yield Diagnostic(
            PASSED_ON, f"{message}, and nothing reads it" if unread else message, Label(line.arguments.span("name")),
            help=did_you_mean(place, free, "take the line out, or see what the model calls it") if unread else "",
            severity=Severity.WARNING if unread else Severity.NOTE,
        )  # fmt: skip


def _averaged(compiled: Compiled) -> Iterator[Diagnostic]:
    if compiled.built.averaged:
        many = compiled.plan.microbatches
        message = f"the losses of {many} microbatches are averaged, which may not be the whole batch's loss"
        help_ = "right for a mean over equally many elements; `loss cross_entropy(…)` counts targets of the whole batch"
        span = compiled.plan.loss.arguments.statement.span
        yield Diagnostic(AVERAGED, message, Label(span), help=help_, severity=Severity.WARNING)


def _rounded(compiled: Compiled) -> Iterator[Diagnostic]:
    """Trained weights that no float32 copy stands behind."""
    values = parameters_of(compiled.built.programs["F"].main, "parameter")
    found = [name for name, value in values.items() if is_narrow(value.type.dtype)]
    if found:
        name = found[0]
        dtype = str(values[name].type.dtype).removeprefix("torch.")
        which = f"{len(found)} weights, first `{name}`, are" if len(found) > 1 else f"`{name}` is"
        yield Diagnostic(
            ROUNDED_UPDATES, f"{which} updated in {dtype}",
            Label(compiled.plan.optimizer.arguments.statement.span),
            help="`precision bf16` keeps a float32 copy of every weight, which is updated", severity=Severity.WARNING,
        )  # fmt: skip
