"""A compiled plan, and the files of the build that it makes: programs, schedule and the facts of the manifest."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import parc
from parc.compiler.build.build import EVALUATION, Build, program_file
from parc.compiler.build.facts import operator_facts, program_facts, stored_in
from parc.compiler.build.first_check import FirstCheck, first_check_texts
from parc.compiler.build.plan_facts import plan_facts
from parc.compiler.capture.capture import Captured
from parc.compiler.capture.model_calls import TaskLines
from parc.compiler.capture.model_code import target_hashes
from parc.compiler.initial.exported import state_facts
from parc.compiler.initial.files import WeightsError, open_weights, shown_faults, state_tensors
from parc.compiler.initial.recipes import Recorded
from parc.compiler.layout.mesh import Mesh
from parc.compiler.padding.pads import Pads, facts_of
from parc.compiler.plan.plan import Plan
from parc.compiler.program.actions import ACTIONS, Action, schedule_text
from parc.compiler.program.optimizers import WEIGHT_LIMITS, grouped
from parc.compiler.program.program import REFERENCE_FILE
from parc.compiler.resolve.experts import routing_facts
from parc.compiler.resolve.placements import Resolved
from parc.compiler.resolve.requests import Request
from parc.compiler.sizes.polynomials import check_points
from parc.compiler.sizes.template import Template
from parc.compiling.fitted import Fitted
from parc.compiling.size_ranges import fixed
from parc.grammar.codes import BAD_WEIGHTS
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.passes.pipeline import Built

# ---- initial weights from files


def init_facts(plan: Plan, recorded: Recorded, captured: Captured) -> dict[str, Any] | None:
    """Return the facts of the ``init`` line, with the model's tensors as a run expects them in the files."""
    line = plan.init
    if line is None:
        return None
    tensors = [
        {
            "names": list(tensor.names),
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            **({"optional": True} if tensor.optional else {}),
        }
        for tensor in state_tensors(recorded.module, captured.aliases)
    ]
    return {"folder": line.folder, "rounded": line.rounded, "tensors": tensors}


def check_weights(plan: Plan, folder: Path, recorded: Recorded, captured: Captured) -> None:
    """Check the files of the ``init`` line against the model; no tensor is read.

    Raises:
        PlanError: they cannot be read, or do not fit; tensors that do not are named.
    """
    line = plan.init
    if line is None:
        return
    label = Label(line.arguments.span("from"))
    try:
        weights = open_weights(folder / line.folder, line.rounded)
    except WeightsError as error:
        raise PlanError(
            [Diagnostic(BAD_WEIGHTS, str(error), label, help="name a folder of safetensors files")]
        ) from None
    faults = weights.faults(state_tensors(recorded.module, captured.aliases))
    if faults:
        message = f"the weights in `{line.folder}` are not the model's"
        help_ = "write files with the model's own names, as its `state_dict()` has them"
        raise PlanError([Diagnostic(BAD_WEIGHTS, message, label, help=help_, notes=shown_faults(faults))])


# ---- a compiled plan

_SCHEDULE = "schedule.txt"


@dataclass
class Compiled:
    """A plan with its model captured and its programs made; nothing is written yet."""

    plan: Plan
    folder: Path
    lines: TaskLines
    recorded: Recorded
    captured: Captured
    resolved: Resolved
    request: Request
    built: Built
    timelines: dict[str, tuple[Action, ...]]
    """The actions of each role in a step, in order."""
    sizes: dict[str, int]
    overrides: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    fitted: Fitted | None = None
    """The choice of blocks that are made again, where a line chooses."""
    template: Template | None = None
    """The programs for all sizes, where the plan declares ranges; ``built`` holds those of the largest."""
    written: Build | None = None
    """The build in files that this compilation is compared with, if there is one."""
    evaluation: Compiled | None = None
    """The same plan's evaluation, if it asks for one."""

    @property
    def mesh(self) -> Mesh:
        """The mesh on which the programs run, with axes factored."""
        return self.request.placing.mesh

    @property
    def frozen(self) -> frozenset[str]:
        """The parameters that the programs do not train."""
        trains = self.request.trains
        return self.request.computing.frozen if trains else frozenset(self.captured.placeholders("parameter"))

    @property
    def pads(self) -> Pads:
        """The padding of each parameter: that of the plan's lines, then that of dims which ``zero`` lines divide."""
        asked, stored = self.resolved.pads, self.built.stored.pads
        return {name: (*asked.get(name, ()), *stored.get(name, ())) for name in (*asked, *stored)}

    @cached_property
    def build(self) -> Build:
        """The build that a reader would make from the files that the plan compiles to; every check looks at this
        one."""
        return self.written or Build.of(self.folder, files_of(self), manifest_of(self), {})

    @property
    def evaluated(self) -> Compiled | None:
        """The evaluation, which is checked as the build has it; None if the plan asks for none."""
        if self.evaluation is None:
            return None
        return replace(self.evaluation, plan=self.plan, sizes=self.sizes, written=self.build.evaluation)

    def to_write(self, report: Mapping[str, Any], first: FirstCheck | None = None) -> Build:
        """Return the build with its report, its first check, if it was tested, and the hashes of the code that it was
        compiled from."""
        code = target_hashes(self.lines.sources, self.folder)
        hashes = {name: code_hash for name, (code_hash, _) in code.items()}
        lines = {name: lines for name, (_, lines) in code.items()}
        manifest = {**self.build.manifest, "model_source": hashes, "model_lines": lines}
        texts = dict(self.build.texts) | (first_check_texts(self.build, first) if first is not None else {})
        return replace(self.build, manifest=manifest, report=report, texts=texts)

    def at(self, sizes: Mapping[str, int]) -> Compiled:
        """Return the plan compiled for some of its sizes, from the template."""
        build = self.build.at(sizes)
        return replace(self, plan=fixed(self.plan, sizes), written=build, sizes={**self.sizes, **sizes}, template=None)

    def cases(self) -> list[Compiled]:
        """Return the compilations that are checked: this one, or, where sizes have ranges, those at the largest and a
        few other sizes."""
        return [self] if self.template is None else [self.at(sizes) for sizes in check_points(self.template.ranges)]


def programs_of(compiled: Compiled) -> dict[str, str]:
    """Return the texts of a build's programs by file name; templates where sizes have ranges."""
    if compiled.template is not None:
        return dict(compiled.template.texts)
    purpose = compiled.request.purpose
    programs = (program for programs in compiled.built.roles.values() for program in programs.values())
    texts = {program_file(program): program.text() for program in programs if ACTIONS[program.action].serves(purpose)}
    evaluated = programs_of(compiled.evaluation) if compiled.evaluation is not None else {}
    evaluated = {f"{EVALUATION}{name}": text for name, text in evaluated.items()}
    return {REFERENCE_FILE: compiled.built.reference.text(), **texts, **evaluated}


def files_of(compiled: Compiled) -> dict[str, str]:
    """Return the texts of a build's plan, programs and schedule by file name."""
    files = {"plan.parc": compiled.plan.text(), **programs_of(compiled), _SCHEDULE: schedule_text(compiled.timelines)}
    if compiled.evaluation is not None:
        files[f"{EVALUATION}{_SCHEDULE}"] = schedule_text(compiled.evaluation.timelines)
    return files


def manifest_of(compiled: Compiled) -> dict[str, Any]:
    """Return the facts that a run needs beside the programs, for a build in the plan's folder. Hashes of code are added
    when it is written."""
    plan, built, evaluation = compiled.plan, compiled.built, compiled.evaluation
    facts = plan_facts(plan)
    parts = [part.built for part in (compiled, evaluation) if part is not None]
    written = [program for part in parts for role in part.roles.values() for program in role.values()]
    operators = operator_facts([*written, *(part.reference for part in parts)])
    of_programs = program_facts(built.programs, built.reference)
    groups = _groups(compiled, of_programs["parameters"])
    return {
        **facts,
        **of_programs,
        "parc": parc.__version__,
        "torch": torch.__version__.split("+")[0],
        "folder": ".",
        "optimizer": {**facts["optimizer"], "groups": groups, **_limits(compiled)},
        "frozen": sorted(compiled.frozen),
        "precision": [{**fact, "modules": list(line.modules), "line": line.line}
                      for fact, line in zip(facts["precision"], compiled.request.computing.precision, strict=True)],
        "compress": [{**fact, **_across(compiled, fact["axis"])} for fact in facts["compress"]],
        "init": init_facts(plan, compiled.recorded, compiled.captured),
        **({"model_files": compiled.recorded.files} if compiled.recorded.files else {}),
        **({"asked": asked} if (asked := asked_of(compiled)) else {}),
        "aliases": dict(compiled.captured.aliases),
        "exported": state_facts(compiled.recorded, stored_in(built.programs), compiled.captured.aliases),
        "padding": facts_of(compiled.pads),
        **({"operators": operators} if operators else {}),
        "constants": constant_facts(compiled),
        "divisions": division_facts(compiled),
        **({} if evaluation is None else
           {"evaluation": {**facts["evaluation"], "constants": constant_facts(evaluation),
                           "divisions": division_facts(evaluation)}}),
        **routing_facts(compiled.request.placing.experts),
    }  # fmt: skip


def _groups(compiled: Compiled, stored: Container[str]) -> list[Mapping[str, Any]]:
    """Return the optimizer's groups of the parameters that programs have: the loss depends on no others."""
    groups = ((group["set"], filter(stored.__contains__, group["parameters"])) for group in compiled.resolved.groups)
    return list(grouped(groups))


def _limits(compiled: Compiled) -> dict[str, dict[str, list[float | None]]]:
    """Return the limits of parameters that the model's forward clamps, in the manifest's form; nothing without any."""
    limits = {name: list(limits) for name, limits in sorted(compiled.captured.limits.items())}
    return {WEIGHT_LIMITS: limits} if limits else {}


def _across(compiled: Compiled, axis: str) -> dict[str, list[str]]:
    """Return the parts of a compressed axis across nodes, where sums inside these are exact: the axis is in two
    levels."""
    levels = compiled.built.levels.levels if compiled.built.levels is not None else {}
    return {"over": list(compiled.mesh.parts(axis)[: levels[axis]])} if axis in levels else {}


def constants_by_name(compiled: Compiled) -> dict[str, Any]:
    """Return the constants of a step and of its evaluation, each by a name of its own."""
    others = constant_facts(compiled.evaluation) if compiled.evaluation is not None else {}
    return {**constant_facts(compiled), **{f"{name} in eval()": fact for name, fact in others.items()}}


def asked_of(compiled: Compiled) -> dict[str, str]:
    """Return the hashes of buffers by whose values the model's code decided, in a step and in its evaluation."""
    others = compiled.evaluation.captured.asked if compiled.evaluation is not None else {}
    return {**compiled.captured.asked, **others}


def division_facts(compiled: Compiled) -> list[dict[str, Any]]:
    """Return the division of each term of the loss in the manifest's form."""
    return [division._asdict() for division in compiled.built.divisions]


def constant_facts(compiled: Compiled) -> dict[str, Any]:
    """Return the tensors that capture found written in the model's code: no module holds them, so a run reads them
    here."""
    return {
        name: {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
        for name, value in sorted(compiled.captured.constants.items())
    }
