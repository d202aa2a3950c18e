"""Sides of a comparison: a build, or a plan that is compiled for this alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parc.checking.reports import report_of
from parc.compiler.build.directory import read_build
from parc.compiler.plan.plan import Plan, read_plan
from parc.compiling.driver import Progress, compile_plan
from parc.grammar.bounded import real_path
from parc.grammar.source import Source
from parc.page.facts import PageFacts, PlanLine
from parc.step_time import PricedStep, cluster_of, price


@dataclass(frozen=True)
class Side:
    """A side: its name, the facts of its build, and its step on a cluster, if one is named."""

    name: str
    facts: PageFacts
    step: PricedStep | None = None


def on_cluster(side: Side, name: str | None) -> Side:
    """Return a side with its step on a cluster: the one of that name, or that of its plan, or none.

    Raises:
        ClusterError: there is no such cluster, its file is wrong, or the plan does not fit it.
    """
    facts = side.facts
    cluster = cluster_of(facts.plan, facts.build.folder, name)
    return side if cluster is None else replace(side, step=price(facts.build, facts.plan, cluster))


def side_of_build(path: Path) -> Side:
    """Read a build.

    Raises:
        BuildError: it is none.
    """
    return Side(str(path), PageFacts(read_build(path, custom="named")))


def side_of_plan(path: Path, defines: Mapping[str, str], progress: Progress) -> Side:
    """Compile a plan, without the checks of a build.

    Raises:
        PlanError: the plan is at fault.
    """
    words = "".join(f" -D {name}={value}" for name, value in defines.items())
    return _compiled(f"{path}{words}", read_plan(path, defines), real_path(path).parent, progress)


def with_and_without(side: Side, lines: Sequence[PlanLine], progress: Progress) -> tuple[Side, Side]:
    """Return a build as it is, and compiled without some lines of its plan. Its model is imported.

    Where the plan includes others, both are compiled from the text that the build has, in which each included line is
    a line of its own: then each has its own messages.

    Raises:
        PlanError: the plan needs the lines.
    """
    facts, build = side.facts, side.facts.build
    numbers, included = [line.root for line in facts.lines], any(":" in line.place for line in facts.lines)
    if included:
        numbers = [*range(1, len(numbers) + 1)]
    rows = [""] * max(numbers)
    for number, line in zip(numbers, facts.lines, strict=True):
        rows[number - 1] = line.text
    kept = list(rows)
    for number, line in zip(numbers, facts.lines, strict=True):
        kept[number - 1] = "" if line in lines else line.text
    whole, without = (read_plan(Source("plan.parc", "\n".join(text) + "\n")) for text in (rows, kept))
    left = _compiled(f"{side.name}, its `plan.parc`", whole, build.folder, progress) if included else side
    return left, _compiled(f"without {line_text(lines[0])}", without, build.folder, progress)


def line_text(line: PlanLine) -> str:
    """Return a line of a plan without the blanks that align it."""
    return " ".join(line.text.split())


def _compiled(name: str, plan: Plan, folder: Path, progress: Progress) -> Side:
    compiled = compile_plan(plan, folder, progress=progress)
    build = replace(compiled.build, report=report_of(compiled))
    return Side(name, PageFacts(build))
