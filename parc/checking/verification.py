"""``parc verify``: a build proved and tested again from its own files, and compared with its plan compiled again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from parc.checking.checks import Checked, case_of, check_files, check_numbers, proved
from parc.checking.difference import first_difference
from parc.checking.limits import hold_promises
from parc.checking.recompilation import differences
from parc.checking.twins import subject_of
from parc.compiler.build.build import Build
from parc.compiler.build.directory import read_build
from parc.compiler.program.actions import FORWARD
from parc.compiler.program.program import Fault
from parc.compiling.driver import Progress, compile_plan
from parc.report import plan_of
from parc.runtime.compare.plain import CPU
from parc.runtime.ranks.processes import check_device
from parc.runtime.state.opening import check_fits, check_source_of


@dataclass
class Verified:
    """The outcome of a verification: faults of the programs, and files that are not as they were built."""

    build: Build
    faults: list[Fault]
    altered: list[str]
    checks: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    difference: str = ""


def verify_static(path: Path) -> Verified:
    """Prove shapes, types and communication from the files alone; no code is imported, of the model or otherwise.

    Raises:
        BuildError: files are missing or cannot be read as a build.
    """
    altered: list[str] = []
    build = read_build(path, altered=altered, imports=False)
    verified = Verified(build, check_files(build), altered)
    if not verified.faults:
        verified.checks = dict.fromkeys(proved(build), "proved")
    return verified


def verify_build(
    path: Path, progress: Progress = lambda _: None, *, locate: bool = False, device: torch.device = CPU
) -> Verified:
    """Prove shapes, types and communication of the programs in the files; test their numbers against the model, on a
    device.

    The plan is compiled again, which imports its model; files that are not what it compiles to are faults.

    ``locate``: where numbers differ, also look for the first line of the forward that does.

    Raises:
        BuildError: files are missing or cannot be read as a build.
        RunError: the model's file changed, torch is another, or there is no such device.
        PlanError: the build's plan can no longer be compiled, or its programs do not keep a promise of it.
    """
    check_device(device)
    altered: list[str] = []
    build = read_build(path, altered=altered)
    check_fits(build, build.programs[FORWARD].mesh.world)
    check_source_of(build)
    progress("shapes, types, communication")
    verified = Verified(build, check_files(build), altered)
    if verified.faults:
        return verified
    verified.checks = dict.fromkeys(proved(build), "proved")
    progress("numbers")
    compiled = compile_plan(plan_of(build), build.folder)
    verified.faults += differences(build, compiled)
    compiled = replace(compiled, written=build)
    hold_promises(compiled)
    checked = Checked({}, [])
    check_numbers(compiled, checked, device)
    verified.faults += checked.faults
    verified.numbers = checked.report.get("numbers", {})
    if not verified.faults:
        verified.checks["numbers"] = "tested"
    elif locate and checked.faults:
        progress("first difference")
        subject = subject_of(compiled).compiled
        differing = (first_difference(replace(case_of(at), device=device)) for at in subject.cases())
        verified.difference = str(
            next(filter(None, differing), "no line of the forward differs: look at the backward of what is named above")
        )
    return verified
