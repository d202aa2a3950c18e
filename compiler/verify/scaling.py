"""The checker of the loss's scales: the loss and every gradient are multiplied by one over the count exactly once, and
by the loss scale in backward once and in what LOSS and REDUCE return not at all.

A step divides by the number of targets once, at its end, and multiplies by the loss scale between SCALE and REDUCE, if
there is one. Each value has two degrees: how often it was multiplied by each of these. They are followed one after the
other. Whatever is linear keeps the degree, a product adds degrees, and what the table does not know has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isnan

from ..analysis.dataflow import Question, follow, line_call
from ..layout.collectives import COLLECTIVES
from ..ops.factors import OpCall
from ..ops.infer import rule_or_opaque
from ..ops.rules import facts
from ..program.actions import ACTIONS, AVERAGING, REDUCE, SCALING
from ..program.binding import COUNT, UNSCALE, Binding
from ..program.program import Fault, Program, Ref
from ..program.step_values import LOSS_SCALE, residual_of

Degree = float | None
"""The power of a scale in a value: 1.0 if it is multiplied by it once. None is not known."""
_ZERO = float("inf")
"""The degree of zeros, which count as any degree."""
_MIXED = float("nan")
"""The degree of a sum whose parts have different degrees."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """A scale of the loss: its words, and its degrees in a program's parameters by kind, where they are not 0: what is
    left of a gradient has a kind of its own, ``residual``."""

    words: str
    given: Mapping[str, float]

    def in_parameter(self, binding: Binding | None) -> float:
        """Return the degree in a program's parameter."""
        kind = "residual" if residual_of(binding) else binding.kind if binding is not None else ""
        return self.given.get(kind, 0.0)

    def wanted(self, program: Program, key: Binding) -> float:
        """Return the degree that a result must have."""
        if self is _COUNT_SCALE:
            divides = COUNT in program.main.bindings or program.action != SCALING
            return 1.0 if divides and key != UNSCALE else 0.0
        return -1.0 if key == UNSCALE else 0.0 if program.action in (AVERAGING, REDUCE) else 1.0


_COUNT_SCALE = _Scale(
    "the loss's scale", {"count": -1.0, "scale": 1.0, "gradient": 1.0, "residual": 1.0, "received": 1.0}
)
_LOSS_SCALE = _Scale("the loss scale", {"state": 1.0, "scale": 1.0, "unscale": -1.0, "gradient": 1.0, "received": 1.0})


def check_scaling(programs: Mapping[str, Program]) -> list[Fault]:
    """Find a scale that is not one over the count times the loss scale, and a loss or gradients that do not have each
    exactly as often as they should."""
    scaled = [SCALING, *(action for action in programs if action == AVERAGING or "gradient" in ACTIONS[action].returns)]
    loss_scaled = LOSS_SCALE in programs[SCALING].main.bindings
    return [fault for action in scaled for fault in scaled_once(programs[action], action, loss_scaled)]


def scaled_once(program: Program, where: str, loss_scaled: bool) -> list[Fault]:
    """Find returned values that do not have one of the scales as often as they should; gradients that B receives from
    another stage have both already."""
    faults = []
    for scale in (_COUNT_SCALE, _LOSS_SCALE) if loss_scaled else (_COUNT_SCALE,):
        parameters = [scale.in_parameter(value.binding) for value in program.main.parameters]
        for (key, _), degree in zip(program.main.returns, degrees(program, parameters), strict=True):
            wanted = scale.wanted(program, key)
            if degree not in (wanted, None, _ZERO) and key.kind != "term":  # `reduce` proves the weight of a term whole
                has = f"has {scale.words} {_times(degree)}, not {'once' if wanted == 1 else f'{wanted:g} times'}"
                faults.append(Fault("types", f"{where} {key.key_in(program.action)}", has))
    return faults


def _times(degree: float) -> str:
    return "more often in some parts than in others" if isnan(degree) else f"{degree:g} times"


def degrees(program: Program, given: Sequence[Degree]) -> list[Degree]:
    """Return the degrees of a program's results, from those of its parameters."""
    return follow(program, program.main, given, lambda _, line, operands: [_degree(line, operands)] * len(line.results))


@lru_cache(maxsize=8192)
def _degree(question: Question, operands: tuple[Degree, ...]) -> Degree:
    line, row = question.line, facts(question.line.op)
    known = [degree for degree in operands if degree is not None]
    if len(known) != len(operands):
        return None
    if row.makes_zeros(line.args):
        return _ZERO
    if all(degree == 0.0 for degree in known):
        return 0.0
    if line.op in COLLECTIVES:
        return known[0]
    if row.power is not None:
        return known[0] * row.power
    if line.op == "aten.pow.Tensor_Scalar":
        return known[0] * float(line.args[1])
    if row.computes == "ratio" and isinstance(line.args[1], Ref):
        return known[0] - known[1]
    return _by_rule(line_call(line, question.operands, question.results, lambda item: item.size), known)


def _by_rule(call: OpCall, known: Sequence[float]) -> Degree:
    """Return the degree of a result by the rule. If the operator is linear in its scaled operands together, it is their
    degree; if it is linear in each of them, it is the sum of their degrees."""
    scaled = {index for index, degree in enumerate(known) if degree != 0.0}
    linear = rule_or_opaque(call).linear
    for joint in linear:
        degrees = {known[index] for index in joint} - {_ZERO}
        if scaled <= joint and len(degrees) <= 1:
            return next(iter(degrees), _ZERO)
        if scaled <= joint and 0.0 not in degrees:
            return _MIXED
    if all(frozenset({index}) in linear for index in scaled):
        return sum(known[index] for index in scaled)  # of zeros and anything else: zeros
    return None
