"""The ``recompute`` lines of a plan on the modules of one model."""

from __future__ import annotations

from collections.abc import Sequence

from ...grammar.codes_plan import NO_OPERATOR, NOTHING_REMADE
from ...grammar.diagnostics import Diagnostic, Label, Severity
from ...grammar.nearest import did_you_mean, listed
from ...grammar.syntax import Word
from ..ops.recompute import FAMILIES, SENT_WORD, RecomputeLine, in_modules
from ..plan.directives.recompute import Recompute
from ..plan.plan import Plan
from .names import PlanNames, find_modules


def recompute_lines(plan: Plan, names: PlanNames) -> tuple[tuple[RecomputeLine, ...], list[Diagnostic]]:
    """Return the ``recompute`` lines, and their errors and warnings."""
    lines: list[RecomputeLine] = []
    found: list[Diagnostic] = []
    for line in plan.recompute:
        matches = [find_modules(word, names) for word in line.where]
        found += [match for match in matches if isinstance(match, Diagnostic)]
        modules = tuple(dict.fromkeys(name for match in matches if isinstance(match, tuple) for name in match))
        if modules and not names.smaller:
            found += _problems(line, modules, names)
        keep = frozenset(word.text for word in line.keep)
        lines.append(RecomputeLine(modules, keep, line.span.root.line, line.fit))
    return tuple(lines), found


def _problems(line: Recompute, modules: Sequence[str], names: PlanNames) -> list[Diagnostic]:
    """Return an error for each word of a line that means no operator there; else a warning, if the line has no
    effect."""
    operators = [one for module, own in names.operators.items() if in_modules(module, modules) for one in own]
    there = {SENT_WORD, *(word for one in operators for word in one.words)}
    where = ", ".join(word.text for word in line.where)
    unknown = [word for word in line.keep if word.text not in there]
    if unknown:
        return [_unknown(word, where, there) for word in unknown]
    if all(one.cheap or not one.words.isdisjoint(word.text for word in line.keep) for one in operators):
        message = f"the line has no effect: in `{where}` it recomputes nothing more than backward does without it"
        help_ = "keep fewer operators, or name other modules"
        label = Label(line.arguments.statement.span)
        return [Diagnostic(NOTHING_REMADE, message, label, help=help_, severity=Severity.WARNING)]
    return []


def _unknown(word: Word, where: str, there: set[str]) -> Diagnostic:
    families = [name for name in FAMILIES if name in there]
    own = sorted(there - FAMILIES.keys())
    known = f"there are {listed(families)}, and the operators {listed(own)}"
    message = f"`{word.text}` is no operator in `{where}`"
    return Diagnostic(NO_OPERATOR, message, Label(word.span), help=did_you_mean(word.text, [*families, *own], known))
