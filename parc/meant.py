"""Guesses at lines that were meant otherwise: the change of a plan after which it needs no unasked gather.

A wrong placement causes gathers elsewhere, mostly at lines that are right. So each ``column`` and ``row`` line is
changed as people mistake them (the other verb, other groups of ``rows``), and placements are propagated again on the
same graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from parc.compiler.layout.placement import AxisType, Split
from parc.compiler.plan.layouts import SplitWeights
from parc.compiler.plan.plan import Plan, read_plan
from parc.compiling.compiled import Compiled
from parc.compiling.request import ask
from parc.compiling.size_ranges import fixed, line_span
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source, Span
from parc.passes.pipeline import Trials
from parc.passes.placing.partition import Reshard

_MOST_OPERATORS = 3000
"""The most operators of a graph for which changes are tried: each try propagates placements through the whole graph."""
_TOGETHER = 2
"""The most lines that are changed together."""
_MOST_LEFT = 0.75
"""The largest share of the traffic that may remain after changing a second line, if the first change removed all
unasked gathers already."""
Edits = tuple[tuple[int, str], ...]
"""The numbers of changed lines, each with its new text."""


@dataclass(frozen=True)
class Meant:
    """Lines of a plan with the lines that were probably meant, and the bytes that a rank gathers for them in a
    forward."""

    lines: tuple[tuple[Span, str], ...]
    bytes: int


def unasked_gathers(plan: Plan, reshards: Sequence[Reshard]) -> list[Reshard]:
    """Return the reshards that gather or exchange a split value though no line of the plan asks for it. A ``context``
    line asks for those of attention's keys."""
    split = {line.axis.text for line in plan.context}
    return [
        reshard
        for reshard in reshards
        if isinstance(reshard.source, Split) and not reshard.asked and not (reshard.attends and reshard.axis in split)
    ]


def find_meant(compiled: Compiled) -> Meant | None:
    """Return the change of one or two lines after which no value is gathered or exchanged unasked; None if no change
    does that, or if the plan needs none."""
    cost = _gathered(compiled.plan, compiled.built.reshards)
    if not cost or len(compiled.captured.graph.nodes) > _MOST_OPERATORS:
        return None
    plan = compiled.plan
    best, lines = _bytes_sent(compiled.built.reshards), dict[int, str]()
    groups = {group for reshard in unasked_gathers(plan, compiled.built.reshards)
              for kind in (reshard.source, reshard.result) for group in _groups(kind)}  # fmt: skip
    left, trials = cost, Trials(compiled.captured)
    while len(lines) < _TOGETHER:
        tries = [(_bytes_sent(reshards), len(edits), edits, changed, reshards)
                 for edits, changed in _changes(plan, groups)
                 if (reshards := _tried(compiled, changed, trials)) is not None]  # fmt: skip
        none: tuple[int, int, Edits, Plan, Sequence[Reshard]] = (best, 0, (), plan, ())
        sent, _, edits, changed, reshards = min(tries, key=lambda tried: tried[:3], default=none)
        if sent >= best * (1 if left else _MOST_LEFT):
            break
        best, plan, left = sent, changed, _gathered(changed, reshards)
        lines.update(edits)
    spans = [(span, text) for line, text in lines.items() if (span := line_span(compiled.plan, line)) is not None]
    return Meant(tuple(spans), cost) if spans and not left else None


def _groups(kind: AxisType) -> set[int]:
    """Return the number of equal groups of a dim that a placement splits, as a set of at most one."""
    return {kind.outer} - {1} if isinstance(kind, Split) and isinstance(kind.outer, int) else set()


def _gathered(plan: Plan, reshards: Sequence[Reshard]) -> int:
    return sum(reshard.bytes for reshard in unasked_gathers(plan, reshards))


def _bytes_sent(reshards: Sequence[Reshard]) -> int:
    """Return the bytes of all reshards of a rank."""
    return sum(reshard.bytes for reshard in reshards)


def _changes(plan: Plan, groups: set[int]) -> Iterator[tuple[Edits, Plan]]:
    """Yield the plan with one of its lines changed, for each way to mistake that line, and with the verbs of two lines
    in succession exchanged."""
    lines = [
        (line.arguments.statement.span, line)
        for line in plan.placements
        if isinstance(line, SplitWeights)
        and line.style in ("column", "row")
        and not line.pad
        and line.arguments.statement.span.source is plan.source
    ]
    changes: list[dict[Span, str]] = [
        {span: text} for span, line in lines for text in _mistakes(span.text, line, groups)
    ]
    for (span, line), (next_span, next_line) in pairwise(lines):
        if line.style != next_line.style and line.axis.text == next_line.axis.text:
            changes.append({span: _other_word(span.text, line), next_span: _other_word(next_span.text, next_line)})
    for change in changes:
        whole = plan.source.text
        for span, text in sorted(change.items(), key=lambda edit: -edit[0].start):
            whole = f"{whole[: span.start]}{text}{whole[span.end :]}"
        edits = tuple((span.line, text) for span, text in change.items())
        try:
            yield edits, read_plan(Source(plan.source.name, whole, path=plan.source.path), dict(plan.defines))
        except PlanError:
            continue


def _other_word(text: str, line: SplitWeights) -> str:
    """Return a line with `row` for `column`, or the other way round."""
    other = "row" if line.style == "column" else "column"
    return re.sub(rf"^{line.style}\b\s*", f"{other} ", _without_rows(text))


def _without_rows(text: str) -> str:
    return re.sub(r"\s+rows\s*\([^)]*\)", "", text)


def _mistakes(text: str, line: SplitWeights, groups: set[int]) -> Iterator[str]:
    axis = line.axis.text
    plain = _without_rows(text)
    yield _other_word(text, line)
    if line.style == "column":
        yield from (f"{plain} rows ({count} h/{axis} d)" for count in sorted(groups))
        if plain != text:
            yield plain


def _tried(compiled: Compiled, plan: Plan, trials: Trials) -> Sequence[Reshard] | None:
    """Return the reshards of another plan for the same model; None if that plan does not fit it."""
    sizes = {name: size.high for name, size in plan.sizes.items()}
    try:
        _, request = ask(fixed(plan, sizes), compiled.folder, compiled.recorded, compiled.captured)
    except PlanError:
        return None
    return trials.place(request)[1]
