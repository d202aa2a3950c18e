"""``parc verify``: a build proved and tested again from its files, and compared with what its plan compiles to now."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, final

import torch

from parc.checking.certified import certificate_of
from parc.checking.checks import Checked, case_of, check_files, check_numbers, proved
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
from parc.compiler.layout.mesh import Mesh
from parc.compiler.ops.rules import facts
from parc.compiler.program.actions import FORWARD
from parc.compiler.program.blocks import complete
from parc.compiler.program.program import Fault, Line
from parc.compiling.compiled import Compiled
from parc.compiling.driver import Progress, compile_plan
from parc.report import plan_of
from parc.runtime.compare.agreement import TOLERANCE
from parc.runtime.compare.model_run import Case, ReferenceRun
from parc.runtime.compare.own_types import expected_tensor, part_of_bound
from parc.runtime.compare.plain import CPU
from parc.runtime.compare.simulate import Simulation
from parc.runtime.data.random_batch import random_batch
from parc.runtime.ranks.gather import whole_tensor
from parc.runtime.ranks.processes import check_device
from parc.runtime.state.opening import check_fits, check_source_of
from parc.runtime.step import Stepper

# ---- ``parc verify``


_OF_PLACES = ("files", "folder", "format", "model_lines", "model_source")
"""The facts about the places of files, and about the code in them, which other checks compare."""
_OF_RUNS = ("certificate", "checks", "numbers", "placed", "written")
"""The parts of a report that say how a build was checked, or where lines of the plan as it was written stand."""


def differences(build: Build, compiled: Compiled) -> list[Fault]:
    """Return the faults of a build that is not what its plan compiles to."""
    wanted = compiled.build
    registered = _as_read(wanted.manifest)
    return [
        *_text_faults({name: text for name, text in build.texts.items() if not is_of_first_check(name)}, wanted.texts),
        *_rule_faults(build.manifest.get("operators", {}), registered.get("operators", {})),
        *_key_faults("manifest.json", build.manifest, registered, (*_OF_PLACES, "operators")),
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


def _rule_faults(rows: Mapping[str, Any], registered: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault for each operator of one's own of which a manifest says something else than is registered: its
    certificate would take that as given."""
    for op in sorted(rows.keys() | registered.keys()):
        row, wanted = rows.get(op), registered.get(op)
        if row is None or wanted is None:
            message = f"has no rule of `{op}`, which is registered" if row is None else f"`{op}` has no rule any more"
            yield Fault("recompilation", "manifest.json", message)
            continue
        for fact in sorted(key for key in row.keys() | wanted.keys() if row.get(key) != wanted.get(key)):
            have, want = (f"`{shortened(str(side[fact]))}`" if side.get(fact) else "nothing" for side in (row, wanted))
            message = f"the {fact} of `{op}` is {have}, but {want} is registered"
            yield Fault("recompilation", "manifest.json", message)


_LOOSE = 10
"""The factor by which a bound that was measured on another processor may be larger."""


def _first_check_faults(build: Build, wanted: FirstCheck) -> list[Fault]:
    """Return the faults of a build's first check beside the one that was just tested. Numbers may differ as much as
    they may in a run, because they depend on the processor."""
    check = read_first_check(build)
    if check is None:
        return []
    texts = {name: text for name, text in first_check_texts(build, wanted).items() if name != FIRST_CHECK}
    faults = [*_text_faults({name: build.texts[name] for name in texts if name in build.texts}, texts)]
    faults += _key_faults(FIRST_CHECK, check.build.manifest, _as_read(wanted.build.manifest), _OF_PLACES)
    faults += [Fault("recompilation", FIRST_CHECK, f"it expects another {name}")
               for name in sorted(check.expected.keys() ^ wanted.expected.keys())]  # fmt: skip
    for name in check.expected.keys() & wanted.expected.keys():
        there, here = expected_tensor(check, name), expected_tensor(wanted, name)
        if (times := part_of_bound(there.signature.apart(here.signature), here.bound)) > 1:
            message = f"the {name} differs from the one expected there by {times:.1f} times its bound"
            faults.append(Fault("recompilation", FIRST_CHECK, message))
        if (times := part_of_bound(there.bound, here.bound)) > _LOOSE:
            message = f"the {name} may differ there by {times:.1f} times its bound"
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
    build = read_build(path, altered=altered, custom="refused")
    verified = Verified(build, check_files(build), altered)
    if not verified.faults:
        verified.checks = {**dict.fromkeys(proved(build), "proved"), "equality": certificate_of(build).word}
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
    checked = Checked({}, [], certificate=certificate_of(build))
    check_numbers(compiled, checked, device, uncertified=bool(build.report.get("certificate", {}).get("missing")))
    verified.faults += checked.faults
    if checked.first is not None and not checked.faults:
        verified.faults += _first_check_faults(build, checked.first)
    verified.numbers = checked.report.get("numbers", {})
    if not verified.faults:
        verified.checks |= {"equality": checked.certificate.word, "numbers": "tested"}
    elif locate and checked.faults:
        progress("first difference")
        subject = subject_of(compiled, not checked.certificate.missing).compiled
        differing = (first_difference(replace(case_of(at), device=device)) for at in subject.cases())
        verified.difference = str(
            next(filter(None, differing), "no line of the forward differs: look at the backward of what is named above")
        )
    return verified


# ---- the first difference: the first line of the forward whose value on all ranks is not one of the captured graph


LinePlace = tuple[str, str, str, int]
"""The place of a line: module, source line, operator, number of elements."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first line whose whole value equals none that the captured graph has for its operator and place in code."""

    line: Line
    module: str

    def __str__(self) -> str:
        value = next(value.name for value in self.line.results if value is not None)
        origin = self.line.origin
        plan = f", placed by line {origin.plan} of the plan" if origin.plan else ""
        return f"`{value}` = {self.line.op} in `{self.module or 'model'}` at {origin.source}{plan}"


@dataclass(slots=True)
class _Seen:
    line: Line
    module: str
    signatures: list[tuple[float, ...]]
    sizes: list[int]


@final
class _Watch:
    """A hook that notes signatures of whole values. The call of a repeated block completes the names of modules in it:
    ``layers.*`` becomes ``layers.3``."""

    def __init__(self, mesh: Mesh, ranks: Sequence[int]) -> None:
        self.mesh, self.ranks = mesh, ranks
        self.seen: list[_Seen] = []
        self._open = 0

    def __call__(self, line: Line, environments: Sequence[Mapping[str, Any]]) -> None:
        if line.calls_function:
            for seen in self.seen[self._open :]:
                seen.module = complete(seen.module, line.origin.module)
            self._open = len(self.seen)
            return
        if not line.origin.source:
            return
        signatures, sizes = [], []
        for value in line.results:
            if value is not None and value.type.dtype.is_floating_point:
                pieces = [environment[value.name].detach() for environment in environments]
                held = dict(zip(self.ranks, pieces, strict=True))
                whole = pieces[0] if self.mesh.world == 1 else whole_tensor(held, value.type.placement, self.mesh)
                signatures.append(_signature(whole))
                sizes.append(whole.numel())
        if signatures:
            self.seen.append(_Seen(line, line.origin.module, signatures, sizes))


def _signature(tensor: torch.Tensor) -> tuple[float, ...]:
    """Return sums of a tensor's powers, which do not depend on its layout."""
    flat = tensor.reshape(-1).double()
    return (*(float((flat.abs() ** power).sum()) for power in (1, 2, 3)), float(flat.sum()))


def first_difference(case: Case) -> Difference | None:
    """Run the first microbatch's forward on all ranks and on one device, and compare; return None if no line
    differs."""
    batches = random_batch(case.reference, case.microbatches, torch.Generator().manual_seed(0))
    unsharded = _Watch(Mesh(), [0])
    reference = ReferenceRun(case)
    reference.machine.watch = unsharded
    reference.step(batches[:1], 0)
    simulation = Simulation(case)
    by_stage: dict[int, _Watch] = {}
    for stepper, backend in zip(simulation.steppers, simulation.backends, strict=True):
        for name, machine in stepper.machines.items():
            if machine.program.action == FORWARD:
                watch = by_stage[int(name[:-1] or 0)] = _Watch(case.mesh, backend.ranks)
                machine.watch = watch
    simulation.run(Stepper.loss, batches, 0)
    known: dict[LinePlace, list[tuple[float, ...]]] = {}
    for seen in unsharded.seen:
        for signature, size in zip(seen.signatures, seen.sizes, strict=True):
            place = (seen.module, seen.line.origin.source, seen.line.op, size)
            known.setdefault(place, []).append(signature)
    for seen in (seen for stage in sorted(by_stage) for seen in by_stage[stage].seen):
        op = facts(seen.line.op).stands_for or seen.line.op
        candidates = known.get((seen.module, seen.line.origin.source, op, seen.sizes[0]), ())
        if candidates and not any(_alike(seen.signatures[0], other) for other in candidates):
            return Difference(seen.line, seen.module)
    return None


def _alike(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    scale = max(first[0], second[0], 1e-30)
    sums = abs(first[0] - second[0]) <= TOLERANCE * scale and abs(first[3] - second[3]) <= TOLERANCE * scale
    powers = all(abs(a - b) <= TOLERANCE * max(a, b, 1e-30) for a, b in zip(first[1:3], second[1:3], strict=True))
    return sums and powers
