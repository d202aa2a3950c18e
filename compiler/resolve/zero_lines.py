"""The ``zero`` lines of a plan on the parameters of one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...grammar.codes_plan import CONFLICT, SPLIT_ALREADY
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.syntax import Word
from ..plan.directives.zero import Zero
from ..plan.plan import Plan
from .names import PlanNames, find_parameters
from .seeds import Seeds
from .view_lines import Views


@dataclass(frozen=True, slots=True)
class ZeroLine:
    """A ``zero`` line: its level over an axis of several ranks, its parameters, and the line's number."""

    level: int
    axis: str
    parameters: tuple[str, ...]
    line: int
    within: bool = False
    """True for those ranks of the axis alone that share a node."""


def zero_lines(
    plan: Plan, names: PlanNames, seeds: Seeds, views: Views
) -> tuple[tuple[ZeroLine, ...], list[Diagnostic]]:
    """Return the ``zero`` lines that do something, and the errors of all. A parameter has one level over an axis, and
    no line splits it over that axis. Over an axis of a view a line without names means the parameters of the view."""
    lines: list[ZeroLine] = []
    errors: list[Diagnostic] = []
    said: dict[tuple[str, str], Zero] = {}
    for line in plan.zero:
        parameters, unknown = named_parameters(line.where, names)
        errors += unknown
        if (view := views.line_of(line.axis.text)) is not None:
            outside = [name for name in parameters if views.lines.get(name) is not view]
            if line.where and outside:
                errors += views.check(outside[0], (line.axis,))
            parameters = [name for name in parameters if name not in outside]
        parts = plan.refined.parts(line.axis.text)
        wrong = (_cannot_store(line, name, parts, seeds, said) for name in parameters)
        errors += [problem for problem in wrong if problem is not None][:1]
        said.update({(name, part): line for name in parameters for part in parts})
        if line.level and plan.ranks(line.axis.text) > 1:
            lines.append(ZeroLine(line.level, line.axis.text, tuple(parameters), line.span.root.line, line.within))
    return tuple(lines), errors


def named_parameters(where: Sequence[Word], names: PlanNames) -> tuple[list[str], list[Diagnostic]]:
    """Return the parameters that a line means, all if it names none, and the errors of names that match nothing."""
    if not where:
        return list(names.parameters), []
    matches = [find_parameters(word, names) for word in where]
    errors = [match for match in matches if isinstance(match, Diagnostic)]
    return list(dict.fromkeys(name for match in matches if isinstance(match, tuple) for name in match)), errors


def _cannot_store(
    line: Zero, name: str, parts: Sequence[str], seeds: Seeds, said: dict[tuple[str, str], Zero]
) -> Diagnostic | None:
    first = next((said[name, part] for part in parts if (name, part) in said), None)
    if first is not None:
        related = (Label(first.span, f"first: level {first.level}"),)
        message = f"two lines shard `{name}` over `{line.axis.text}`"
        help_ = "remove one of the lines, or name fewer parameters in one by `on`"
        return Diagnostic(CONFLICT, message, Label(line.span), related, help=help_)
    seed = seeds.found.get((name, line.axis.text))
    if seed is None or seed.dim is None or not line.level:
        return None
    message = f"`{name}` is split over `{line.axis.text}` already"
    help_ = "name an axis whose ranks all use the whole parameter, as that of the batch; or other parameters by `on`"
    return Diagnostic(SPLIT_ALREADY, message, Label(line.span), (Label(seed.span, "split here"),), help=help_)
