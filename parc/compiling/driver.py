"""The whole path on one screen: a plan's text becomes a checked build directory; and what passes refuse, as errors at
lines of the plan."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from parc.compiler import schedules
from parc.compiler.capture.capture import Captured
from parc.compiler.capture.model_calls import TaskLines, reading_only
from parc.compiler.initial.recipes import Recorded
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import Split
from parc.compiler.ops.recompute import RecomputeLine
from parc.compiler.plan.directives.experts import Experts
from parc.compiler.plan.plan import Plan
from parc.compiler.program.actions import Action, accumulation, one_step
from parc.compiler.program.binding import PARAMETERS
from parc.compiler.program.program import Program
from parc.compiler.program.roles import SINGLE
from parc.compiler.resolve.placements import Resolved
from parc.compiler.resolve.requests import Choices, Pipeline, Request
from parc.compiler.sizes.polynomials import moving
from parc.compiler.verify.padding import sample_dims
from parc.compiling.compiled import Compiled, constants_by_name, programs_of
from parc.compiling.fit import compile_fitted
from parc.compiling.fitted import Fitted
from parc.compiling.microbatches import measure_of
from parc.compiling.plan_capture import capture_plan, input_specs
from parc.compiling.request import ask
from parc.compiling.size_ranges import compile_range, fixed, line_span
from parc.grammar.codes import (
    BAD_RULE,
    FEW_HEADS_EACH,
    MIXED_ROWS,
    NO_DERIVATIVE,
    NOT_PLACED,
    NOTHING_RETURNED,
    PARAMETER_WRITTEN,
    READ_IN_EVAL,
    SCHEDULE_MISFIT,
    SPLIT_ALREADY,
    UNEVEN_TOKENS,
    WHOLE_SEQUENCE,
)
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.grammar.nearest import listed
from parc.grammar.syntax import size_text
from parc.passes.calls import MixedRows
from parc.passes.pipeline import GlobalResults, Measure, build_programs
from parc.passes.placing.partition import Reshard, UnevenTokens
from parc.passes.placing.propagate import FewHeads, NotPlaced
from parc.passes.placing.registered import RuleMisfit
from parc.passes.placing.stored import AlreadySplit
from parc.passes.programs.joint import NoDerivative

# ---- refusals of passes, as errors at lines of the plan


PassError = AlreadySplit | UnevenTokens | MixedRows | RuleMisfit | FewHeads | NotPlaced | NoDerivative
REFUSALS = (AlreadySplit, UnevenTokens, MixedRows, RuleMisfit, FewHeads, NotPlaced, NoDerivative)
"""The errors of passes that are the plan's or the model's fault."""


def whole_sequences(plan: Plan, reshards: Sequence[Reshard]) -> list[Diagnostic]:
    """Return the errors of activations that are gathered along a sequence that a ``context`` line splits."""
    errors: dict[str, Diagnostic] = {}
    for line in plan.context:
        for one in reshards:
            gathers = isinstance(one.source, Split) and not isinstance(one.result, Split)
            if one.axis != line.axis.text or not gathers or one.attends or not one.learns:
                continue
            where = f"`{one.cause.module}`" if one.cause.module else "the model"
            message = f"`{one.reader}` in {where} needs `{one.value}` whole, {size_text(one.bytes)} from each rank"
            notes = (f"at {one.cause.source}",) if one.cause.source else ()
            help_ = "avoid it along the sequence (shift targets, not outputs), or leave the line out"
            error = Diagnostic(WHOLE_SEQUENCE, message, Label(line.span), help=help_, notes=notes)
            errors.setdefault(one.cause.source, error)
    return list(errors.values())


def refusal(plan: Plan, mesh: Mesh, resolved: Resolved, error: PassError) -> Diagnostic:
    """Return the error of a plan for one of a pass."""
    model = Label(plan.model.arguments.statement.span)
    if isinstance(error, AlreadySplit):
        span = next(line.span for line in plan.zero if line.span.root.line == error.sharding.line)
        help_ = f"name other parameters with `on`, or an axis whose ranks all use the whole `{error.name}`"
        return Diagnostic(SPLIT_ALREADY, str(error), Label(span), help=help_)
    if isinstance(error, NotPlaced):
        return _not_placed(plan, resolved, error)
    if isinstance(error, UnevenTokens):
        return _uneven_tokens(plan, mesh, error)
    notes = (f"at {error.origin.source}",) if error.origin.source else ()
    if isinstance(error, FewHeads):
        span = next(line.span for line in plan.context if line.axis.text == error.axis)
        help_ = "take fewer ranks, or `using zigzag`, which splits no heads"
        return Diagnostic(FEW_HEADS_EACH, str(error), Label(span), help=help_, notes=notes)
    if isinstance(error, MixedRows):
        help_ = "compute each row separately; put dropout and statistics before or after the experts"
        return Diagnostic(MIXED_ROWS, str(error), model, help=help_, notes=notes)
    if isinstance(error, NoDerivative):
        help_ = "read its operands detached if it is a step or a count, as `torch.heaviside(x.detach(), half)`"
        return Diagnostic(NO_DERIVATIVE, str(error), model, help=help_, notes=notes)
    return Diagnostic(BAD_RULE, str(error), model, help=error.hint, notes=notes)


def _not_placed(plan: Plan, resolved: Resolved, error: NotPlaced) -> Diagnostic:
    """Return the error of a value inside the model that another line splits otherwise, at the line that claims it."""
    seed = next(seed for seed in resolved.seeds if seed.value == error.name and seed.span.root.line == error.line)
    other = line_span(plan, error.other) if error.other not in (0, error.line) else None
    related = (Label(other, "this line comes first"),) if other is not None else ()
    message = f"`{error.name}` cannot also be split over `{seed.axis}` along dim {seed.dim}"
    help_ = "split it on all axes in one line, as `shard out(M) [B/dp, S/cp/tp, _]`, or change the other line"
    return Diagnostic(NOT_PLACED, message, Label(seed.span), related, help=help_)


def _uneven_tokens(plan: Plan, mesh: Mesh, error: UnevenTokens) -> Diagnostic:
    """Return the error of tokens that do not divide among the ranks of their experts, at the line that splits these."""
    lines = (line for line in plan.placements if isinstance(line, Experts))
    line = next((line for line in lines if not error.axes.isdisjoint(mesh.parts(line.axis.text))), None)
    axis = line.axis.text if line is not None else ",".join(error.axes)
    help_ = f"choose sizes that divide by {error.ranks} on each rank, or split experts over another axis"
    label = Label(line.span if line is not None else plan.model.span)
    return Diagnostic(UNEVEN_TOKENS, f"{error} over `{axis}`", label, help=help_)


# ---- the whole path on one screen


Progress = Callable[[str], None]


def task_lines(plan: Plan) -> TaskLines:
    """Return the lines of the plan that say what is trained."""
    model, loss, inputs = plan.model, plan.loss, tuple(line.name for line in plan.inputs)
    places = tuple((line.name, line.parameter) for line in plan.inputs if line.parameter != line.name)
    return TaskLines(
        model.callable, model.values, inputs, loss.terms, places,
        next((line.name for line in plan.inputs if line.name not in plan.unbatched), ""),
    )  # fmt: skip


@contextmanager
def uncollected() -> Iterator[None]:
    """Enter a block without garbage collection: it would walk over all graphs, which live to the end, and free next to
    nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@uncollected()
def compile_plan(
    plan: Plan,
    folder: Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    like: Compiled | None = None,
    progress: Progress = lambda _: None,
) -> Compiled:
    """Capture the model and run every pass. Where sizes have ranges, this is done at a few of them, which make a
    template.

    ``overrides`` of the model's arguments make a twin of a larger build, which it is ``like``: it factors axes in the
    same way, is padded wherever that build is longer than its model, stores parameters in parts along the same dims,
    and makes again what blocks like its own do there.

    Raises:
        PlanError: the plan, the model or both are at fault.
    """

    fitted = like.fitted if like is not None else None

    def compile_at(sizes: Mapping[str, int] | None = None, choices: Choices | None = None) -> Compiled:
        nonlocal fitted  # all sizes of a range make again what the largest do
        at, seconds = fixed(plan, sizes or {}), dict[str, float]()
        progress("capture")
        with _timed(seconds, "capture"):
            recorded, captured = capture_plan(
                at, task_lines(at), folder, overrides, sizes is not None, evaluates=not at.trains
            )
        if not (at.trains or captured.returned):
            raise PlanError([_nothing_returned(at)])
        progress("passes")
        with _timed(seconds, "passes"):
            measure = measure_of(at, task_lines(at), folder, recorded, captured, choices, like, overrides)
            compiled = compile_captured(
                at, folder, recorded, captured, like, plan if sizes else None, choices, fitted, overrides is not None,
                measure,
            )  # fmt: skip
            fitted = compiled.fitted
        compiled = replace(compiled, overrides=dict(overrides or {}), seconds=seconds)
        if not (at.trains or sample_dims(compiled.built.reference, at.unbatched)):
            raise PlanError([_nothing_returned(at)])
        if at.evaluation is None:
            return compiled
        progress("evaluation")
        with _timed(seconds, "evaluation"):
            return with_evaluation(compiled, plan, evaluation_choices if sizes is not None else None, like)

    choices, evaluation_choices = Choices(), Choices()
    if not moving(plan.sizes):
        return compile_at()
    compiled, template = compile_range(plan, lambda sizes: compile_at(sizes, choices), programs_of, constants_by_name)
    seconds = {key: round(sum(one.seconds[key] for one in compiled), 3) for key in compiled[0].seconds}
    return replace(compiled[0], plan=plan, template=template, seconds=seconds)


def compile_captured(
    plan: Plan, folder: Path, recorded: Recorded, captured: Captured, like: Compiled | None = None,
    declared: Plan | None = None, choices: Choices | None = None, fitted: Fitted | None = None, smaller: bool = False,
    measure: Measure | None = None, shared: GlobalResults | None = None,
) -> Compiled:  # fmt: skip
    """Run every pass on a captured model. ``declared`` is the plan with the ranges from which its sizes were chosen. A
    ``smaller`` model may lack names of the plan. ``measure`` finds out what divides the terms of the loss. Several
    compilations of the model have results of the first passes ``shared``.

    Raises:
        PlanError: the plan, the model or both are at fault.
    """
    resolved, request = ask(plan, folder, recorded, captured, like, declared, choices, smaller)

    def make(lines: tuple[RecomputeLine, ...], units: frozenset[str]) -> Compiled:
        storing = replace(request.storing, recompute=lines, units=request.storing.units | units)
        changed = replace(request, storing=storing)
        return _built(plan, folder, recorded, captured, replace(resolved, recompute=lines), changed, measure, shared)

    compiled, chosen = compile_fitted(resolved.recompute, captured, fitted, make)
    return replace(compiled, fitted=chosen)


class CapturedModel(NamedTuple):
    """A model, its graph, and the results of the first passes that plans have in common."""

    recorded: Recorded
    captured: Captured
    shared: GlobalResults


class Captures:
    """Captured models of plans that differ in their layout: each is captured once for each way in which plans call it.
    ``overrides`` of the model's arguments make smaller models."""

    def __init__(self, folder: Path, overrides: Mapping[str, Any] | None = None) -> None:
        self.folder, self.overrides = folder, overrides
        self._models: list[tuple[object, CapturedModel]] = []

    @classmethod
    def of(cls, compiled: Compiled) -> Captures:
        """Return the capture of a compiled plan."""
        captures, plan = cls(compiled.folder), compiled.plan
        key = plan.model, input_specs(plan)
        captures._models.append((key, CapturedModel(compiled.recorded, compiled.captured, GlobalResults())))
        return captures

    def at(self, plan: Plan) -> CapturedModel:
        """Return a plan's model and its graph.

        Raises:
            PlanError: the model is at fault.
        """
        wanted = plan.model, input_specs(plan)
        for key, model in self._models:
            if key == wanted:
                return model
        model = CapturedModel(*capture_plan(plan, task_lines(plan), self.folder, self.overrides), GlobalResults())
        self._models.append((wanted, model))
        return model


def at_largest(plan: Plan) -> Plan:
    """Return a plan at its largest sizes and without its evaluation."""
    return replace(fixed(plan, {name: size.high for name, size in plan.sizes.items()}), evaluation=None)


@uncollected()
def compile_with(captures: Captures, plan: Plan) -> Compiled:
    """Compile a plan for a model that may be captured already, at its largest sizes and without its evaluation.

    Raises:
        PlanError: the plan is at fault.
    """
    at = at_largest(plan)
    recorded, captured, shared = captures.at(at)
    folder, overrides = captures.folder, captures.overrides
    measure = measure_of(at, task_lines(at), folder, recorded, captured, overrides=overrides)
    smaller = overrides is not None
    compiled = compile_captured(at, folder, recorded, captured, smaller=smaller, measure=measure, shared=shared)
    return replace(compiled, overrides=dict(overrides or {}))


def compile_changed(compiled: Compiled, plan: Plan) -> Compiled:
    """Compile a changed plan for the model of a compiled one, at its largest sizes and without its evaluation. The
    model is captured again where it is called in another way.

    Raises:
        PlanError: the changed plan is at fault.
    """
    return compile_with(Captures.of(compiled), plan)


def with_evaluation(
    step: Compiled, declared: Plan, choices: Choices | None = None, like: Compiled | None = None
) -> Compiled:
    """Return a compiled step with the evaluation of its plan: the model is captured in ``eval()``, and runs through
    every pass. Stages, the storage of parameters and what several ranks keep are those of the step. ``choices`` are
    those of evaluations, where sizes have ranges. A twin's evaluation is ``like`` that of the larger build.

    Raises:
        PlanError: the plan, the model or both are at fault.
    """
    plan, folder, ranged = step.plan, step.folder, choices is not None
    recorded, captured = capture_plan(plan, step.lines, folder, step.overrides or None, ranged, evaluates=True)
    of_step = {name for program in step.built.programs.values() for name in program.main.bound(*PARAMETERS)}
    captured = reading_only(captured, of_step)
    read = {name for name, node in captured.placeholders("parameter").items() if node.users}
    if other := sorted(read - of_step):
        raise PlanError([_read_in_eval_alone(plan, other)])
    resolved, request = ask(
        plan, folder, recorded, captured, step, declared if ranged else None, choices, smaller=True, evaluates=True
    )
    like = like.evaluation if like is not None else None
    measure = measure_of(plan, step.lines, folder, recorded, captured, choices, like, step.overrides, evaluates=True)
    compiled = _built(plan, folder, recorded, captured, resolved, request, measure)
    return replace(step, evaluation=replace(compiled, overrides=step.overrides))


def _nothing_returned(plan: Plan) -> Diagnostic:
    """Return the error of a plan for inference whose model returns nothing with samples."""
    message = "the model returns no tensor that has a row for each sample, so there is nothing to predict"
    help_ = "let its forward return one, as `logits`, or train it: add `loss` and `optimizer` lines"
    return Diagnostic(NOTHING_RETURNED, message, Label(plan.model.span), help=help_)


def _read_in_eval_alone(plan: Plan, names: Sequence[str]) -> Diagnostic:
    """Return the error of parameters that no step holds."""
    assert plan.evaluation is not None
    message = f"the model in `eval()` reads {listed(names)}, which it does not read in training"
    help_ = "let the loss of training depend on what `eval()` reads, or remove the `eval` line"
    return Diagnostic(READ_IN_EVAL, message, Label(plan.evaluation.span), help=help_)


def _built(
    plan: Plan, folder: Path, recorded: Recorded, captured: Captured, resolved: Resolved, request: Request,
    measure: Measure | None, shared: GlobalResults | None = None,
) -> Compiled:  # fmt: skip
    """Run the passes, and put the actions of each role in order."""
    try:
        built = build_programs(captured, request, measure, shared)
    except REFUSALS as error:
        raise PlanError([refusal(plan, request.placing.mesh, resolved, error)]) from error
    errors = [*whole_sequences(plan, built.reshards), *_moved_buffers(plan, built.programs)]
    if errors:
        raise PlanError(errors)
    actions = _role_timelines(plan, built.programs, request.pipeline, folder)
    if request.purpose != "training":
        actions = {role: one_step(every) for role, every in actions.items()}
    timelines = {role: tuple(action for action in actions[role] if action.serves(request.purpose)) for role in actions}
    sizes = {name: size.high for name, size in plan.sizes.items()}
    compiled = Compiled(plan, folder, task_lines(plan), recorded, captured, resolved, request, built, timelines, sizes)
    if errors := list(_not_clamped(compiled)):
        raise PlanError(errors)
    return compiled


def _moved_buffers(plan: Plan, programs: Mapping[str, Program]) -> Iterator[Diagnostic]:
    """Yield an error for a buffer that steps change, where a step begins before the one before it has ended."""
    moved = sorted({name for program in programs.values() for name in program.main.returned("buffer")})
    if plan.schedule is not None and plan.is_delayed and moved:
        message = f"steps change the buffer `{moved[0]}`, and a step of `async` begins before the one before it ends"
        help_ = "write `schedule 1f1b`, or train without running statistics and without `balance bias`"
        yield Diagnostic(SCHEDULE_MISFIT, message, Label(plan.schedule.span), help=help_)


def _not_clamped(compiled: Compiled) -> Iterator[Diagnostic]:
    """Yield an error for a parameter that the model's forward clamps, and that no step can clamp."""
    plan, pads, trains = compiled.plan, compiled.pads, compiled.request.purpose == "training"
    held = compiled.built.reference.main.bound(*PARAMETERS)
    copied = "or read a clamped copy: `self.w.clamp(-1, 1)`"
    for name, (low, high) in sorted(compiled.captured.limits.items()):
        message = help_ = ""
        if not trains:
            message = f"the forward clamps the parameter `{name}` in `eval()`, where a build changes none"
            help_ = f"clamp under `if self.training:`, {copied}"
        elif name in compiled.frozen:
            message = f"the forward clamps the frozen parameter `{name}`, which nothing changes in a build"
            help_ = f"clamp it once, in `__init__`, {copied}"
        elif name not in held:
            message = f"the forward clamps the parameter `{name}`, which nothing reads"
            help_ = "leave this clamp out"
        elif pads.get(name) and ((low is not None and low > 0) or (high is not None and high < 0)):
            message = f"the forward clamps `{name}` to numbers without zero, and ranks hold it with zeros for padding"
            help_ = "place it whole: leave it out of lines with `pad`, and of `zero` lines by `in`"
        if message:
            yield Diagnostic(PARAMETER_WRITTEN, message, Label(plan.model.span), help=help_)
        elif plan.schedule is not None and plan.is_delayed:
            message = f"the forward clamps `{name}`, and a step of `async` begins before the one before it ends"
            help_ = "write `schedule 1f1b`, or train without the clamp"
            yield Diagnostic(SCHEDULE_MISFIT, message, Label(plan.schedule.span), help=help_)


def _role_timelines(
    plan: Plan, programs: Collection[str], pipeline: Pipeline | None, folder: Path
) -> dict[str, tuple[Action, ...]]:
    """Return the actions of each role in a step, in order, of the kinds that have programs.

    Raises:
        PlanError: the schedule's file cannot be read, or is no schedule of these stages.
    """
    if pipeline is None or plan.schedule is None:
        return {SINGLE: accumulation(plan.microbatches, also=programs)}
    return schedules.timelines(
        plan.schedule.name, pipeline.stages, plan.microbatches, pipeline.chunks, axis=pipeline.axis, also=programs,
        text=plan.schedule.table_of(folder, pipeline.stages), as_run=True,
    )  # fmt: skip


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - start, 3)
