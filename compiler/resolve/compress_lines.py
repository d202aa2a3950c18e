"""The ``compress`` lines of a plan on the parameters of one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...grammar.codes_plan import CONFLICT, NOT_COMPRESSED
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.source import Span
from ..plan.directives.compress import Compress
from ..plan.directives.zero import Zero
from ..plan.plan import Plan
from .names import PlanNames
from .zero_lines import named_parameters

REDUCED_EARLY = 2
"""The level of ``zero`` from which every backward sums gradients."""


@dataclass(frozen=True, slots=True)
class CompressLine:
    """A ``compress`` line: its axis and format, its parameters, whether it names them, and its place."""

    axis: str
    format: str
    parameters: tuple[str, ...]
    names_them: bool
    span: Span


def compress_lines(plan: Plan, names: PlanNames) -> tuple[tuple[CompressLine, ...], list[Diagnostic]]:
    """Return the ``compress`` lines that do something, and the errors of all."""
    lines: list[CompressLine] = []
    errors: list[Diagnostic] = []
    early = [(line, set(named_parameters(line.where, names)[0]))
             for line in plan.zero if line.level >= REDUCED_EARLY and not line.within]  # fmt: skip
    said: dict[str, Compress] = {}
    for line in plan.compress:
        parameters, unknown = named_parameters(line.where, names)
        errors += unknown
        wrong = (_cannot_compress(line, name, early, said) for name in parameters)
        errors += [problem for problem in wrong if problem is not None][:1]
        said.update(dict.fromkeys(parameters, line))
        if plan.ranks(line.axis.text) > 1:
            lines.append(CompressLine(line.axis.text, line.format, tuple(parameters), bool(line.where), line.span))
    return tuple(lines), errors


def _cannot_compress(
    line: Compress, name: str, early: Sequence[tuple[Zero, set[str]]], said: dict[str, Compress]
) -> Diagnostic | None:
    if name in said:
        related = (Label(said[name].span, "first"),)
        message = f"two lines compress the gradient of `{name}`"
        help_ = "remove one of the lines, or name fewer parameters in one by `on`"
        return Diagnostic(CONFLICT, message, Label(line.span), related, help=help_)
    zero = next((zero for zero, names in early if name in names and zero.axis.text == line.axis.text), None)
    if zero is None:
        return None
    message = f"every backward sums the gradient of `{name}` over `{line.axis.text}`"
    related = (Label(zero.span, f"at level {zero.level}"),)
    help_ = "write `zero 1`, which sums gradients once a step, or leave `compress` out"
    return Diagnostic(NOT_COMPRESSED, message, Label(line.span), related, help=help_)
