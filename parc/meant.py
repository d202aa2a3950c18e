"""A guess at a line that was meant otherwise: the change of a plan after which no gather happens that it did not ask
for.

A wrong claim shows where its values meet others, mostly at lines that are right. So each ``column`` and ``row`` line is
changed for a try, as a person mistakes them (the other word, other groups of ``rows``), and the passes that place
values are run on the same graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parc.compiler.layout.placement import AxisType, Split
from parc.compiler.plan.layouts import SplitWeights
from parc.compiler.plan.plan import Plan, read_plan
from parc.compiling.compiled import Compiled
from parc.compiling.driver import ask
from parc.compiling.size_ranges import fixed, line_span
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source, Span
from parc.passes.pipeline import reshards_of
from parc.passes.placing.reshards import Reshard

_MOST_OPERATORS = 3000
"""The most operators of a graph for which changes are tried: each try takes as long as placing it."""
_TOGETHER = 2
"""The most lines that may be wrong together."""
_WORTH = 0.75
"""The largest share of the traffic that may remain after changing a second line, if one line was enough against
gathers."""


@dataclass(frozen=True)
class Meant:
    """Lines of a plan with their probable meaning, and their cost in bytes of one rank in one forward."""

    lines: tuple[tuple[Span, str], ...]
    bytes: int


def unasked_gathers(plan: Plan, reshards: Sequence[Reshard]) -> list[Reshard]:
    """Return the conversions that move parts of a value between ranks though no line of the plan asks for them. A
    ``context`` line asks for those of attention's keys."""
    split = {line.axis.text for line in plan.context}
    return [
        reshard
        for reshard in reshards
        if isinstance(reshard.source, Split) and not reshard.asked and not (reshard.attends and reshard.axis in split)
    ]


def find_meant(compiled: Compiled) -> Meant | None:
    """Return the change of one or two lines after which no value is gathered or exchanged unasked. Return None if there
    is no such change, or if nothing is gathered as the plan is."""
    cost = _gathered(compiled.plan, compiled.built.reshards)
    if not cost or len(compiled.captured.graph.nodes) > _MOST_OPERATORS:
        return None
    plan = compiled.plan
    best, lines = _sent(compiled.built.reshards), list[tuple[Span, str]]()
    groups = {group for reshard in unasked_gathers(plan, compiled.built.reshards)
              for kind in (reshard.source, reshard.result) for group in _groups(kind)}  # fmt: skip
    left = cost
    for _ in range(_TOGETHER):
        tries = [(_sent(reshards), line, text, changed, reshards) for line, text, changed in _changes(plan, groups)
                 if (reshards := _tried(compiled, changed)) is not None]  # fmt: skip
        sent, line, text, changed, reshards = min(tries, key=lambda tried: tried[:2], default=(best, 0, "", plan, ()))
        if sent >= best * (1 if left else _WORTH):
            break
        best, plan, left = sent, changed, _gathered(changed, reshards)
        span = line_span(compiled.plan, line)
        assert span is not None
        lines.append((span, text))
    return Meant(tuple(lines), cost) if lines and not left else None


def _groups(kind: AxisType) -> set[int]:
    """Return the number of equal groups of a dim that a placement splits, as a set of at most one."""
    return {kind.outer} - {1} if isinstance(kind, Split) and isinstance(kind.outer, int) else set()


def _gathered(plan: Plan, reshards: Sequence[Reshard]) -> int:
    return sum(reshard.bytes for reshard in unasked_gathers(plan, reshards))


def _sent(reshards: Sequence[Reshard]) -> int:
    """Return the bytes of all that a rank sends or sums."""
    return sum(reshard.bytes for reshard in reshards)


def _changes(plan: Plan, groups: set[int]) -> Iterator[tuple[int, str, Plan]]:
    """Yield the plan with one of its own lines changed, for each way to mistake that line: its number, its new text,
    the plan."""
    for line in plan.placements:
        span = line.arguments.statement.span
        if (
            not isinstance(line, SplitWeights)
            or line.style in ("vocab", "experts")
            or line.pad
            or span.source is not plan.source
        ):
            continue
        for text in _mistakes(span.text, line, groups):
            whole = f"{plan.source.text[: span.start]}{text}{plan.source.text[span.end :]}"
            try:
                yield (
                    span.line,
                    text,
                    read_plan(Source(plan.source.name, whole, path=plan.source.path), dict(plan.defines)),
                )
            except PlanError:
                continue


def _mistakes(text: str, line: SplitWeights, groups: set[int]) -> Iterator[str]:
    axis = line.axis.text
    plain = re.sub(r"\s+rows\s*\([^)]*\)", "", text)
    other = "row" if line.style == "column" else "column"
    yield re.sub(rf"^{line.style}\b\s*", f"{other} ", plain)
    if line.style == "column":
        yield from (f"{plain} rows ({count} h/{axis} d)" for count in sorted(groups))
        if plain != text:
            yield plain


def _tried(compiled: Compiled, plan: Plan) -> Sequence[Reshard] | None:
    """Return the conversions of another plan for the same model; None if that plan does not fit it."""
    sizes = {name: size.high for name, size in plan.sizes.items()}
    try:
        asked = ask(fixed(plan, sizes), compiled.folder, compiled.recorded, compiled.captured)
    except PlanError:
        return None
    return reshards_of(compiled.captured, asked.mesh, asked.request)
