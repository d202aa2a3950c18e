"""The making and the capture of a plan's model. Every fault of the model is an error of the plan's line that names
it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from parc.compiler.capture.callables import CallableError, load_callable, not_found, to_install
from parc.compiler.capture.capture import Captured, InputSpec, capture
from parc.compiler.capture.faults import CaptureError, user_frame
from parc.compiler.capture.model_calls import InputsError, TaskLines, caller, loss_function, model_builder
from parc.compiler.capture.node_facts import noted
from parc.compiler.capture.observer import SEEN, PythonState, code_undone
from parc.compiler.initial.recipes import Recorded, record
from parc.compiler.plan.directive import Directive
from parc.compiler.plan.directives.experts import Experts
from parc.compiler.plan.plan import Plan
from parc.compiler.resolve.experts import capacities_of
from parc.compiling.callable_faults import callable_diagnostic, own_trace
from parc.compiling.observation import ObservedModel, observe
from parc.grammar.codes import (
    CAPTURE_FAILED,
    CONTROL_FLOW,
    GRADIENT_HOOK,
    LOSS_NOT_NUMBER,
    LOW_CAPACITY,
    MODEL_FAILED,
    NO_EXPERTS,
    NO_FIELD,
    NOT_IN_REALS,
    NOT_RECOMPUTED,
    OTHER_IN_TRACE,
    PARAMETER_WRITTEN,
    RETURNED_CACHE,
    SEEDED_DRAW,
    SHARED_PARAMETERS,
    UNCOUNTED_DRAW,
    WRONG_INPUTS,
)
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.passes.pipeline import prepare


def make_model(plan: Plan, lines: TaskLines, folder: Path, overrides: Mapping[str, Any] | None = None) -> Recorded:
    """Make the plan's model without allocating it.

    Raises:
        PlanError: the model is at fault.
    """
    smaller = {name: value for name, value in plan.verify.values if name not in plan.sizes} if plan.verify else {}
    try:
        if overrides is None:
            model_builder(lines, folder, smaller)  # a name that no twin could be given is told now
        build = model_builder(lines, folder, overrides)
        return record(build, plan.seed)
    except CaptureError as error:
        raise PlanError([capture_diagnostic(plan, error, overrides)]) from None
    except CallableError as error:
        raise PlanError([callable_diagnostic(MODEL_FAILED, error, plan.model, plan.verify)]) from None
    except Exception as error:
        why, help_ = not_found(error, {**dict(lines.arguments), **(overrides or {})}, folder)
        message = f"making the model failed: {why or f'{type(error).__name__}: {error}'}"
        line, said = _model_line(plan, overrides)
        notes, help_ = (*said, *(() if why else own_trace(error))), help_ or to_install(error)
        label = Label(line.arguments.statement.span)
        raise PlanError([Diagnostic(MODEL_FAILED, message, label, help=help_, notes=notes)]) from None


def _model_line(plan: Plan, overrides: Mapping[str, Any] | None) -> tuple[Directive, tuple[str, ...]]:
    """Return the line that names a model's arguments: that of ``verify`` for a smaller model, with a note of these."""
    if plan.verify is None or not overrides:
        return plan.model, ()
    arguments = ", ".join(f"{name}={value}" for name, value in overrides.items())
    return plan.verify, (f"numbers are tested on a smaller model, with {arguments}",)


def capture_plan(
    plan: Plan, lines: TaskLines, folder: Path, overrides: Mapping[str, Any] | None, ranged: bool = False,
    evaluates: bool = False,
) -> tuple[Recorded, Captured]:  # fmt: skip
    """Make the plan's model without allocating it, and capture it with its loss; ``ranged``: at one of several sizes.
    It is captured as it is made, or, if that ``evaluates``, in ``eval()`` and with the tensors that it returns.

    Raises:
        PlanError: the model or its loss is at fault.
    """
    with code_undone(lines.sources, folder):
        return _captured(plan, lines, folder, overrides, ranged, evaluates)


def _captured(
    plan: Plan, lines: TaskLines, folder: Path, overrides: Mapping[str, Any] | None, ranged: bool, evaluates: bool
) -> tuple[Recorded, Captured]:
    recorded = make_model(plan, lines, folder, overrides)
    if evaluates:
        recorded.module.eval()
    try:
        call, loss = caller(recorded.module, lines), loss_function(lines, folder)
    except InputsError as error:
        raise PlanError([_inputs_diagnostic(plan, error)]) from None
    except CallableError as error:
        raise PlanError([callable_diagnostic(MODEL_FAILED, error, plan.loss)]) from None
    try:
        capacities = capacities_of(plan, recorded.module)
        functions = [load_callable(target, folder) for target in lines.sources[1:]]
        with PythonState([recorded.module, *functions], folder).undone():
            captured = capture(
                recorded.module, recorded.mode, input_specs(plan), call, loss, ranged, capacities, returns=evaluates,
                buffers=_constant_buffers(plan, recorded),
            )  # fmt: skip
        captured, drawn = prepare(captured)
    except CaptureError as error:
        seen = _seen_instead(plan, lines, folder, overrides, evaluates, error)
        raise PlanError([seen or capture_diagnostic(plan, error, overrides)]) from None
    if drawn is not None:
        message = (
            f"the model draws random numbers with `{drawn.target}`, which parc cannot make the same on every layout"
        )
        notes = (f"at {source}",) if (source := noted(drawn).origin.source) else ()
        help_ = (
            "draw with `torch.rand`, `torch.randn`, `torch.randint`, `torch.randperm` or `torch.bernoulli`, or make it"
            " an input"
        )
        raise PlanError(
            [Diagnostic(UNCOUNTED_DRAW, message, Label(plan.model.arguments.statement.span), help=help_, notes=notes)]
        )
    return recorded, captured


def _constant_buffers(plan: Plan, recorded: Recorded) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the initial values of the buffers that are the same in every run: neither drawn nor read from files."""
    read = {} if plan.init is None else recorded.module.state_dict()
    return {name: recorded.recipes[name].whole for name, _ in recorded.module.named_buffers()
            if name not in read and not recorded.recipes[name].drawn}  # fmt: skip


_SMALL_MODEL = 1 << 24
"""The numbers in weights and inputs of a model up to which it is run to see why its capture fails."""


def _seen_instead(
    plan: Plan,
    lines: TaskLines,
    folder: Path,
    overrides: Mapping[str, Any] | None,
    evaluates: bool,
    error: CaptureError,
) -> Diagnostic | None:
    """Return what a run of the model shows that no graph can have, as the cause of a capture that failed; None where it
    shows nothing, fails too, or the model is large."""
    if error.kind not in ("other", "control"):
        return None
    try:
        recipes = make_model(plan, lines, folder, overrides).recipes
        specs = input_specs(plan)
        shapes = [*(recipe.shape for recipe in recipes.values()), *(spec.shape for spec in specs.values())]
        if sum(map(math.prod, shapes)) > _SMALL_MODEL:
            return None
        generator = torch.Generator().manual_seed(0)
        inputs = {
            name: torch.randn(spec.shape, generator=generator).to(spec.dtype)
            if spec.dtype.is_floating_point
            else torch.randint(0, 2, spec.shape, generator=generator).to(spec.dtype)
            for name, spec in specs.items()
        }
        observe(ObservedModel(plan, lines, folder, overrides or {}, recipes, evaluates=evaluates), inputs)
    except CaptureError as seen:
        return capture_diagnostic(plan, seen, overrides) if seen.kind in SEEN else None
    except PlanError as seen:
        return seen.diagnostics[0]
    except Exception:  # the capture's error is that of a model that fails in plain torch, too
        return None
    return None


_TRY = "call the model on one batch without parc; if that works, write this part with torch's own operators on tensors"


def _inputs_diagnostic(plan: Plan, error: InputsError) -> Diagnostic:
    lines = [line.arguments for line in plan.inputs if line.name in error.inputs]
    spans = [line.span("as" if "as" in line else "name") for line in lines]
    label = Label(next(iter(spans), plan.model.arguments.statement.span))
    return Diagnostic(WRONG_INPUTS, str(error), label, help=error.help)


def capture_diagnostic(plan: Plan, error: CaptureError, overrides: Mapping[str, Any] | None = None) -> Diagnostic:
    """Return the error of a plan whose model cannot be captured, or whose smaller one, with ``overrides``."""
    code, help_ = {
        "checkpoint": (
            NOT_RECOMPUTED,
            "leave it out: the numbers are the same, and a `recompute` line of the plan saves the memory",
        ),
        "control": (CONTROL_FLOW, error.help or "compute both sides and choose with `torch.where`"),
        "cache": (RETURNED_CACHE, "give the model `use_cache=False`, or return its logits or its loss alone"),
        "output": (LOSS_NOT_NUMBER, error.help or "name a loss that sums or averages"),
        "field": (NO_FIELD, error.help),
        "experts": (NO_EXPERTS, error.help),
        "capacity": (LOW_CAPACITY, error.help),
        "hook": (GRADIENT_HOOK, error.help),
        "written": (PARAMETER_WRITTEN, error.help),
        "followed": (PARAMETER_WRITTEN, error.help),
        "shared": (SHARED_PARAMETERS, error.help),
        "packed": (GRADIENT_HOOK, error.help),
        "seed": (SEEDED_DRAW, error.help),
        "traced": (OTHER_IN_TRACE, error.help),
        "complex": (NOT_IN_REALS, "write it with arithmetic, powers, `exp`, `log`, products, sums, FFTs and views"),
    }.get(error.kind, (CAPTURE_FAILED, error.help or _TRY))
    line, said = _model_line(plan, overrides)
    line = plan.loss if error.kind == "output" or error.in_loss else line
    if error.kind == "capacity":
        line = next(line for line in plan.placements if isinstance(line, Experts) and line.capacity is not None)
    what = "given in each microbatch as" if plan.microbatches > 1 else "given as"
    related = (Label(batch.span, f"{what} {batch.dtype} {list(plan.input_shape(batch))}")
               for batch in plan.inputs if code is CAPTURE_FAILED)  # fmt: skip
    notes = [*([f"at {error.source}"] if error.source else []), *said]
    if error.__cause__ is not None and error.kind == "other":
        notes += own_trace(error.__cause__)
    span = plan.loss.span_of(error.named) if error.named else line.span
    return Diagnostic(code, str(error), Label(span), tuple(related), help_, tuple(notes))


def failure(plan: Plan, error: Exception) -> Diagnostic:
    """Return the error of a model that fails when it is run as it is written."""
    source = user_frame(error)
    notes = [f"at {source}"] if source else []
    text = str(error).strip().split("\n")[0]
    message = f"the model fails on a batch: {type(error).__name__}: {text}"
    help_ = ""
    if text.startswith("Target ") and any(term.ignore is not None for term in plan.loss.terms):
        help_ = "the model reads the targets too, and ignores another number than the loss: give that as `ignore=...`"
    elif isinstance(error, IndexError):
        sizes = ", ".join(f"{name}={size.high}" for name, size in plan.sizes.items())
        help_ = (
            f"a table that the model looks up there has too few rows for {sizes}: make it longer, or the sizes smaller"
        )
    span = plan.model.arguments.statement.span
    return Diagnostic(CAPTURE_FAILED, message, Label(span), help=help_ or _TRY, notes=(*notes, *own_trace(error)))


def input_specs(plan: Plan) -> dict[str, InputSpec]:
    """Return dtype and shape of each input in one microbatch, over all data ranks."""
    return {line.name: InputSpec(getattr(torch, line.dtype), plan.input_shape(line)) for line in plan.inputs}
