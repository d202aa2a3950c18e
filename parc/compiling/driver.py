"""The whole path on one screen: a plan's text becomes a checked build directory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from parc.compiler.capture.capture import Captured
from parc.compiler.capture.model_calls import TaskLines, reading_only
from parc.compiler.initial.recipes import Recorded
from parc.compiler.layout.mesh import Mesh, viewed
from parc.compiler.layout.placement import Split
from parc.compiler.ops.precision import regions
from parc.compiler.ops.recompute import RecomputeLine
from parc.compiler.padding.pads import Pads
from parc.compiler.plan.directives.schedule import ACCUMULATE
from parc.compiler.plan.plan import Plan
from parc.compiler.program.actions import FORWARD
from parc.compiler.program.binding import PARAMETERS, Binding
from parc.compiler.resolve.experts import RoutedLayer, biases_of, routing_of
from parc.compiler.resolve.in_graph import context_lines, units_of
from parc.compiler.resolve.placements import Resolved, resolve
from parc.compiler.sizes.polynomials import moving
from parc.compiler.verify.padding import sample_dims
from parc.compiling.axes import compressions_of, finer_axes, levels_of, replicas_of, shardings_of
from parc.compiling.compiled import Compiled, constants_by_name, programs_of
from parc.compiling.fit import Fitted, compile_fitted
from parc.compiling.pipelines import pipeline_of, timelines_of
from parc.compiling.plan_capture import capture_plan, input_specs
from parc.compiling.refusals import REFUSALS, few_kept, keeping_lines, refusal, site_claims, whole_sequences
from parc.compiling.size_ranges import compile_range, fixed
from parc.grammar.codes_build import NOTHING_TRAINED, READ_IN_EVAL
from parc.grammar.codes_run import NOTHING_RETURNED
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.grammar.nearest import listed
from parc.passes.calls import ShardDims
from parc.passes.pipeline import Choices, Request, build_programs, names_of
from parc.passes.placing.heads import Copies, find_copies
from parc.passes.programs.overlap import OverlapChoices

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
            recorded, captured = capture_plan(
                at, task_lines(at), folder, overrides, sizes is not None, evaluates=not at.trains
            )
        if not (at.trains or captured.returned):
            raise PlanError([_nothing_returned(at)])
        progress("passes")
        with _timed(seconds, "passes"):
            made = compile_captured(
                at, folder, recorded, captured, copies, longer, plan if sizes else None, choices,
                smaller=overrides is not None, dims=dims, fitted=fitted,
            )  # fmt: skip
            fitted = made.fitted
        made = replace(made, overrides=dict(overrides or {}), seconds=seconds)
        if not (at.trains or sample_dims(made.built.reference, at.unbatched)):
            raise PlanError([_nothing_returned(at)])
        if at.evaluation is None:
            return made
        progress("evaluation")
        with _timed(seconds, "evaluation"):
            return with_evaluation(made, plan, longer, evaluation_choices if sizes is not None else None)

    evaluation_choices = Choices()
    if not moving(plan.sizes):
        return compile_at()
    choices = Choices()
    made, template = compile_range(plan, lambda sizes: compile_at(sizes, choices), programs_of, constants_by_name)
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


@_uncollected()
def compile_changed(compiled: Compiled, plan: Plan) -> Compiled:
    """Compile a changed plan for the model of a compiled one, at its largest sizes and without its evaluation. The
    model is captured again where it is called in another way.

    Raises:
        PlanError: the changed plan is at fault.
    """
    at = fixed(plan, {name: size.high for name, size in plan.sizes.items()})
    recorded, captured = compiled.recorded, compiled.captured
    if (at.model, input_specs(at)) != (compiled.plan.model, input_specs(compiled.plan)):
        recorded, captured = capture_plan(at, task_lines(at), compiled.folder, None)
    return compile_captured(at, compiled.folder, recorded, captured)


def with_evaluation(
    step: Compiled, declared: Plan, longer: Pads | None = None, choices: Choices | None = None
) -> Compiled:
    """Return a compiled step with the evaluation of its plan: the model is captured in ``eval()``, and runs through
    every pass. Stages, the storage of parameters and what several ranks keep are those of the step. ``choices`` are
    those of evaluations, where sizes have ranges.

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
    asked = ask(
        plan, folder, recorded, captured, step.copies, longer, declared if ranged else None, choices, smaller=True,
        step=step,
    )  # fmt: skip
    compiled = _made(plan, folder, recorded, captured, asked)
    frozen = frozenset(captured.placeholders("parameter"))
    return replace(step, evaluation=replace(compiled, overrides=step.overrides, frozen=frozen))


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


def _made(plan: Plan, folder: Path, recorded: Recorded, captured: Captured, asked: Asked) -> Compiled:
    try:
        built = build_programs(captured, asked.mesh, asked.request)
    except REFUSALS as error:
        raise PlanError([refusal(plan, asked.mesh, asked.resolved, error)]) from error
    if errors := whole_sequences(plan, built.reshards):
        raise PlanError(errors)
    pipeline, purpose = asked.request.pipeline, asked.request.purpose
    timelines = {role: tuple(action for action in actions if action.serves(purpose))
                 for role, actions in timelines_of(plan, built.programs, pipeline, folder).items()}  # fmt: skip
    sizes = {name: size.high for name, size in plan.sizes.items()}
    return Compiled(
        plan, folder, asked.mesh, task_lines(plan), recorded, captured, asked.resolved, built, timelines, pipeline,
        sizes, frozen=asked.request.frozen, copies=asked.copies, routing=asked.routing, purpose=purpose,
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
    step: Compiled | None = None,
) -> Asked:  # fmt: skip
    """Return the request that ``compile_captured`` gives to the passes; with ``step``, for the evaluation beside it.

    Raises:
        PlanError: the plan is at fault.
    """
    lines, names = task_lines(plan), replace(names_of(captured), smaller=smaller)
    pipeline = pipeline_of(plan, folder, names, captured) if step is None else step.pipeline
    pipeline = choices.make("stages", pipeline) if choices is not None else pipeline
    if copies is None:  # what must divide depends on what several ranks keep
        asked = resolve(plan, names, longer, None)
        copies = finer_axes(plan, find_copies(captured, plan, asked.seeds, asked.pads))
    mesh = viewed(plan.mesh, (line.view for line in plan.views), copies.sizes)
    if declared is not None:  # of a range, the step must divide
        resolve(declared, names, longer, copies.parts(mesh))
    resolved = resolve(plan, names, longer, copies.parts(mesh))
    frozen = frozen_parameters(plan, recorded, captured, resolved) if step is None else step.frozen
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
    request = Request(
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
        context=context_lines(plan, names, captured), purpose="training" if plan.trains else "inference",
    )  # fmt: skip
    if step is not None:
        # buffers that steps change lie as they leave them; all else lies as an evaluation wants it
        lying = step.built.programs[FORWARD].main.bound("buffer")
        kept = [(name, lying[name].type.placement) for name in step.captured.updates if name in lying]
        claims += tuple(
            (Binding("buffer", name), axis, kind if isinstance(kind, Split) else None, 0)
            for name, placement in kept for axis, kind in placement.items()
        )  # fmt: skip
        request = replace(request, claims=claims, purpose="evaluation", loss_scale=None, compress={}, biases={},
                          recompute=(), shard_dims=step.built.dims)  # fmt: skip
    return Asked(mesh, resolved, copies, request, routing)


def frozen_parameters(plan: Plan, recorded: Recorded, captured: Captured, resolved: Resolved) -> frozenset[str]:
    """Return the parameters that are not trained: the plan's, and those that the model itself does not train; all in
    a plan for inference.

    Raises:
        PlanError: none is left.
    """
    if not plan.trains:
        return frozenset(captured.placeholders("parameter"))
    own = {name for name, value in recorded.module.named_parameters() if not value.requires_grad}
    frozen = resolved.frozen | own
    if not captured.trainable() - frozen:
        message = "every parameter that the loss depends on is frozen" if frozen else "the loss depends on no parameter"
        help_ = (
            "freeze fewer: a step trains at least one parameter" if plan.frozen else "look at the model's return value"
        )
        span = plan.frozen[0].span if plan.frozen else plan.model.span
        raise PlanError([Diagnostic(NOTHING_TRAINED, message, Label(span), help=help_)])
    return frozen


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - start, 3)
