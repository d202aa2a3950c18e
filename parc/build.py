"""``parc build``: a plan's text becomes a checked build directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from parc.advice import warnings_of
from parc.checking.checks import Checked, check_build
from parc.checking.limits import hold_promises
from parc.compiler.build.directory import check_out, write_build
from parc.compiler.plan.plan import read_plan
from parc.compiling.compiled import Compiled, check_weights
from parc.compiling.driver import Progress, compile_plan
from parc.compiling.plan_data import check_data, check_sample, sample_said
from parc.grammar.bounded import real_path
from parc.sample_advice import sample_warnings


class Refused(Exception):
    """The error of a build that a check refused; nothing was written."""

    def __init__(self, checked: Checked) -> None:
        super().__init__("\n".join(map(str, checked.faults)))
        self.checked = checked


def build(
    path: Path,
    out: Path,
    defines: Mapping[str, str],
    progress: Progress = lambda _: None,
    *,
    uncertified: bool = False,
) -> tuple[Compiled, Checked]:
    """Read a plan, compile it, check it, and write the build directory; also a large build that is ``uncertified``.

    Raises:
        PlanError: the plan, its data or its model is at fault, or the build would not keep a promise of the plan.
        BuildError: ``out`` holds something that is not a build.
        Refused: a check failed.
    """
    check_out(out)
    plan, folder = read_plan(path, defines), real_path(path).parent
    check_data(plan, folder)
    with sample_said(plan, folder):
        compiled = compile_plan(plan, folder, progress=progress)
    check_weights(compiled.plan, compiled.folder, compiled.recorded, compiled.captured)
    hold_promises(compiled, progress)
    samples = check_sample(plan, folder, compiled.build)
    checked = check_build(compiled, progress, uncertified=uncertified)
    if checked.faults:
        raise Refused(checked)
    checked.warnings += (
        *warnings_of(compiled),
        *sample_warnings(compiled, samples),
    )  # what fails leaves no folder behind
    progress("emit")
    write_build(compiled.to_write(checked.report, checked.first), out)
    return compiled, checked
