"""The search: every choice of an open plan, each a plan that is priced or rejected with a reason, and the fastest."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from parc.compiler.clock.cluster import ClusterError
from parc.compiler.plan.open_plan import OpenChoice, OpenPlan, open_words
from parc.compiler.plan.plan import Plan
from parc.grammar.codes import NO_CHOICE, TOO_MANY_CHOICES
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.grammar.format import format_statement
from parc.searching.pricing import ExactPrices, Figures, PricedPlan, Rejected, rejected

MOST_COMBINATIONS = 10**6
"""The most combinations of values that a search goes through."""
_OVER = re.compile(r"\bover (\w+)")
_IDLE = re.compile(r"zero\s+0\b|recompute\s+none$")
_NAMED = re.compile(r"(schedule\s+)\S+ (microbatches \S+)( chunks \S+)?")
RANKS = "ranks"
"""The kind of a rejection: the mesh has another number of ranks."""


@dataclass
class SearchResult:
    """The outcome of a search: the ``best`` plans, fastest first, how many were priced, and why the others are none."""

    plan: OpenPlan
    ranks: int | None
    best: list[PricedPlan] = field(default_factory=list)
    priced: int = 0
    alike: int = 0
    """The choices that make the same plan as an earlier one."""
    cut: Counter[str] = field(default_factory=Counter)
    """The choices that are no plan, by kind of reason."""
    nearest: dict[str, tuple[OpenChoice, Rejected]] = field(default_factory=dict)
    """For each kind of reason, the choice that lacks least."""
    stopped: bool = False
    """True where the search was interrupted: the best are those until then."""

    def reject(self, choice: OpenChoice, reason: Rejected) -> None:
        """Count a choice that is no plan."""
        self.cut[reason.kind] += 1
        if reason.kind not in self.nearest or reason.excess < self.nearest[reason.kind][1].excess:
            self.nearest[reason.kind] = choice, reason


Report = Callable[[int, int, float | None], None]
"""A function that is told how many choices are done, of how many, and the least seconds so far."""


def search(
    plan: OpenPlan, prices: ExactPrices, ranks: int | None, top: int = 5, keep_order: bool = False,
    report: Report = lambda *_: None,
) -> SearchResult:  # fmt: skip
    """Price every choice of an open plan on so many ranks. Each of the ``top`` best is priced from its own programs.

    Raises:
        PlanError: there are too many choices, or none is a plan that fits.
        ClusterError: the cluster cannot run the plan's types.
    """
    if plan.combinations > MOST_COMBINATIONS:
        message = f"{plan.combinations:,} combinations of values, and {MOST_COMBINATIONS:,} are searched"
        help_ = f"close some with -D, or write fewer values: {open_words(plan.lets)}"
        raise PlanError([Diagnostic(TOO_MANY_CHOICES, message, Label(plan.lets[0].span), help=help_)])
    outcome = SearchResult(plan, ranks)
    choices = [*plan.choices(ranks)]
    outcome.cut[RANKS] = plan.combinations - len(
        {tuple(c[let.name] for let in plan.lets if let.values) for c in choices}
    )
    outcome.cut += Counter()
    effects: set[object] = set()
    try:
        for at, choice in enumerate(choices):
            report(at, len(choices), outcome.best[0].figures.seconds if outcome.best else None)
            try:
                closed = plan.plan(choice)
            except PlanError as error:
                outcome.reject(choice, rejected(error))
                continue
            effect = effect_of(closed)
            if effect in effects:
                outcome.alike += 1
                continue
            effects.add(effect)
            try:
                priced = prices.price(choice, closed, keep_order)
            except ClusterError as error:
                outcome.reject(choice, Rejected("cluster", str(error)))
                continue
            if isinstance(priced, Rejected):
                outcome.reject(choice, priced)
                continue
            outcome.priced += 1
            outcome.best = sorted([*outcome.best, priced], key=lambda one: one.figures.seconds)[:top]
    except KeyboardInterrupt:
        outcome.stopped = True
    if not outcome.best:
        raise PlanError([_nothing_legal(outcome)])
    return outcome


def effect_of(plan: Plan) -> tuple[str, ...]:
    """Return what a plan's lines do, the same for choices that make the same plan: without lines that do nothing, over
    an axis of one rank for example."""
    lines = []
    staged = any(plan.mesh.size(line.axis.text) > 1 for line in plan.stages if line.axis.text in plan.mesh)
    for statement in plan.statements:
        text = format_statement(statement)
        axes = [axis for axis in _OVER.findall(text) if axis == "none" or axis in plan.mesh]
        idle = axes and all(axis == "none" or plan.mesh.size(axis) == 1 for axis in axes)
        if not (idle or _IDLE.match(text)):
            lines.append(text if staged else _NAMED.sub(r"\1\2", text))
    return tuple(lines)


def _nothing_legal(outcome: SearchResult) -> Diagnostic:
    """Return the error of a plan of which no choice fits, with the nearest miss of each constraint."""
    notes = [
        f"{outcome.cut[kind]:,} are cut by {kind}: {reason.words} with {choice_text(choice)}"
        for kind, (choice, reason) in outcome.nearest.items()
    ]
    if outcome.cut[RANKS]:
        notes.insert(0, f"{outcome.cut[RANKS]:,} have a mesh of another number of ranks than {outcome.ranks:,}")
    message = f"none of {outcome.plan.combinations:,} choices is a plan that fits"
    if outcome.stopped:
        message = "the search was stopped before it had priced a plan"
    label = Label(outcome.plan.lets[0].span) if outcome.plan.lets else None
    help_ = "add values that split more, as `zero = 0 | 1 | 2 | 3` or `recompute`, or give more ranks"
    return Diagnostic(NO_CHOICE, message, label, help=help_, notes=tuple(notes))


def choice_text(choice: Mapping[str, str]) -> str:
    """Return a choice in words: ``dp=4 tp=2``."""
    return " ".join(f"{name}={value}" for name, value in choice.items())


def why(one: Figures, other: Figures) -> Iterator[tuple[str, float]]:
    """Yield the parts of a step in which one plan spends less than another, or more, each at least 2 % of what tells
    them apart."""
    pairs = [(part, one.parts.get(part, 0.0) - other.parts.get(part, 0.0)) for part in one.parts]
    least = 0.02 * sum(abs(seconds) for _, seconds in pairs)
    yield from sorted((pair for pair in pairs if abs(pair[1]) > least), key=lambda pair: pair[1])


def closed_text(plan: OpenPlan, best: PricedPlan, comments: Sequence[str]) -> str:
    """Return the text of the winner: the plan without open names, with comments above it."""
    text = plan.closed(best.choice, best.order).text
    return "".join(f"# {comment}\n" for comment in comments) + text
