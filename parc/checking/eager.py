"""The comparison of the captured graph with the user's eager module, on which every other check rests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parc.compiler.capture.complex.form import real_form
from parc.compiler.capture.experts.forms import own_forms
from parc.compiler.capture.faults import CaptureError
from parc.compiler.capture.model_calls import model_builder
from parc.compiler.capture.model_output import returned_tensors
from parc.compiler.initial.recipes import initialize
from parc.compiler.plan.directive import Directive
from parc.compiler.program.actions import FORWARD
from parc.compiler.program.binding import Binding
from parc.compiler.program.program import Line
from parc.compiling.compiled import Compiled
from parc.compiling.observation import ObservedModel, check_later, observe, own_gradient
from parc.compiling.plan_capture import capture_diagnostic, failure, input_specs
from parc.grammar.codes import AMPLIFIED, NEAR_TIE, NOT_FINITE, OTHER_FORM
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.grammar.nearest import listed
from parc.runtime.compare.agreement import DRAWS, Margin
from parc.runtime.compare.model_run import Case, ReferenceRun, largest, largest_difference
from parc.runtime.compare.model_run import wide as as_wide
from parc.runtime.compare.plain import PlainModule
from parc.runtime.data.random_batch import random_batch
from parc.runtime.ranks.communication import Environment
from parc.runtime.ranks.faults import Watcher

CLAMP = "keep it finite for such data: clamp the argument of a logarithm, a root or a division"
EAGER_TOLERANCE = 1e-4
_NEAR = 1e-6
"""The margin of a top-k below which rounding of float32 may decide."""
_MOST_ERROR = 5e-2
"""The largest error of float32 results: eager and captured run the same operators, not always the same kernels."""
_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""The allowed errors of models with values of a narrow dtype of their own."""


@dataclass(frozen=True, slots=True)
class EagerAgreement:
    """The relative errors of the loss, of all gradients together (by norm), and of the buffer that differs most."""

    loss: float
    gradient: float
    buffer: float
    allowed: tuple[float, float, float]
    """The largest allowed errors, in the order of ``errors``."""
    tied: str = ""
    """The place of a top-k whose choice rounding may have decided; "" if there is none."""
    changed: tuple[str, ...] = ()
    """The state in Python that each forward changes, which no program has."""

    @property
    def holds(self) -> bool:
        """True where the captured graph agrees with the module."""
        return all(error <= most for error, most in zip(self.errors, self.allowed, strict=True))

    @property
    def errors(self) -> tuple[float, float, float]:
        return self.loss, self.gradient, self.buffer


def compare_with_eager(compiled: Compiled, case: Case) -> EagerAgreement:
    """Compare the module as the user wrote it with the captured graph, on one microbatch of random data; in float64
    where float32 rounds too much to tell (batch statistics of few elements, many layers).

    Raises:
        PlanError: the module fails, does what a graph does not have, its numbers are not finite, or its gradients are
            not those of its forward.
    """
    later = _random_inputs(compiled, case, DRAWS)
    try:
        observed = observe(_observed(compiled), _random_inputs(compiled, case, 0), later)
    except PlanError:
        raise
    except CaptureError as error:
        raise PlanError([capture_diagnostic(compiled.plan, error, compiled.overrides)]) from None
    except Exception as error:
        raise PlanError([failure(compiled.plan, error)]) from error
    for seed in range(DRAWS):
        inputs, margin = _random_inputs(compiled, case, seed), Margin()
        try:
            eager = _eager(compiled, inputs)
        except Exception as error:
            raise PlanError([failure(compiled.plan, error)]) from error
        if fault := _run_fault(compiled, case, inputs, eager):
            raise PlanError([fault])
        agreement = _closest(compiled, case, inputs, eager, margin)
        if agreement.holds or margin.apart > _NEAR:
            break
    if observed.functions and not agreement.holds and agreement.loss <= agreement.allowed[0]:
        raise PlanError([own_gradient(compiled.plan.model, observed.functions)])
    if not agreement.holds and (forms := own_forms(compiled.recorded.module)):
        raise PlanError([_other_form(compiled.plan.model, forms, agreement)])
    if agreement.holds and observed.later:
        check_later(compiled.plan, observed, _captured(case, later).loss, agreement.allowed[0])
    return replace(agreement, tied=margin.at if margin.apart < _NEAR else "", changed=observed.changed)


def _observed(compiled: Compiled) -> ObservedModel:
    plan, frozen = compiled.plan, compiled.frozen
    return ObservedModel(
        plan, compiled.lines, compiled.folder, compiled.overrides, compiled.recorded.recipes, frozen,
        _capacities(compiled), compiled.request.purpose != "training",
    )  # fmt: skip


def _capacities(compiled: Compiled) -> dict[str, float]:
    """Return the capacity factors of experts by the path of their module."""
    layers = compiled.request.placing.experts.items()
    return {path: layer.capacity for path, layer in layers if layer.capacity is not None}


def _random_inputs(compiled: Compiled, case: Case, seed: int) -> dict[str, torch.Tensor]:
    (batch,) = random_batch(case.reference, 1, torch.Generator().manual_seed(seed))
    return {
        name: batch[name].to(spec.dtype) if name in batch else torch.zeros(spec.shape, dtype=spec.dtype)
        for name, spec in input_specs(compiled.plan).items()  # a batch lacks inputs that the graph does not read
    }


def _closest(
    compiled: Compiled, case: Case, inputs: Mapping[str, torch.Tensor], eager: _Result, margin: Margin
) -> EagerAgreement:
    """Return the agreement in float32 or, if that is too little, in float64. For a model that does not run in float64,
    or has float32 tensors of its own even then, float32 is allowed four times the error of its rounding."""
    types = {value.type.dtype for function in case.reference.functions for value in function.values().values()}
    tolerance = max(_TOLERANCES.get(dtype, EAGER_TOLERANCE) for dtype in types)
    allowed = tolerance, min(10 * tolerance, _MOST_ERROR), min(10 * tolerance, _MOST_ERROR)
    captured = _captured(case, inputs, watch=margin.watch)
    agreement = _agreement(captured, eager, allowed)
    if agreement.holds:
        return agreement
    # a buffer may be rounding alone, as the mean of values with mean 0: its error is relative to other tensors too
    top = max(map(largest, (*case.parameters.values(), *case.buffers.values())), default=1.0)
    wider = {name: as_wide(value) for name, value in inputs.items()}
    precise = _captured(case, wider, wide=True)
    try:
        widest = _eager(compiled, wider, wide=True)
        again, rounded = _agreement(precise, widest, allowed, 1e-9 * top), widest.narrow
    except Exception:  # the model's own code may refuse float64 in any way: then there is its float32 run alone
        again, rounded = agreement, True
    if again.holds or not rounded:
        return again
    rounds = _agreement(captured, precise, allowed, 1e-3 * top).errors
    pairs = zip(allowed, rounds, strict=True)
    loss, gradient, buffer = (min(max(least, 4 * error), _MOST_ERROR) for least, error in pairs)
    within = _agreement(captured, eager, (loss, gradient, buffer), 1e-3 * top)
    return within if within.holds else min(agreement, again, key=lambda a: sum(a.errors))


class _Narrow(TorchDispatchMode):
    """A mode that notes if an operator returns floating numbers narrower than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        floats = (x for x in tree_leaves(results) if isinstance(x, torch.Tensor) and x.is_floating_point())
        self.seen = self.seen or any(x.element_size() < 8 for x in floats)
        return results


@dataclass(frozen=True, slots=True)
class _Result:
    """The numbers of one run, of the captured graph or of the eager module."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    """Updated buffers; in an evaluation also the tensors that the model returns."""
    output: tuple[torch.Tensor, ...] = ()
    """The output of the eager module."""
    narrow: bool = False
    """True where a run in float64 had floating numbers narrower than that."""


def _eager(compiled: Compiled, inputs: Mapping[str, torch.Tensor], wide: bool = False) -> _Result:
    build = model_builder(compiled.lines, compiled.folder, compiled.overrides)
    module = initialize(build, compiled.plan.seed, compiled.recorded.recipes)
    module = _in_float64(module) if wide else module
    if compiled.request.purpose != "training":
        module.eval()
    capacities = _capacities(compiled)
    plain = PlainModule(module, compiled.lines, compiled.folder, compiled.plan.seed, compiled.frozen, capacities)
    buffers = {name: value.clone() for name, value in module.named_buffers(remove_duplicate=False)}

    returned = dict[str, torch.Tensor]()

    def forward() -> tuple[torch.Tensor, ...]:
        """Return the tensors that the model returns, and last the loss."""
        with torch.random.fork_rng(devices=()):  # torch's own draws are the same each time
            torch.manual_seed(compiled.plan.seed)
            output, terms = plain.forward({name: value.clone() for name, value in inputs.items()})
        returned.update(returned_tensors(output))
        leaves = tree_leaves(output) if terms else returned.values()
        loss = sum(terms[1:], terms[0]) if terms else torch.zeros(())
        return *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), loss

    narrow = _Narrow()
    with narrow if wide else nullcontext():
        *output, loss = forward()
        if loss.requires_grad:
            loss.backward()
    gradients = plain.take_gradients()
    updated = {name: real_form(value.detach().clone()) for name, value in module.named_buffers(remove_duplicate=False)
               if name in buffers and buffers[name].numel() and not torch.equal(value, buffers[name])}  # fmt: skip
    updated |= {str(Binding("output", name)): returned[name].detach() for name in compiled.captured.returned}
    return _Result(loss.detach(), gradients, updated, tuple(output), narrow.seen)


def _in_float64(module: nn.Module) -> nn.Module:
    """Return a module in float64, with complex numbers in complex128: torch's ``double`` does not change those."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_complex():
            tensor.data = tensor.data.to(torch.complex128)
    return module.double()


def _run_fault(compiled: Compiled, case: Case, inputs: Mapping[str, torch.Tensor], eager: _Result) -> Diagnostic | None:
    """Return the fault of an eager module that is not finite, or None."""
    # a model may return its tensors in a class of its own, in which they are not seen
    of_model = not eager.output or any(bool(value.isnan().any()) for value in eager.output)
    line = compiled.plan.model if of_model else compiled.plan.loss
    if not bool(eager.loss.isfinite()):
        watcher = Watcher(0, lambda: None)
        _captured(case, inputs, watch=watcher.watch(FORWARD))
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


def _other_form(model: Directive, forms: Sequence[str], agreement: EagerAgreement) -> Diagnostic:
    error = max(agreement.errors)
    message = f"the form of {listed(forms)} is not what its forward computes: numbers differ by {error:.1e}"
    help_ = "route tokens as the forward does: to the same experts, with the same weights, multiplied at the same place"
    return Diagnostic(OTHER_FORM, message, Label(model.arguments.statement.span), help=help_)


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


def _agreement(
    run: _Result, expected: _Result, allowed: tuple[float, float, float], floor: float = 1e-30
) -> EagerAgreement:
    def norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the norm of all tensors together, in float64."""
        norms = [tensor.double().norm() for tensor in tensors]
        whole: torch.Tensor = torch.stack(norms or [torch.zeros((), dtype=torch.float64)]).norm()
        return whole

    wanted = expected.gradients
    error = norm(run.gradients.get(name, torch.zeros_like(value)) - value for name, value in wanted.items())
    gradient = float(error / norm(wanted.values()).clamp_min(1e-30))
    loss = float((run.loss - expected.loss).abs() / expected.loss.abs().clamp_min(1e-12))
    buffers = [_buffer_error(run.buffers.get(name), value, floor) for name, value in expected.buffers.items()]
    return EagerAgreement(loss, gradient, max(buffers, default=0.0), allowed)


def _buffer_error(buffer: torch.Tensor | None, expected: torch.Tensor, floor: float) -> float:
    """Return the largest error of an updated buffer, relative to the largest number expected; infinite for a missing
    one."""
    if buffer is None or buffer.shape != expected.shape:
        return math.inf
    return largest_difference(buffer, expected) / max(largest(expected), floor)


def _captured(
    case: Case,
    inputs: Mapping[str, torch.Tensor],
    wide: bool = False,
    watch: Callable[[Line, Sequence[Environment]], None] | None = None,
) -> _Result:
    run = ReferenceRun(case, wide, watch)
    loss, gradients = run.gradients([inputs], 0)
    returned = {str(Binding("output", name)): value for name, (value,) in run.returned.items()}
    return _Result(loss, gradients, {**run.buffers, **returned})
