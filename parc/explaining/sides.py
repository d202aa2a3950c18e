"""Sides of a comparison: a build, or a plan that is compiled for this alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from parc.checking.reports import report_of
from parc.compiler.build.build import Build
from parc.compiler.build.directory import read_build
from parc.compiler.plan.plan import Plan, read_plan
from parc.compiling.driver import Progress, compile_plan
from parc.grammar.bounded import real_path
from parc.grammar.source import Source
from parc.page.facts import PageFacts


@dataclass(frozen=True)
class Side:
    """A side: its name, and the facts of its build."""

    name: str
    facts: PageFacts


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


def side_without(build: Build, lines: Collection[int], name: str, progress: Progress) -> Side:
    """Compile the plan of a build without the lines with these indices. The model is imported.

    Raises:
        PlanError: the plan needs them.
    """
    rows = build.texts["plan.parc"].splitlines()
    text = "\n".join("" if at in lines else row for at, row in enumerate(rows)) + "\n"
    return _compiled(name, read_plan(Source("plan.parc", text)), build.folder, progress)


def _compiled(name: str, plan: Plan, folder: Path, progress: Progress) -> Side:
    compiled = compile_plan(plan, folder, progress=progress)
    build = replace(compiled.build, report=report_of(compiled))
    return Side(name, PageFacts(build))
