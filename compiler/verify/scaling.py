"""The checker of the loss's scale: the loss and every gradient are multiplied by it exactly once, by the rules.

A step divides by the number of targets once, at its end. Each value has a degree: how often it was multiplied by that
scale. Whatever is linear keeps the degree, a product adds degrees, and what the table does not know has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan

from ..layout.collectives import COLLECTIVES
from ..ops.factors import OpCall
from ..ops.infer import rule_or_opaque
from ..ops.rules import facts
from ..program.actions import ACTIONS, SCALING
from ..program.binding import Kind
from ..program.faults import Fault
from ..program.program import Program, Ref
from .lines import Question, follow, line_call

Degree = float | None
"""The power of the loss's scale in a value: 1.0 if it is multiplied by it once. None is not known."""
_ZERO = float("inf")
"""The degree of zeros, which count as any degree."""
_GIVEN: Mapping[Kind, float] = {"count": -1.0, "scale": 1.0, "gradient": 1.0, "received": 1.0}
"""The degrees of a program's parameters by kind, where they are not 0."""
_MIXED = float("nan")
"""The degree of a sum whose parts have different degrees."""


def check_scaling(programs: Mapping[str, Program]) -> list[Fault]:
    """Find a scale that is not one over the count, and a loss or gradients that do not have it exactly once."""
    scale = programs[SCALING]
    scaled = [action for action in programs if "gradient" in ACTIONS[action].returns]
    faults = [fault for action in scaled for fault in scaled_once(programs[action], action)]
    return [*scaled_once(scale, SCALING), *faults] if scale.main.parameters else faults


def scaled_once(program: Program, where: str) -> list[Fault]:
    """Find returned values that do not have the scale exactly once; gradients that B receives from another stage have
    it already."""
    parameters = [_GIVEN.get(value.kind, 0.0) for value in program.main.parameters]
    returned = zip(program.main.returns, degrees(program, parameters), strict=True)
    return [
        Fault("types", f"{where} {key.key_in(program.action)}", f"has the loss's scale {_times(degree)}, not once")
        for (key, _), degree in returned
        if degree not in (1.0, None, _ZERO)
    ]


def _times(degree: float) -> str:
    return "more often in some parts than in others" if isnan(degree) else f"{degree:g} times"


def degrees(program: Program, given: Sequence[Degree]) -> list[Degree]:
    """Return the degrees of a program's results, from those of its parameters."""
    return follow(program, program.main, given, lambda _, line, operands: [_degree(line, operands)] * len(line.results))


def _degree(question: Question, operands: Sequence[Degree]) -> Degree:
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
