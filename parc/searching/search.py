"""The search: every choice of an open plan, each a plan that is priced or rejected with a reason, and the fastest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from parc.compiler.clock.cluster import ClusterError
from parc.compiler.plan.open_plan import OpenChoice, OpenPlan, open_words
from parc.compiler.plan.plan import Plan
from parc.grammar.codes import NO_CHOICE, TOO_MANY_CHOICES
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.grammar.source import Source
from parc.searching.estimates import Estimate, Estimator, LayoutSizes, SizedChoice, StructureKey, each_structure
from parc.searching.pricing import OVER, ExactPrices, Figures, PricedPlan, Rejected, effect_of, rejected
from parc.searching.shorter import counted_layers

MOST_COMBINATIONS = 10**6
"""The most combinations of values that a search goes through."""
_MOST_TRIED = 3
"""The plans that are compiled to find one that is legal, for each of those that are printed."""
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
    reasons: set[str] = field(default_factory=set, repr=False)
    """The words of all reasons."""
    stopped: bool = False
    """True where the search was interrupted: the best are those until then."""

    structures: int = 0
    """The structures that were compiled for estimates, 0 where every choice was compiled."""
    estimates: list[Estimate] = field(default_factory=list, repr=False)
    """The estimates of all choices that fit, each in every order of the mesh that is another, fastest first."""
    estimator: Estimator | None = field(default=None, repr=False)
    """The maker of the estimates."""
    seconds: dict[str, float] = field(default_factory=dict)
    """The seconds that the search took for "estimates" and for "compiling" plans."""

    @contextmanager
    def taking(self, part: str) -> Iterator[None]:
        """Count the seconds of a part of the search."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def keep(self, priced: PricedPlan, top: int) -> None:
        """Keep a plan if it is among the best."""
        self.best = sorted([*self.best, priced], key=lambda one: one.figures.seconds)[:top]

    def misfit(self, plan: Plan) -> Rejected | None:
        """Return the reason why a closed plan is none of this search: an included file may add axes to its mesh."""
        world = plan.mesh.world
        if self.ranks is None or world == self.ranks:
            return None
        return Rejected(
            RANKS, f"a mesh of {world:,} ranks, with the axes of included files: name all in the plan's own"
        )

    def reject(self, choice: OpenChoice, reason: Rejected) -> None:
        """Count a choice that is no plan."""
        self.cut[reason.kind] += 1
        self.reasons.add(reason.words)
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
    example = plan.example()[1]
    layers = counted_layers(example, prices.folder) if Estimator.serves(plan, example) and len(choices) > top else None
    try:
        if layers is None:
            with outcome.taking("compiling"):
                _by_compiling(outcome, choices, prices, top, keep_order, report)
        else:
            outcome.estimator = Estimator(plan, example, layers, prices.cluster, keep_order)
            _by_estimates(outcome, choices, outcome.estimator, prices, top, report)
    except KeyboardInterrupt:
        outcome.stopped = True
    if not outcome.best:
        raise PlanError([_nothing_legal(outcome)])
    return outcome


def _by_compiling(
    outcome: SearchResult,
    choices: Sequence[OpenChoice],
    prices: ExactPrices,
    top: int,
    keep_order: bool,
    report: Report,
) -> None:
    """Compile and price each choice."""
    effects: set[object] = set()
    for at, choice in enumerate(choices):
        report(at, len(choices), outcome.best[0].figures.seconds if outcome.best else None)
        try:
            closed = outcome.plan.plan(choice)
        except PlanError as error:
            outcome.reject(choice, rejected(error))
            continue
        if reason := outcome.misfit(closed):
            outcome.reject(choice, reason)
            continue
        effect = effect_of(closed)
        if effect in effects:
            outcome.alike += 1
            continue
        effects.add(effect)
        priced = _price(outcome, choice, partial(prices.price, choice, closed, keep_order))
        if priced is not None:
            outcome.priced += 1
            outcome.keep(priced, top)


def _price(outcome: SearchResult, choice: OpenChoice, price: Callable[[], PricedPlan | Rejected]) -> PricedPlan | None:
    """Return a priced plan; None for a choice that is rejected, which is counted."""
    try:
        priced = price()
    except ClusterError as error:
        priced = Rejected("cluster", str(error))
    if isinstance(priced, Rejected):
        outcome.reject(choice, priced)
        return None
    return priced


def _by_estimates(
    outcome: SearchResult, choices: Sequence[OpenChoice], estimator: Estimator, prices: ExactPrices, top: int,
    report: Report,
) -> None:  # fmt: skip
    """Estimate each choice by its structure, and compile and price the best."""
    with outcome.taking("estimates"):
        _estimate(outcome, choices, estimator, report)
    with outcome.taking("compiling"):
        _compile_best(outcome, estimator, prices, top, report)


def _estimate(outcome: SearchResult, choices: Sequence[OpenChoice], estimator: Estimator, report: Report) -> None:
    """Estimate each choice by its structure."""
    structures = _structures(outcome, choices, estimator)
    done, total = 0, sum(map(len, structures.values()))
    try:
        for number, estimates, rejections in each_structure(estimator, structures):
            outcome.estimates += estimates
            outcome.structures += 1
            done += number
            for choice, reason in rejections:
                outcome.reject(choice, reason)
            report(done, total, min((one.figures.seconds for one in outcome.estimates), default=None))
    except KeyboardInterrupt:  # the best so far are still compiled; a second Ctrl-C ends that too
        outcome.stopped = True
    outcome.priced = len(outcome.estimates)
    outcome.estimates.sort(key=lambda one: one.figures.seconds)


def _compile_best(outcome: SearchResult, estimator: Estimator, prices: ExactPrices, top: int, report: Report) -> None:
    """Compile and price the plans that are estimated to be the best."""
    chosen = set[object]()  # of each choice its best order of the mesh
    for one in outcome.estimates:
        if len(outcome.best) == top or len(chosen) > _MOST_TRIED * top:
            break
        if tuple(one.choice.items()) in chosen:
            continue
        chosen.add(tuple(one.choice.items()))
        closed = estimator.closed(one)
        report(len(outcome.best), top, one.figures.seconds)

        def price(one: Estimate = one, closed: Source = closed) -> PricedPlan | Rejected:
            try:
                plan = outcome.plan.read(closed)
                return outcome.misfit(plan) or prices.price(one.choice, plan, True, one.figures)
            except PlanError as error:
                return rejected(error)

        priced = _price(outcome, one.choice, price)
        if priced is not None:
            outcome.keep(priced, top)


def _structures(
    outcome: SearchResult, choices: Sequence[OpenChoice], estimator: Estimator
) -> dict[StructureKey, list[SizedChoice]]:
    """Return the choices of each structure, those that make one plan once."""
    known: dict[StructureKey, StructureKey] = {}
    effects: dict[tuple[str, ...], StructureKey] = {}
    members: dict[StructureKey, dict[LayoutSizes, OpenChoice]] = {}
    for choice in choices:
        sizes = estimator.sizes_of(choice)
        if reason := estimator.misfit(sizes):
            outcome.reject(choice, reason)
            continue
        key = estimator.key_of(choice, sizes)
        if key not in known:
            try:
                known[key] = effects.setdefault(estimator.effect(key), key)
            except PlanError as error:
                outcome.reject(choice, rejected(error))
                continue
        of_key = members.setdefault(known[key], {})
        if sizes in of_key:
            outcome.alike += 1
        of_key.setdefault(sizes, choice)
    return {key: [(choice, sizes) for sizes, choice in of_key.items()] for key, of_key in members.items()}


def _nothing_legal(outcome: SearchResult) -> Diagnostic:
    """Return the error of a plan of which no choice fits, with the nearest miss of each constraint. An error that all
    choices have in common, as that of a model that cannot be made, is said as it is."""
    notes = [
        f"{outcome.cut[kind]:,} are cut ({kind}): {reason.words}, with {choice_text(choice)}"
        for kind, (choice, reason) in outcome.nearest.items()
    ]
    left_out = f"{outcome.cut[RANKS]:,} have a mesh of another number of ranks than {outcome.ranks:,}"
    of_ranks = (left_out,) if outcome.cut[RANKS] and RANKS not in outcome.nearest else ()
    errors = [reason.error for _, reason in outcome.nearest.values() if reason.error is not None]
    if len(outcome.reasons) == 1 and errors and not outcome.stopped:
        shared = next(one for one in errors[0].diagnostics if one.is_error)
        return replace(shared, notes=(*shared.notes, *of_ranks, "no choice of the open names is without this error"))
    message = f"none of {outcome.plan.combinations:,} choices is a plan that fits"
    if outcome.stopped:
        message = "the search was stopped before it had priced a plan"
    label = Label(outcome.plan.lets[0].span) if outcome.plan.lets else None
    help_ = "change the values or the lines that the notes name"
    if outcome.stopped:
        help_ = "let it run longer, or close names with -D"
    elif not outcome.nearest.keys().isdisjoint(OVER):
        help_ = "add values that split more, as `zero = 0 | 1 | 2 | 3` or `recompute`, or give more ranks"
    elif not outcome.nearest:
        help_ = f"write values whose product is {outcome.ranks:,}, or `?` for an axis that takes what the ranks leave"
    return Diagnostic(NO_CHOICE, message, label, help=help_, notes=(*of_ranks, *notes))


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
    same = best.order == best.plan.mesh.names
    text = best.plan.source.text if same else plan.closed(best.choice, best.order).text
    return "".join(f"# {comment}\n" for comment in comments) + text
