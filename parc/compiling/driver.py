"""The whole path on one screen: a plan's text becomes a checked build directory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import parc
from parc.compiler.build.build import Build, program_file
from parc.compiler.build.facts import program_facts
from parc.compiler.build.plan_facts import plan_facts
from parc.compiler.capture.capture import Captured
from parc.compiler.capture.model_calls import TaskLines
from parc.compiler.capture.model_code import target_hashes
from parc.compiler.initial.recipes import Recorded
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.views import viewed
from parc.compiler.ops.precision import regions
from parc.compiler.ops.recompute import RecomputeLine
from parc.compiler.padding.pads import Pads, facts_of
from parc.compiler.plan.directives.schedule import ACCUMULATE
from parc.compiler.plan.plan import Plan
from parc.compiler.program.actions import Action, schedule_text
from parc.compiler.program.binding import Binding
from parc.compiler.program.program import REFERENCE_FILE
from parc.compiler.resolve.context_lines import context_lines
from parc.compiler.resolve.resolve import Resolved, resolve
from parc.compiler.resolve.routing import RoutedLayer, biases_of, routing_facts, routing_of
from parc.compiler.resolve.units import units_of
from parc.compiler.sizes.polynomials import check_points, moving
from parc.compiler.sizes.template import Template
from parc.compiling.axes import compressions_of, finer_axes, levels_of, replicas_of, shardings_of
from parc.compiling.fit import compile_fitted
from parc.compiling.fitted import Fitted
from parc.compiling.initial_weights import init_facts
from parc.compiling.pipelines import pipeline_of, timelines_of
from parc.compiling.plan_capture import capture_plan
from parc.compiling.refusals import REFUSALS, refusal, whole_sequences
from parc.compiling.sites import few_kept, keeping_lines, site_claims
from parc.compiling.size_ranges import compile_range, fixed
from parc.grammar.codes_build import NOTHING_TRAINED
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.passes.choices import ShardDims
from parc.passes.pipeline import Built, Choices, Request, build_programs, names_of
from parc.passes.placing.heads import Copies, find_copies
from parc.passes.programs.cut import Pipeline
from parc.passes.programs.overlap import OverlapChoices

Progress = Callable[[str], None]


@dataclass
class Compiled:
    """A plan with its model captured and its programs made; nothing is written yet."""

    plan: Plan
    folder: Path
    mesh: Mesh
    lines: TaskLines
    recorded: Recorded
    captured: Captured
    resolved: Resolved
    built: Built
    timelines: dict[str, tuple[Action, ...]]
    """The actions of each role in a step, in order."""
    pipeline: Pipeline | None
    sizes: dict[str, int]
    overrides: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    copies: Copies = field(default_factory=Copies)
    routing: Mapping[str, RoutedLayer] = field(default_factory=dict)
    """The layers of experts, by their modules."""
    fitted: Fitted | None = None
    """The choice of blocks that are made again, where a line chooses."""
    template: Template | None = None
    """The programs for all sizes, where the plan declares ranges; ``built`` holds those of the largest."""
    written: Build | None = None
    """The build in files that this compilation is compared with, if there is one."""

    @cached_property
    def build(self) -> Build:
        """The build that a reader would make from the files that the plan compiles to; every check looks at this
        one."""
        return self.written or Build.of(self.folder, files_of(self), manifest_of(self), {})

    def to_write(self, report: Mapping[str, Any]) -> Build:
        """Return the build with its report, and the hashes of the code that it was compiled from."""
        code = target_hashes(self.lines.sources, self.folder)
        hashes = {name: code_hash for name, (code_hash, _) in code.items()}
        lines = {name: lines for name, (_, lines) in code.items()}
        manifest = {**self.build.manifest, "model_source": hashes, "model_lines": lines}
        return replace(self.build, manifest=manifest, report=report)

    def at(self, sizes: Mapping[str, int]) -> Compiled:
        """Return the plan compiled for some of its sizes, from the template."""
        build = self.build.at(sizes)
        return replace(self, plan=fixed(self.plan, sizes), written=build, sizes={**self.sizes, **sizes}, template=None)

    def cases(self) -> list[Compiled]:
        """Return the compilations that are checked: this one, or, where sizes have ranges, those at the largest and a
        few other sizes."""
        return [self] if self.template is None else [self.at(sizes) for sizes in check_points(self.template.ranges)]


def task_lines(plan: Plan) -> TaskLines:
    """Return the lines of the plan that say what is trained."""
    model, loss, inputs = plan.model, plan.loss, tuple(line.name for line in plan.inputs)
    places = tuple((line.name, line.parameter) for line in plan.inputs if line.parameter != line.name)
    return TaskLines(
        model.callable, model.values, inputs, loss.terms, places,
        next((line.name for line in plan.inputs if line.name not in plan.unbatched), ""),
    )  # fmt: skip


@contextmanager
def _uncollected() -> Iterator[None]:
    """Enter a block without garbage collection: it would walk over all graphs, which live to the end, and free next to
    nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_uncollected()
def compile_plan(
    plan: Plan,
    folder: Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    copies: Copies | None = None,
    longer: Pads | None = None,
    dims: ShardDims | None = None,
    fitted: Fitted | None = None,
    progress: Progress = lambda _: None,
) -> Compiled:
    """Capture the model and run every pass. Where sizes have ranges, this is done at a few of them, which make a
    template.

    ``overrides`` and ``copies`` make the plan's twin: other arguments of the model, and what its plan keeps on several
    ranks, where it is not to be found out; it is padded wherever the plan's own build is ``longer`` than its model, and
    stores parameters in parts along the same ``dims``, and makes again what blocks like its own have ``fitted``.

    Raises:
        PlanError: the plan, the model or both are at fault.
    """

    def compile_at(sizes: Mapping[str, int] | None = None, choices: Choices | None = None) -> Compiled:
        nonlocal fitted  # all sizes of a range make again what the largest do
        at, seconds = fixed(plan, sizes or {}), dict[str, float]()
        progress("capture")
        with _timed(seconds, "capture"):
            recorded, captured = capture_plan(at, task_lines(at), folder, overrides, sizes is not None)
        progress("passes")
        with _timed(seconds, "passes"):
            made = compile_captured(
                at, folder, recorded, captured, copies, longer, plan if sizes else None, choices,
                smaller=overrides is not None, dims=dims, fitted=fitted,
            )  # fmt: skip
            fitted = made.fitted
        return replace(made, overrides=dict(overrides or {}), seconds=seconds)

    if not moving(plan.sizes):
        return compile_at()
    choices = Choices()
    made, template = compile_range(plan, lambda sizes: compile_at(sizes, choices), programs_of, constant_facts)
    seconds = {key: round(sum(compiled.seconds[key] for compiled in made), 3) for key in made[0].seconds}
    return replace(made[0], plan=plan, template=template, seconds=seconds)


def compile_captured(
    plan: Plan, folder: Path, recorded: Recorded, captured: Captured, copies: Copies | None = None,
    longer: Pads | None = None, declared: Plan | None = None, choices: Choices | None = None, smaller: bool = False,
    dims: ShardDims | None = None, fitted: Fitted | None = None,
) -> Compiled:  # fmt: skip
    """Run every pass on a captured model. ``declared`` is the plan with the ranges from which its sizes were chosen. A
    ``smaller`` model may lack names of the plan.

    Raises:
        PlanError: the plan, the model or both are at fault.
    """
    asked = ask(plan, folder, recorded, captured, copies, longer, declared, choices, smaller)

    def make(lines: tuple[RecomputeLine, ...], units: frozenset[str]) -> Compiled:
        request = replace(asked.request, recompute=lines, units=asked.request.units | units, shard_dims=dims)
        resolved = replace(asked.resolved, recompute=lines)
        return _made(plan, folder, recorded, captured, replace(asked, resolved=resolved, request=request))

    compiled, chosen = compile_fitted(asked.resolved.recompute, captured, fitted, make)
    return replace(compiled, fitted=chosen)


def _made(plan: Plan, folder: Path, recorded: Recorded, captured: Captured, asked: Asked) -> Compiled:
    try:
        built = build_programs(captured, asked.mesh, asked.request)
    except REFUSALS as error:
        raise PlanError([refusal(plan, asked.mesh, asked.resolved, error)]) from error
    if errors := whole_sequences(plan, built.reshards):
        raise PlanError(errors)
    pipeline = asked.request.pipeline
    timelines = timelines_of(plan, built.programs, pipeline, folder)
    sizes = {name: size.high for name, size in plan.sizes.items()}
    return Compiled(
        plan, folder, asked.mesh, task_lines(plan), recorded, captured, asked.resolved, built, timelines, pipeline,
        sizes, frozen=asked.request.frozen, copies=asked.copies, routing=asked.routing,
    )  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A plan's request to the passes, for one captured model."""

    mesh: Mesh
    resolved: Resolved
    copies: Copies
    request: Request
    routing: dict[str, RoutedLayer]


def ask(
    plan: Plan, folder: Path, recorded: Recorded, captured: Captured, copies: Copies | None = None,
    longer: Pads | None = None, declared: Plan | None = None, choices: Choices | None = None, smaller: bool = False,
) -> Asked:  # fmt: skip
    """Return the request that ``compile_captured`` gives to the passes.

    Raises:
        PlanError: the plan is at fault.
    """
    lines, names = task_lines(plan), replace(names_of(captured), smaller=smaller)
    pipeline = pipeline_of(plan, folder, names, captured)
    pipeline = choices.make("stages", pipeline) if choices is not None else pipeline
    if copies is None:  # what must divide depends on what several ranks keep
        asked = resolve(plan, names, longer, None)
        copies = finer_axes(plan, find_copies(captured, plan, asked.seeds, asked.pads))
    mesh = viewed(plan.mesh, (line.view for line in plan.views), copies.sizes)
    if declared is not None:  # of a range, the step must divide
        resolve(declared, names, longer, copies.parts(mesh))
    resolved = resolve(plan, names, longer, copies.parts(mesh))
    frozen = frozen_parameters(plan, recorded, captured, resolved)
    bindings = {
        **{name: Binding("frozen", name) for name in frozen}, **{name: Binding("input", name) for name in lines.inputs}
    }  # fmt: skip
    claims = tuple(
        (bindings.get(seed.value, Binding("parameter", seed.value)), axis, split, seed.span.root.line)
        for seed in resolved.seeds
        for axis, split in copies.splits(seed, mesh).items()
    )
    pads = {bindings.get(name, Binding("parameter", name)): rows for name, rows in resolved.pads.items()}
    routing = routing_of(plan, names, captured)
    return Asked(mesh, resolved, copies, Request(
        claims, plan.microbatches, plan.seed, frozen, getattr(torch, ACCUMULATE[plan.accumulate]),
        copies.gathers(resolved.seeds, mesh), pads, regions(resolved.precision), pipeline,
        shardings_of(resolved, mesh, copies), plan.loss_scale, plan.unbatched, choices,
        OverlapChoices(plan.bucket, plan.prefetch),
        {word: line.span.root.line for word, line in plan.offloaded.items()}, levels_of(plan, mesh, copies),
        compressions_of(resolved, mesh, copies, captured, frozen), units=units_of(plan, names, captured),
        terms=len(plan.loss.terms), sites=site_claims(claims, names), gathered=keeping_lines(plan),
        few=few_kept(resolved, copies, mesh),
        biases=biases_of(routing), replicas=replicas_of(routing, resolved, mesh, copies),
        recompute=resolved.recompute,
        context=context_lines(plan, names, captured),
    ), routing)  # fmt: skip


def frozen_parameters(plan: Plan, recorded: Recorded, captured: Captured, resolved: Resolved) -> frozenset[str]:
    """Return the parameters that are not trained: the plan's, and those that the model itself does not train.

    Raises:
        PlanError: none is left.
    """
    own = {name for name, value in recorded.module.named_parameters() if not value.requires_grad}
    frozen = resolved.frozen | own
    if not captured.trainable() - frozen:
        message = "every parameter that the loss depends on is frozen" if frozen else "the loss depends on no parameter"
        help_ = "name fewer of them: a step trains at least one" if plan.frozen else "see what the model returns"
        span = plan.frozen[0].span if plan.frozen else plan.model.span
        raise PlanError([Diagnostic(NOTHING_TRAINED, message, Label(span), help=help_)])
    return frozen


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - start, 3)


def programs_of(compiled: Compiled) -> dict[str, str]:
    """Return the texts of a build's programs by file name; templates where sizes have ranges."""
    if compiled.template is not None:
        return dict(compiled.template.texts)
    programs = {
        program_file(program): program.text() for made in compiled.built.roles.values() for program in made.values()
    }
    return {REFERENCE_FILE: compiled.built.reference.text(), **programs}


def files_of(compiled: Compiled) -> dict[str, str]:
    """Return the texts of a build's plan, programs and schedule by file name."""
    schedule = schedule_text(compiled.timelines)
    return {"plan.parc": compiled.plan.text(), **programs_of(compiled), "schedule.txt": schedule}


def manifest_of(compiled: Compiled) -> dict[str, Any]:
    """Return the facts that a run needs beside the programs, for a build in the plan's folder. Hashes of code are added
    when it is written."""
    plan, built = compiled.plan, compiled.built
    facts, precision = plan_facts(plan), regions(compiled.resolved.precision)
    return {
        **facts,
        **program_facts(built.programs, built.reference),
        "parc": parc.__version__,
        "torch": torch.__version__.split("+")[0],
        "folder": ".",
        "optimizer": {**facts["optimizer"], "groups": list(compiled.resolved.groups)},
        "frozen": sorted(compiled.frozen),
        "precision": [{**fact, "modules": list(line.modules), "line": line.line}
                      for fact, line in zip(facts["precision"], precision, strict=True)],
        "init": init_facts(plan, compiled.recorded, compiled.captured),
        "aliases": dict(compiled.captured.aliases),
        "padding": facts_of({**compiled.resolved.pads, **built.stored.pads}),
        "constants": constant_facts(compiled),
        **routing_facts(compiled.routing),
    }  # fmt: skip


def constant_facts(compiled: Compiled) -> dict[str, Any]:
    """Return the tensors that capture found written in the model's code: no module holds them, so a run reads them
    here."""
    return {
        name: {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
        for name, value in sorted(compiled.captured.constants.items())
    }
