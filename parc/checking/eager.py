"""The comparison of the captured graph with the user's eager module, on which every other check rests."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from parc.checking.module_numbers import ModuleAgreement, compare_module
from parc.checking.probes import ProbeBatches
from parc.compiler.capture.experts.forms import own_forms
from parc.compiler.capture.model_calls import model_builder
from parc.compiler.capture.model_output import returned_tensors
from parc.compiler.initial.recipes import initialize
from parc.compiler.plan.directive import Directive
from parc.compiler.program.actions import FORWARD
from parc.compiling.compiled import Compiled
from parc.compiling.plan_capture import failure
from parc.grammar.codes import AMPLIFIED, NEAR_TIE, NO_FUNCTION, NOT_FINITE, OTHER_FORM, OTHER_NUMBERS, OWN_GRADIENT
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.grammar.nearest import listed
from parc.runtime.compare.agreement import DRAWS
from parc.runtime.compare.model_run import Case, ReferenceRun
from parc.runtime.compare.plain import PlainModule
from parc.runtime.ranks.faults import Watcher

CLAMP = "keep it finite for such data: clamp the argument of a logarithm, a root or a division"
_COINS = 8
"""The number of further runs of a forward that draws from Python or NumPy: enough to see both sides of a coin."""


def compare_with_eager(compiled: Compiled, case: Case) -> ModuleAgreement:
    """Compare the module as the user wrote it with the captured graph (``compare_module``).

    Raises:
        PlanError: the module fails, its numbers are not finite or not the same each time, or its gradients are not
            those of its forward.
    """
    batches = ProbeBatches(compiled, case)
    for seed in range(DRAWS):
        inputs = batches.batch(2 * seed)
        try:
            eager = _eager(compiled, inputs)
        except Exception as error:
            raise PlanError([failure(compiled.plan, error)]) from error
        if fault := _run_fault(compiled, case, inputs, eager):
            raise PlanError([fault])
        agreement = compare_module(compiled, case, batches, seed)
        if agreement.holds or not agreement.tied:
            break
    if eager.functions and agreement.differences and {d.key.kind for d in agreement.differences} == {"gradient"}:
        raise PlanError([_own_gradient(compiled.plan.model, eager.functions)])
    if not agreement.holds and (forms := own_forms(compiled.recorded.module)):
        raise PlanError([_other_form(compiled.plan.model, forms, agreement)])
    return agreement


@dataclass(frozen=True, slots=True)
class _Result:
    """The numbers of one run, of the captured graph or of the eager module."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    output: tuple[torch.Tensor, ...] = ()
    """The output of the eager module."""
    again: tuple[tuple[torch.Tensor, ...], ...] = ()
    """Its outputs and losses in further runs in float32."""
    functions: tuple[str, ...] = ()
    """The `autograd.Function`s that it calls."""


def _eager(compiled: Compiled, inputs: Mapping[str, torch.Tensor]) -> _Result:
    build = model_builder(compiled.lines, compiled.folder, compiled.overrides)
    module = initialize(build, compiled.plan.seed, compiled.recorded.recipes)
    if compiled.request.purpose != "training":
        module.eval()
    layers = compiled.request.placing.experts.items()
    capacities = {path: layer.capacity for path, layer in layers if layer.capacity is not None}
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

    def once_more(seed: int) -> tuple[torch.Tensor, ...]:
        """Run the forward again, with other random numbers in Python and NumPy."""
        for name, value in buffers.items():
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, value.clone())
        random.seed(seed)
        numpy.random.seed(seed)
        return forward()

    before = _python_draws()
    *output, loss = forward()
    others = _COINS if _python_draws() != before else 1
    functions = _own_backwards(loss)
    if loss.requires_grad:
        loss.backward()
    gradients = plain.take_gradients()
    states = random.getstate(), numpy.random.get_state()
    try:
        again = tuple(map(once_more, range(others)))
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
    return _Result(loss.detach(), gradients, tuple(output), again, functions)


def _own_backwards(loss: torch.Tensor) -> tuple[str, ...]:
    """Return the names of the `autograd.Function`s behind a loss, which define a backward of their own."""
    seen, pending = set[Any](), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [of for of, _ in node.next_functions]
    nodes: Any = (node for node in seen if isinstance(node, BackwardCFunction))
    return tuple(sorted({node._forward_cls.__qualname__ for node in nodes}))


def _python_draws() -> tuple[Any, ...]:
    """Return the states of Python's and NumPy's random numbers, which torch's seeds do not govern."""
    state: Any = numpy.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]


def _run_fault(compiled: Compiled, case: Case, inputs: Mapping[str, torch.Tensor], eager: _Result) -> Diagnostic | None:
    """Return the fault of an eager module that is not finite or not the same each time, or None."""
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

    def same(output: Sequence[torch.Tensor]) -> bool:
        return bool(output) and len(output) == len(eager.output) and all(map(torch.equal, output, eager.output))

    others = [other for other in eager.again if not torch.allclose(other[-1], eager.loss, rtol=1e-5, atol=0)]
    others += [other for other in eager.again if lossless and not same(other[:-1])]
    if not others:
        return None
    *output, loss = others[0]
    line = compiled.plan.loss if same(output) else compiled.plan.model
    other = "the model returns other numbers" if lossless else f"the loss is {eager.loss:.6g}, but {loss:.6g}"
    message = f"{other} the next time, with the same inputs, weights and seeds of torch"
    help_ = "draw with `torch.rand`, `torch.randn` or `torch.bernoulli`, or make the changing value an input"
    notes = (
        "does the code read Python's `random`, NumPy's, a counter or the clock? a build has one graph for all steps",
    )
    return Diagnostic(NO_FUNCTION, message, Label(line.arguments.statement.span), help=help_, notes=notes)


def _own_gradient(model: Directive, functions: Sequence[str]) -> Diagnostic:
    message = f"the model's gradients are not those of its forward: {listed(functions)} has its own backward"
    help_ = "write the forward so that its derivative is the gradient that you want, as in `x + (f(x) - x).detach()`"
    return Diagnostic(OWN_GRADIENT, message, Label(model.arguments.statement.span), help=help_)


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
