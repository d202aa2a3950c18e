"""``parc verify``: a build proved and tested again from its files, and compared with what its plan compiles to now."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from parc.checking.checks import Checked, case_of, check_files, check_numbers, proved
from parc.checking.difference import first_difference
from parc.checking.limits import hold_promises
from parc.checking.reports import report_of
from parc.checking.twins import subject_of
from parc.compiler.build.build import Build
from parc.compiler.build.directory import LINES, json_text, read_build, unlined
from parc.compiler.build.facts import shortened
from parc.compiler.build.first_check import (
    FIRST_CHECK,
    FirstCheck,
    first_check_texts,
    is_of_first_check,
    read_first_check,
)
from parc.compiler.program.actions import FORWARD
from parc.compiler.program.program import Fault
from parc.compiling.compiled import Compiled
from parc.compiling.driver import Progress, compile_plan
from parc.report import plan_of
from parc.runtime.compare.own_types import expected_tensor
from parc.runtime.compare.plain import CPU
from parc.runtime.ranks.processes import check_device
from parc.runtime.state.opening import check_fits, check_source_of

_OF_PLACES = ("files", "folder", "format", "model_lines", "model_source")
"""The facts about the places of files, and about the code in them, which other checks compare."""
_OF_RUNS = ("checks", "numbers", "placed", "written")
"""The parts of a report that say how a build was checked, or where lines of the plan as it was written stand."""


def differences(build: Build, compiled: Compiled) -> list[Fault]:
    """Return the faults of a build that is not what its plan compiles to."""
    wanted = compiled.build
    return [
        *_text_faults({name: text for name, text in build.texts.items() if not is_of_first_check(name)}, wanted.texts),
        *_key_faults("manifest.json", build.manifest, _as_read(wanted.manifest), _OF_PLACES),
        *_key_faults("report.json", build.report, _as_read(report_of(compiled)), _OF_RUNS),
    ]


def _text_faults(texts: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[Fault]:
    for name in texts.keys() - wanted.keys():
        yield Fault("recompilation", name, "the plan compiles to no such file")
    for name, text in wanted.items():
        if name not in texts:
            yield Fault("recompilation", name, "it is missing")
            continue
        for number, rows in enumerate(zip_longest(_unnumbered(texts[name]), _unnumbered(text)), 1):
            if rows[0] != rows[1]:
                have, want = (f"`{row.strip()}`" if row is not None else "nothing" for row in rows)
                yield Fault("recompilation", f"{name}:{number}", f"is {have}, but the plan compiles to {want}")
                break


def _first_check_faults(build: Build, wanted: FirstCheck) -> list[Fault]:
    """Return the faults of a build's first check beside the one that was just tested. Numbers may differ as much as
    they may in a run, because they depend on the processor."""
    check = read_first_check(build)
    if check is None:
        return []
    texts = {name: text for name, text in first_check_texts(build, wanted).items() if name != FIRST_CHECK}
    faults = [*_text_faults({name: build.texts[name] for name in texts if name in build.texts}, texts)]
    faults += [Fault("recompilation", FIRST_CHECK, f"it expects another {name}")
               for name in sorted(check.expected.keys() ^ wanted.expected.keys())]  # fmt: skip
    for name in check.expected.keys() & wanted.expected.keys():
        there, here = expected_tensor(check, name), expected_tensor(wanted, name)
        if (apart := there.signature.apart(here.signature)) > here.bound:
            message = f"the {name} differs from the one expected there by {apart / here.bound:.1f} times its bound"
            faults.append(Fault("recompilation", FIRST_CHECK, message))
    return faults


def _unnumbered(text: str) -> list[str]:
    """Return lines without the line numbers of the plan and the model: a build keeps its plan in another layout than it
    was written in, and comments move code without changing it."""
    return [LINES.sub("", row) for row in text.splitlines()]


def _key_faults(file: str, facts: Mapping[str, Any], wanted: Mapping[str, Any], free: tuple[str, ...]) -> list[Fault]:
    """Return a fault for each fact that differs, except those whose keys are ``free``."""
    faults = []
    for key in sorted((facts.keys() | wanted.keys()) - set(free)):
        texts = [json_text(unlined(side[key])) if key in side else "nothing" for side in (facts, wanted)]
        if texts[0] != texts[1]:
            have, want = (shortened(" ".join(text.split())) for text in texts)
            faults.append(Fault("recompilation", file, f"`{key}` is {have}, but the plan says {want}"))
    return faults


def _as_read(value: Mapping[str, Any]) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(json_text(value))
    return parsed


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
    """Prove shapes, types and communication of the programs in the files, and test their numbers on a device. The plan
    is compiled again, which imports its model; files that are not what it compiles to are faults.

    ``locate``: where numbers differ, also look for the first line of the forward that differs.

    Raises:
        BuildError: files are missing or cannot be read as a build.
        RunError: the model's file changed, torch has another version, or there is no such device.
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
    if checked.first is not None and not checked.faults:
        verified.faults += _first_check_faults(build, checked.first)
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
