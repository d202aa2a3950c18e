"""The lines of a plan on what ranks keep and send, for one model: ``zero``, ``recompute`` and ``compress``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...grammar.codes import CONFLICT, NO_OPERATOR, NOT_COMPRESSED, NOTHING_REMADE, SPLIT_ALREADY
from ...grammar.diagnostics import Diagnostic, Label, Severity
from ...grammar.nearest import did_you_mean, listed
from ...grammar.syntax import Word
from ..ops.recompute import FAMILIES, SENT_WORD, RecomputeLine, in_modules
from ..plan.directives.compress import Compress
from ..plan.directives.recompute import Recompute
from ..plan.directives.zero import Zero
from ..plan.plan import Plan
from .names import PlanNames, find_each, find_modules, find_parameters
from .pattern import patterns_for
from .requests import Compression, Sharding
from .seeds import Seeds, Views


def shardings_of(
    plan: Plan, names: PlanNames, seeds: Seeds, views: Views
) -> tuple[dict[str, list[Sharding]], list[Diagnostic]]:
    """Return the shardings that ``zero`` lines ask for, over the plan's own axes, by the parameters' names, and the
    errors of all lines. A parameter has one level over an axis, and no line splits it over that axis. Over an axis of a
    view a line without names means the parameters of the view."""
    shardings: dict[str, list[Sharding]] = {}
    errors: list[Diagnostic] = []
    said: dict[tuple[str, str], Zero] = {}
    for line in plan.zero:
        axis = line.axis.text
        parameters, unknown = named_parameters(line.where, names)
        errors += unknown
        if (view := views.line_of(axis)) is not None:
            outside = [name for name in parameters if views.lines.get(name) is not view]
            if line.where and outside:
                errors += views.check(outside[0], (line.axis,))
            parameters = [name for name in parameters if name not in outside]
        parts = plan.refined.parts(axis)
        wrong = (_cannot_store(line, name, parts, names, seeds, said) for name in parameters)
        errors += [problem for problem in wrong if problem is not None][:1]
        said.update({(name, part): line for name in parameters for part in parts})
        for name in parameters if line.level and plan.ranks(axis) > 1 else ():
            spare = name in views.lines and axis in views.lines[name].view.over
            sharding = Sharding(axis, line.level, line.span.root.line, spare, line.within)
            shardings.setdefault(name, []).append(sharding)
    return shardings, errors


def named_parameters(where: Sequence[Word], names: PlanNames) -> tuple[list[str], list[Diagnostic]]:
    """Return the parameters that a line means, all if it names none, and the errors of names that match nothing."""
    return find_each(where, names, find_parameters) if where else (list(names.parameters), [])


def _cannot_store(
    line: Zero, name: str, parts: Sequence[str], names: PlanNames, seeds: Seeds, said: dict[tuple[str, str], Zero]
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
    axis = line.axis.text
    split = [value for (value, over), other in seeds.found.items() if over == axis and other.dim is not None]
    others = ", ".join(_patterns_of_others(names.parameters, split))
    help_ = "name an axis whose ranks all use the whole parameter, as that of the batch"
    help_ += (
        f"; or all others: `zero {line.level} over {axis} on {others}`"
        if others and not line.where
        else ("; or other parameters by `on`")
    )
    return Diagnostic(SPLIT_ALREADY, message, Label(line.span), (Label(seed.span, "split here"),), help=help_)


def _patterns_of_others(parameters: Iterable[str], split: Sequence[str]) -> list[str]:
    """Return patterns of the parameters that are not split, by the outermost modules in which none is."""

    def around(name: str) -> list[str]:
        path = name.split(".")
        return [".".join(path[:depth]) for depth in range(1, len(path) + 1)]

    parts = {module for name in split for module in around(name)}
    whole = (next(module for module in around(name) if module not in parts) for name in parameters if name not in parts)
    return patterns_for([*dict.fromkeys(whole)], parts)


# ---- recompute


def recompute_lines(plan: Plan, names: PlanNames) -> tuple[tuple[RecomputeLine, ...], list[Diagnostic]]:
    """Return the ``recompute`` lines, and their errors and warnings."""
    lines: list[RecomputeLine] = []
    diagnostics: list[Diagnostic] = []
    for line in plan.recompute:
        modules, errors = find_each(line.where, names, find_modules)
        diagnostics += errors
        if modules and not names.smaller:
            diagnostics += _keep_problems(line, modules, names)
        keep = frozenset(word.text for word in line.keep)
        lines.append(RecomputeLine(tuple(modules), keep, line.span.root.line, line.fit))
    return tuple(lines), diagnostics


def _keep_problems(line: Recompute, modules: Sequence[str], names: PlanNames) -> list[Diagnostic]:
    """Return an error for each word of a line that means no operator there; else a warning, if the line has no
    effect."""
    operators = [one for module, ops in names.operators.items() if in_modules(module, modules) for one in ops]
    there = {SENT_WORD, *(word for one in operators for word in one.words)}
    where = ", ".join(word.text for word in line.where)
    unknown = [word for word in line.keep if word.text not in there]
    if unknown:
        return [_unknown_operator(word, where, there) for word in unknown]
    if all(one.cheap or not one.words.isdisjoint(word.text for word in line.keep) for one in operators):
        message = f"the line has no effect: in `{where}` it recomputes nothing more than backward does without it"
        help_ = "keep fewer operators, or name other modules"
        label = Label(line.arguments.statement.span)
        return [Diagnostic(NOTHING_REMADE, message, label, help=help_, severity=Severity.WARNING)]
    return []


def _unknown_operator(word: Word, where: str, there: set[str]) -> Diagnostic:
    families = [name for name in FAMILIES if name in there]
    others = sorted(there - FAMILIES.keys())
    known = f"there are {listed(families)}, and the operators {listed(others)}"
    message = f"`{word.text}` is no operator in `{where}`"
    return Diagnostic(NO_OPERATOR, message, Label(word.span), help=did_you_mean(word.text, [*families, *others], known))


# ---- compress

REDUCED_EARLY = 2
"""The level of ``zero`` from which every backward sums gradients."""


def compressions_of(plan: Plan, names: PlanNames) -> tuple[dict[str, Compression], list[Diagnostic]]:
    """Return the compressions that ``compress`` lines ask for, over the plan's own axes, by the parameters' names, and
    the errors of all lines."""
    compressions: dict[str, Compression] = {}
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
            compression = Compression((line.axis.text,), line.format, line.span.root.line)
            compressions.update(dict.fromkeys(parameters, compression))
    return compressions, errors


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
