"""Bounds: numbers at which an operator on activations changes its behaviour.

Data may never reach them: of `torch.where(y > 50, 0, y)` random numbers tell nothing. So what F and B compare
activations with, cut them off at or put in their place is held to be in the captured graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf, isnan

from ..ops.rules import facts
from ..program.actions import work_kinds
from ..program.faults import Fault
from ..program.program import Line, Program, default_numbers, numbers_in

_NAN = float("nan")
"""The one object that stands for any NaN, so that a set finds it again."""
_PLAIN = {-inf, -1.0, 0.0, 1.0, inf}
"""Numbers with which derivatives and masks compare though no line of a model has them."""


def check_bounds(programs: Mapping[str, Program], reference: Program) -> Iterator[Fault]:
    """Find bounds of activations in F and B that the captured graph does not have."""
    lines = [line for function in reference.functions for line in function.lines]
    known = _PLAIN.union(*map(_numbers, lines), *(default_numbers(line.op).values() for line in lines))
    known = known.union(*(facts(line.op).limits for line in lines))
    for program in (programs[action] for action in work_kinds() if action in programs):
        for function in program.functions:
            values = function.values()
            for line in function.lines:
                floats = any(values[name].type.dtype.is_floating_point for name in line.uses())
                if facts(line.op).bounds and floats and (other := _numbers(line) - known):
                    where = f"{program.action} {function.name}: {', '.join(value.name for value in line.made)}"
                    message = f"{line.op} has {min(other)!r}, which is no number of the captured graph"
                    yield Fault("types", where, message)


def _numbers(line: Line) -> set[float]:
    numbers = map(float, numbers_in((line.args, dict(line.kwargs))))
    return {_NAN if isnan(number) else number for number in numbers}
