"""The comparison of the captured graph with the user's eager module, on which every other check rests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils._pytree import tree_leaves

from parc.checking.module_numbers import ModuleAgreement, OtherAgainError, compare_module
from parc.checking.probes import ProbeBatches
from parc.compiler.capture.experts.forms import own_forms
from parc.compiler.capture.faults import CaptureError
from parc.compiler.capture.model_calls import model_builder
from parc.compiler.capture.model_output import returned_tensors
from parc.compiler.capture.observer import code_undone
from parc.compiler.initial.recipes import initialize
from parc.compiler.plan.directive import Directive
from parc.compiler.program.actions import FORWARD
from parc.compiling.compiled import Compiled
from parc.compiling.observation import ObservedModel, check_later, no_function, observe, own_gradient
from parc.compiling.plan_capture import capture_diagnostic, failure
from parc.grammar.codes import AMPLIFIED, CAPTURE_FAILED, NEAR_TIE, NOT_FINITE, OTHER_FORM, OTHER_NUMBERS
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.grammar.nearest import listed
from parc.runtime.compare.agreement import DRAWS
from parc.runtime.compare.model_run import Case, ReferenceRun
from parc.runtime.compare.plain import PlainModule
from parc.runtime.ranks.faults import Watcher

CLAMP = "keep it finite for such data: clamp the argument of a logarithm, a root or a division"
_LATER_TOLERANCE = 1e-4
"""The largest relative error of the loss of a later batch in float32."""
_NARROW_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""The same of models with values of a narrow dtype of their own."""


def compare_with_eager(compiled: Compiled, case: Case) -> ModuleAgreement:
    """Compare the module as the user wrote it with the captured graph (``compare_module``). Where it fails on batches
    that hold the ends of ranges, as on a row of padding, it is compared on others, and that is noted.

    Raises:
        PlanError: the module fails, does what a graph does not have, its numbers are not finite, or its gradients are
            not those of its forward.
    """
    try:
        return _compared(compiled, case, ProbeBatches(compiled, case))
    except PlanError as error:
        first = error.diagnostics[0]
        if first.code not in (CAPTURE_FAILED, NOT_FINITE):
            raise
        try:
            agreement = _compared(compiled, case, ProbeBatches(compiled, case, ends=False))
        except PlanError:
            raise error from None
    note = f"no first and last numbers of ranges, such as tokens: with them {first.message}"
    return replace(agreement, notes=[*agreement.notes, note])


def _compared(compiled: Compiled, case: Case, batches: ProbeBatches) -> ModuleAgreement:
    later = batches.batch(2 * DRAWS)
    try:
        observed = observe(_observed(compiled), batches.batch(0), later)
    except PlanError:
        raise
    except CaptureError as error:
        raise PlanError([capture_diagnostic(compiled.plan, error, compiled.overrides)]) from None
    except Exception as error:
        raise PlanError([failure(compiled.plan, error)]) from error
    for seed in range(DRAWS):
        inputs = batches.batch(2 * seed)
        try:
            with code_undone(compiled.lines.sources, compiled.folder):
                eager = _eager(compiled, inputs)
        except Exception as error:
            raise PlanError([failure(compiled.plan, error)]) from error
        if fault := _run_fault(compiled, case, inputs, eager):
            raise PlanError([fault])
        try:
            agreement = compare_module(compiled, case, batches, seed, observed.keeps)
        except OtherAgainError as other:
            raise PlanError([_other_again(compiled.plan.model, other, observed.kept or observed.changed)]) from None
        if agreement.holds or not agreement.tied:
            break
    if observed.functions and agreement.differences and {d.key.kind for d in agreement.differences} == {"gradient"}:
        raise PlanError([own_gradient(compiled.plan.model, observed.functions)])
    if not agreement.holds and (forms := own_forms(compiled.recorded.module)):
        raise PlanError([_other_form(compiled.plan.model, forms, agreement)])
    if observed.later:
        types = {value.type.dtype for function in case.reference.functions for value in function.values().values()}
        tolerance = max(_NARROW_TOLERANCES.get(dtype, _LATER_TOLERANCE) for dtype in types)
        loss, _ = ReferenceRun(case, False).gradients([later], 0)
        check_later(compiled.plan, observed, loss, tolerance)
    return replace(agreement, changed=observed.changed)


def _observed(compiled: Compiled) -> ObservedModel:
    plan, frozen, evaluates = compiled.plan, compiled.frozen, compiled.request.purpose != "training"
    return ObservedModel(
        plan, compiled.lines, compiled.folder, compiled.overrides, compiled.recorded.recipes, frozen,
        _capacities(compiled), evaluates, {} if evaluates else compiled.captured.limits,
    )  # fmt: skip


def _capacities(compiled: Compiled) -> dict[str, float]:
    """Return the capacity factors of experts by the path of their module."""
    layers = compiled.request.placing.experts.items()
    return {path: layer.capacity for path, layer in layers if layer.capacity is not None}


@dataclass(frozen=True, slots=True)
class _Result:
    """The numbers of one run, of the captured graph or of the eager module."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    output: tuple[torch.Tensor, ...] = ()
    """The output of the eager module."""


def _eager(compiled: Compiled, inputs: Mapping[str, torch.Tensor]) -> _Result:
    build = model_builder(compiled.lines, compiled.folder, compiled.overrides)
    module = initialize(build, compiled.plan.seed, compiled.recorded.recipes)
    if compiled.request.purpose != "training":
        module.eval()
    plain = PlainModule(
        module, compiled.lines, compiled.folder, compiled.plan.seed, compiled.frozen, _capacities(compiled)
    )
    with torch.random.fork_rng(devices=()):  # torch's own draws are the same each time
        torch.manual_seed(compiled.plan.seed)
        output, terms = plain.forward({name: value.clone() for name, value in inputs.items()})
    leaves = tree_leaves(output) if terms else returned_tensors(output).values()
    loss = sum(terms[1:], terms[0]) if terms else torch.zeros(())
    if loss.requires_grad:
        loss.backward()
    returned = tuple(leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor))
    return _Result(loss.detach(), plain.take_gradients(), returned)


def _run_fault(compiled: Compiled, case: Case, inputs: Mapping[str, torch.Tensor], eager: _Result) -> Diagnostic | None:
    """Return the fault of an eager module that is not finite, or None."""
    # a model may return its tensors in a class of its own, in which they are not seen
    of_model = not eager.output or any(bool(value.isnan().any()) for value in eager.output)
    line = compiled.plan.model if of_model else compiled.plan.loss
    if not bool(eager.loss.isfinite()):
        watcher = Watcher(0, lambda: None)
        ReferenceRun(case, False, watcher.watch(FORWARD)).gradients([inputs], 0)
        bad = watcher.first_bad()
        notes = (bad.what.removesuffix(" on rank 0"), *bad.notes) if bad is not None else ()
        return not_finite(line, f"the loss is {float(eager.loss)} on a batch of random data", notes=notes)
    for name, value in eager.gradients.items():
        if not bool(value.isfinite().all()):
            message = f"the gradient of `{name}` is not finite on a batch of random data (the loss is {eager.loss:.6g})"
            return not_finite(compiled.plan.model, message)
    lossless = not compiled.plan.trains
    if lossless and any(bool(value.isnan().any()) for value in eager.output):
        return not_finite(compiled.plan.model, "the model returns NaN on a batch of random data")
    return None


def _other_again(model: Directive, other: OtherAgainError, names: Sequence[str]) -> Diagnostic:
    """Return the error of a module whose numbers follow from what earlier forwards left in Python."""
    message = (
        f"the {other.what} differs by {other.error:.1e} of its size the next time, with the same inputs and weights"
    )
    return no_function(model, message, f"the forward changes {listed(names) if names else 'an iterator'}")


def _other_form(model: Directive, forms: Sequence[str], agreement: ModuleAgreement) -> Diagnostic:
    error = agreement.differences[0].error
    message = f"the form of {listed(forms)} is not what its forward computes: numbers differ by {error:.1e}"
    help_ = "route tokens as the forward does: to the same experts, with the same weights, multiplied at the same place"
    return Diagnostic(OTHER_FORM, message, Label(model.arguments.statement.span), help=help_)


def other_numbers(model: Directive, agreement: ModuleAgreement, at: str) -> Diagnostic:
    """Return the error of a captured graph that is not the module; ``at`` names the sizes, where there are several."""
    first, *others = agreement.differences
    message = f"the captured graph{at} is not the module: the {first.what} differs by {first.error:.1e} of its size"
    explained = (
        f"rounding explains {first.error / first.times:.0e}" if first.times < math.inf else "it has no such tensor"
    )
    names = list(dict.fromkeys(one.what for one in others if one.key != first.key))
    more = f"; so does the {names[0]}" if names else ""
    more += f", and {len(names) - 1} more" if len(names) > 1 else ""
    help_ = (
        "write what a trace follows: no branch on whether it is traced, no values of earlier calls in Python's own"
        " objects, no write to memory that another tensor shares; if there is none of these, this is a fault of parc:"
        " please report the model and this message"
    )
    return Diagnostic(
        OTHER_NUMBERS, message, Label(model.arguments.statement.span), help=help_,
        notes=(f"compared {first.at}: {explained}{more}",),
    )  # fmt: skip


def amplified(model: Directive, message: str) -> Diagnostic:
    """Return the error of a model whose numbers one rounding moves further than a test can allow."""
    help_ = "look for a division by a number near 0, or a steep function that is applied many times"
    return Diagnostic(AMPLIFIED, message, Label(model.arguments.statement.span), help=help_)


def near_tie(model: Directive, at: str, near: float) -> Diagnostic:
    """Return the error of a choice between scores that differ by rounding alone."""
    message = f"rounding decides what top-k chooses in {at}: scores differ by less than {near:.0e} of the largest"
    help_ = "initialise the weights of the scores so that scores differ, or compute equal scores by the same operations"
    return Diagnostic(NEAR_TIE, message, Label(model.arguments.statement.span), help=help_)


def not_finite(line: Directive, message: str, help_: str = CLAMP, notes: tuple[str, ...] = ()) -> Diagnostic:
    """Return the error of numbers in a test that are NaN or infinite, at the plan's line that makes them."""
    return Diagnostic(NOT_FINITE, message, Label(line.arguments.statement.span), help=help_, notes=notes)
