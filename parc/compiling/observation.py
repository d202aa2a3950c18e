"""The observation of a plan's model and loss: runs in eager torch that show what a captured graph cannot have. They are
run on the build that numbers are tested on; and, where a capture fails, to say why in the model's own terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from parc.compiler.capture.callables import load_callable
from parc.compiler.capture.faults import CaptureError
from parc.compiler.capture.model_calls import TaskLines, model_builder
from parc.compiler.capture.model_output import returned_tensors
from parc.compiler.capture.observer import (
    LARGEST_DRAWS,
    LEAST_DRAWS,
    PythonState,
    as_if_traced,
    code_undone,
    drawn_generators,
    fault_of,
    kept_draws,
    noting_packs,
    observing,
    own_backwards,
    python_draws,
    seed_draws,
    state_changes,
)
from parc.compiler.capture.writes import WeightLimits
from parc.compiler.initial.recipes import Recipe, initialize
from parc.compiler.plan.directive import Directive
from parc.compiler.plan.plan import Plan
from parc.grammar.codes import NO_FUNCTION, NUMBER_CHANGED, OWN_GRADIENT
from parc.grammar.diagnostics import Diagnostic, Label, PlanError, Severity
from parc.grammar.nearest import listed
from parc.runtime.compare.plain import PlainModule

_DRAWS = (LEAST_DRAWS, LARGEST_DRAWS, *range(8))
"""The draws of a forward that draws from Python or NumPy: the ends, and enough to see both sides of a coin."""
_SCALES = (1e-4, 1e4)
"""The factors of the loss with which the gradients of `autograd.Function`s are seen to be linear in it, or not."""
_SEED = 0x5EED
_ROUNDS = 1e-5
_CLIPS = 1e-2


@dataclass(frozen=True, slots=True)
class ObservedModel:
    """A plan's model with its loss, its initial values, and how it is called."""

    plan: Plan
    lines: TaskLines
    folder: Path
    overrides: Mapping[str, Any]
    recipes: Mapping[str, Recipe]
    frozen: frozenset[str] = frozenset()
    capacities: Mapping[str, float] | None = None
    evaluates: bool = False
    limits: Mapping[str, WeightLimits] = field(default_factory=dict)
    """The limits to which a forward of a training step clamps parameters."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The facts that were seen of a model which may be built."""

    functions: tuple[str, ...]
    """The `autograd.Function`s that it calls."""
    changed: tuple[str, ...]
    """The state in Python that every forward changes."""
    later: tuple[Tensor, ...] = ()
    """The tensors that the model returns for another batch after these forwards, and the loss, where these changed
    state in Python."""
    kept: tuple[str, ...] = ()
    """The state that they changed."""
    whole: bool = True
    """False where some state in Python cannot be compared."""

    @property
    def keeps(self) -> bool:
        """True where a forward may leave something in Python for the next one."""
        return bool(self.changed or self.kept) or not self.whole


def observe(
    subject: ObservedModel, inputs: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None
) -> Observation:
    """Observe forwards on one batch, and one on ``others``.

    Raises:
        PlanError: a build would compute something else than the model and its loss.
        CaptureError: they do what a graph does not have.
        Exception: the model fails.
    """
    with code_undone(subject.lines.sources, subject.folder):
        runs = _Runs(subject)
        with kept_draws(), runs.state.undone():
            return runs.observe(inputs, others)


class _Runs:
    """Runs of a subject's module. Buffers are as at first in each of them."""

    def __init__(self, subject: ObservedModel) -> None:
        self._subject = subject
        plan, lines, folder = subject.plan, subject.lines, subject.folder
        build = model_builder(lines, folder, subject.overrides)
        self._module = initialize(build, plan.seed, subject.recipes)
        if subject.evaluates:
            self._module.eval()
        self._plain = PlainModule(self._module, lines, folder, plan.seed, subject.frozen, subject.capacities or {})
        self._buffers = {name: v.clone() for name, v in self._module.named_buffers(remove_duplicate=False)}
        self.state = PythonState([self._module, *(load_callable(t, folder) for t in lines.sources[1:])], folder)

    def observe(self, inputs: Mapping[str, Tensor], others: Mapping[str, Tensor] | None) -> Observation:
        states = [self.state.take()]
        with noting_packs() as packs:
            first = self._observed(inputs)
        drawn = python_draws() != self._seeded
        states.append(self.state.take())
        if generators := drawn_generators(*states):
            message = f"the forward draws from {listed(generators)}, which the next step finds in another state"
            raise PlanError([no_function(self._subject.plan.model, message, "")])
        self._check_again(inputs, first, drawn)
        states.append(self.state.take())
        if functions := own_backwards(first[-1]):
            self._check_scales(inputs, functions)
        if packs and first[-1].requires_grad:
            self._check_packs(inputs, packs[0])
        kept = state_changes(states[0], states[2])
        if self._subject.limits and (kept or not self.state.whole):
            raise self._not_always(kept)
        later = self._forward(others) if others is not None and (kept or not self.state.whole) else ()
        changed = state_changes(states[1], states[2], tensors=False)
        return Observation(functions, changed, later, kept, self.state.whole)

    def _forward(self, inputs: Mapping[str, Tensor], draws: int = 0) -> tuple[Tensor, ...]:
        """Return the tensors that the model returns, and last the loss. torch's own draws are the same each time;
        ``draws`` seeds those of Python and NumPy."""
        for name, value in self._buffers.items():
            owner, _, leaf = name.rpartition(".")
            setattr(self._module.get_submodule(owner), leaf, value.clone())
        torch.default_generator.manual_seed(_SEED)
        seed_draws(draws)
        self._seeded = python_draws()
        output, terms = self._plain.forward({name: value.clone() for name, value in inputs.items()})
        leaves = tree_leaves(output) if terms else returned_tensors(output).values()
        loss = sum(terms[1:], terms[0]) if terms else torch.zeros(())
        return *(leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)), loss

    def _observed(self, inputs: Mapping[str, Tensor], draws: int = 0) -> tuple[Tensor, ...]:
        """Return what ``_forward`` does.

        Raises:
            CaptureError: the forward does what a graph does not have.
        """
        with observing(self._module, self._subject.limits) as faults:
            tensors = self._forward(inputs, draws)
        if faults:
            raise faults[0]
        return tensors

    def _not_always(self, kept: Sequence[str]) -> CaptureError:
        """Return the error of a clamp beside state in Python: another step may clamp otherwise, or not at all."""
        clamped = listed(sorted(self._subject.limits))
        other = "has state in Python that cannot be compared, an iterator or very many objects"
        left = f"leaves {listed(kept)} in Python" if kept else other
        message = f"the forward clamps {clamped} and {left}, by which a later step may not"
        help_ = "clamp to the same numbers in every step, and leave nothing in Python, or leave the clamp out"
        return CaptureError("written", message, help=help_)

    def _check_again(self, inputs: Mapping[str, Tensor], first: Sequence[Tensor], drawn: bool) -> None:
        """Check that the same comes out of further runs: as if traced, and with other draws of Python and NumPy.

        Raises:
            PlanError: something else comes out.
            CaptureError: tracing alone makes the difference.
        """
        try:
            with as_if_traced():
                traced = self._forward(inputs)
        except Exception:  # code for tracers may want what only these have
            traced = tuple(first)
        if not self._same(first, traced):
            again = self._observed(inputs)
            if self._same(first, again):
                numbers = (
                    f"the loss is {float(traced[-1].detach()):.6g} then, and {float(first[-1].detach()):.6g} otherwise"
                )
                raise fault_of("traced", numbers if self._subject.plan.trains else "it returns others")
            raise PlanError([self._no_function(first, again, "")])
        for seed in _DRAWS if drawn else ():
            other = self._observed(inputs, seed)
            if not self._same(first, other):
                raise PlanError([self._no_function(first, other, "it draws from Python's `random` or from NumPy's")])

    def _same(self, first: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
        if not self._subject.plan.trains:
            return len(first) == len(other) and all(map(_equal, first, other))
        return torch.allclose(other[-1], first[-1], rtol=_ROUNDS, atol=0, equal_nan=True)

    def _no_function(self, first: Sequence[Tensor], other: Sequence[Tensor], why: str) -> Diagnostic:
        of_model = len(first) != len(other) or not all(map(_equal, first[:-1], other[:-1]))
        plan = self._subject.plan
        line: Directive = plan.model if of_model or not plan.trains else plan.loss
        numbers = f"the loss is {float(first[-1].detach()):.6g}, but {float(other[-1].detach()):.6g}"
        message = numbers if plan.trains else "the model returns other numbers"
        message += " the next time, with the same inputs, weights and seeds of torch"
        return no_function(line, message, why)

    def _gradients(self, inputs: Mapping[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
        """Return the gradients of the loss, times ``scale`` and divided by it."""
        (self._forward(inputs)[-1] * scale).backward()
        return {name: gradient.double() / scale for name, gradient in self._plain.take_gradients().items()}

    def _check_packs(self, inputs: Mapping[str, Tensor], place: str) -> None:
        """Check that gradients are the same without hooks on what backward reads.

        Raises:
            CaptureError: they are not.
        """
        usual = self._gradients(inputs)
        with noting_packs(active=False):
            plain = self._gradients(inputs)
        for name, gradient in plain.items():
            if bool((gradient - usual[name]).norm() > _ROUNDS * gradient.norm()):
                raise fault_of("packed", "the forward", place)

    def _check_scales(self, inputs: Mapping[str, Tensor], functions: Sequence[str]) -> None:
        """Check that gradients are in proportion to the loss: a backward that clips is not its forward's derivative.

        Raises:
            PlanError: they are not.
        """

        usual = self._gradients(inputs)
        for scale in _SCALES:
            for name, gradient in self._gradients(inputs, scale).items():
                apart, size = (gradient - usual[name]).norm(), usual[name].norm()
                if bool(apart.isfinite()) and bool(apart > _CLIPS * size + 1e-30):
                    raise PlanError([own_gradient(self._subject.plan.model, functions)])


def check_later(plan: Plan, observed: Observation, expected: Tensor, tolerance: float) -> None:
    """Check that the loss of a later batch is that ``expected`` from the captured graph, which has only the state of
    buffers: with it, ``tolerance`` is ten times allowed.

    Raises:
        PlanError: it follows from what earlier forwards left in Python.
    """
    loss = observed.later[-1].detach()
    if not plan.trains or torch.allclose(loss.double(), expected.detach().double(), rtol=10 * tolerance, atol=0):
        return
    what = listed(observed.kept) if observed.kept else "an iterator"
    message = f"the loss of a batch is {float(loss):.6g} after another one, and {float(expected):.6g} without"
    raise PlanError([no_function(plan.model, message, f"the forward changes {what}, which programs do not have")])


def number_changed(plan: Plan, names: Sequence[str]) -> Diagnostic:
    """Return the warning of state in Python that each forward changes, though it changes no result that was seen."""
    message = f"the forward changes {listed(names)}, but programs keep the first value"
    help_ = "register a buffer if results depend on it: programs follow buffers from step to step"
    return Diagnostic(NUMBER_CHANGED, message, Label(plan.model.span), help=help_, severity=Severity.WARNING)


def _equal(first: Tensor, other: Tensor) -> bool:
    return first.shape == other.shape and torch.allclose(first, other, rtol=0, atol=0, equal_nan=True)


def no_function(line: Directive, message: str, why: str) -> Diagnostic:
    """Return the error of a result that is no function of inputs, parameters and buffers; ``why`` is a note."""
    help_ = (
        "draw with `torch.rand`, `torch.randn` or `torch.bernoulli`, or make the changing value an input or a buffer"
    )
    why = f"{why}:" if why else "does the code read Python's `random`, NumPy's, a counter or the clock?"
    notes = (f"{why} a build has one graph for all steps",)
    return Diagnostic(NO_FUNCTION, message, Label(line.arguments.statement.span), help=help_, notes=notes)


def own_gradient(model: Directive, functions: Sequence[str]) -> Diagnostic:
    """Return the error of `autograd.Function`s whose backward is not the derivative of their forward."""
    message = f"the model's gradients are not those of its forward: {listed(functions)} has its own backward"
    help_ = "write the forward so that its derivative is the gradient that you want, as in `x + (f(x) - x).detach()`"
    return Diagnostic(OWN_GRADIENT, message, Label(model.arguments.statement.span), help=help_)
