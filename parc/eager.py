"""The captured graph held once against the user's eager module: what every other check rests on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parc.compiler.recipes import initialize
from parc.compiler.task import caller, loss_function, model_builder
from parc.driver import Compiled
from parc.grammar.codes_build import NOT_FINITE
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.plan_capture import failure, input_specs
from parc.runtime.plain import counted_dropout
from parc.runtime.random_batch import random_batch
from parc.runtime.simulate import Case, ReferenceRun
from parc.runtime.simulate import wide as as_wide

TOLERANCE = 1e-4
"""Of float32 results: eager and captured run the same operators, but not always the same kernels."""
_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Of results through values that the model itself has in a narrow dtype."""


@dataclass(frozen=True, slots=True)
class EagerAgreement:
    """Relative differences of the loss and of all gradients together (by norm)."""

    loss: float
    gradient: float
    tolerance: float = TOLERANCE

    @property
    def holds(self) -> bool:
        """Whether the captured graph is the module's."""
        return self.loss <= self.tolerance and self.gradient <= min(10 * self.tolerance, 5e-2)


def compare_with_eager(compiled: Compiled, case: Case) -> EagerAgreement:
    """One microbatch of random data through the module as the user wrote it, and through the captured graph; in float64
    where float32 rounds too much to tell (batch statistics of few elements, layer upon layer)."""
    found = _compare(compiled, case, wide=False)
    return found if found.holds else min(found, _compare(compiled, case, wide=True), key=lambda a: a.loss + a.gradient)


def _compare(compiled: Compiled, case: Case, wide: bool) -> EagerAgreement:
    overrides = compiled.overrides
    module = initialize(model_builder(compiled.lines, compiled.folder, overrides), compiled.plan.seed)
    module = module.double() if wide else module
    call, loss_of = caller(module, compiled.lines), loss_function(compiled.lines, compiled.folder)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in compiled.frozen)
    (batch,) = random_batch(case.reference, 1, torch.Generator().manual_seed(0))
    specs = input_specs(compiled.plan)
    inputs = {
        name: batch[name].to(spec.dtype) if name in batch else torch.zeros(spec.shape, dtype=spec.dtype)
        for name, spec in specs.items()  # the graph has no input that nothing reads
    }
    if wide:
        inputs = {name: as_wide(value) for name, value in inputs.items()}
    try:
        with counted_dropout(module, compiled.plan.seed, 0, 0):
            eager = loss_of(call(module, inputs), inputs)
        eager.backward()
    except Exception as error:
        raise PlanError([failure(compiled.plan, error)]) from error
    expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    loss, gradients = ReferenceRun(case, wide).gradients([inputs], 0)
    difference = torch.stack([
        (gradients.get(name, torch.zeros_like(value)) - value).double().norm() for name, value in expected.items()
    ]).norm()  # fmt: skip
    whole = torch.stack([value.double().norm() for value in expected.values()]).norm()
    if not (eager.isfinite() and whole.isfinite()):
        what = "gradients are" if eager.isfinite() else "loss is"
        message = f"the model's {what} not finite on random inputs"
        help_ = "let it compute something finite of any numbers: clamp what a logarithm, a root or a division takes"
        raise PlanError([Diagnostic(NOT_FINITE, message, Label(compiled.plan.model.span), help=help_)])
    apart = (loss - eager.detach()).abs() / eager.detach().abs().clamp_min(1e-12)
    types = {value.type.dtype for function in case.reference.functions for value in function.values().values()}
    tolerance = max(_TOLERANCES.get(dtype, TOLERANCE) for dtype in types)
    return EagerAgreement(float(apart), float(difference / whole.clamp_min(1e-30)), tolerance)
