"""Bounds: numbers at which an operator on activations changes its behaviour.

Data may never reach them: of `torch.where(y > 50, 0, y)` random numbers tell nothing. So what F and B compare
activations with, cut them off at or put in their place is held to be in the captured graph, a number or a tensor made
of constants alone; and F must have every bound that the captured graph has, as often as that has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from math import inf, isnan, nan

from ..analysis.dataflow import Question, follow
from ..layout.collectives import COLLECTIVES
from ..ops.precision import base_name
from ..ops.rules import facts, has_rule
from ..program.actions import FORWARD, work_kinds
from ..program.program import Fault, Function, Line, Program, default_numbers, numbers_in

_PLAIN: frozenset[Hashable] = frozenset({-inf, -1.0, 0.0, 1.0, inf})
"""Numbers with which derivatives and masks compare though no line of a model has them."""
_DATA: Hashable = None
"""The knowledge of a value that depends on data, not on constants alone."""


def check_bounds(programs: Mapping[str, Program], reference: Program) -> Iterator[Fault]:
    """Find bounds of activations in F and B that the captured graph does not have, and bounds that F lacks."""
    model, lines = _Bounds(reference), [line for function in reference.functions for line in function.lines]
    for function in reference.functions:
        model.follow(function, {})
    own = model.constants.union(*map(_numbers, lines), *(default_numbers(line.op).values() for line in lines))
    own = own.union(*model.at.values())
    saved: dict[str, Hashable] = {}
    for program in (programs[action] for action in work_kinds() if action in programs):
        bounds = _Bounds(program)
        saved |= bounds.follow(program.main, saved)
        # derivatives of a maximum ask which entries are no numbers
        known = own | _PLAIN if program.action == FORWARD else own | _PLAIN | {nan}
        for (name, results, op), numbers in bounds.at.items():
            # the derivative of an operator with bounds has that operator's, and without one none of it is needed
            if other := numbers - (known - ({-inf, inf} - own) if facts(op).backward else known):
                word = next((repr(number) for number in other if isinstance(number, float)), "a constant")
                message = f"{op} has {word}, which is no number of the captured graph"
                yield Fault("types", f"{program.action} {name}: {results}", message)
        if program.action == FORWARD:
            missing = model.times(reference.main) - bounds.times(program.main)
            for number in sorted(missing.keys() - _PLAIN - {nan}, key=str):
                yield Fault("types", FORWARD, f"has fewer bounds of {number!r} than the captured graph")


class _Bounds:
    """The bounds of activations in a program, by line. A bound is a number, or a description of how another constant is
    made."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.at: dict[tuple[str, str, str], frozenset[Hashable]] = {}
        self.constants: set[Hashable] = set()

    def follow(self, function: Function, saved: Mapping[str, Hashable]) -> dict[str, Hashable]:
        """Note the bounds of a main function and of the functions that it calls. Return what is known of the values
        that it saves."""
        parameters = [saved.get(value.name, _DATA) if value.kind == "saved" else _DATA for value in function.parameters]
        ends = zip(function.returns, follow(self.program, function, parameters, self._made), strict=True)
        return {key.name: constant for (key, _), constant in ends if key.kind == "saved"}

    def _made(self, function: str, question: Question, given: tuple[Hashable, ...]) -> list[Hashable]:
        line, row = question.line, facts(question.line.op)
        floats = any(type_.dtype.is_floating_point for type_ in question.operands)
        if _DATA in given and floats and (row.bounds or not (has_rule(line.op) or line.op in COLLECTIVES)):
            place = _place(function, line)
            # an operator without a rule may do anything with its numbers, of which whole ones may be sizes
            numbers = _numbers(line, float if not row.bounds else (float, int))
            numbers = numbers.union(row.limits, (constant for constant in given if constant is not _DATA))
            self.at[place] = self.at.get(place, frozenset()) | numbers
        # a number may stand in the place of a tensor that holds it alone
        alone = {constant for constant in given if isinstance(constant, float)}
        made: Hashable = (base_name(line.op), _numbers(line) | alone, tuple(c for c in given if c not in alone))
        if _DATA in given:
            made = _DATA
        elif row.creates:
            made = _number(row.number_in(line.args))
        elif given and (line.op in COLLECTIVES or row.keeps_values or row.casts):
            made = given[0]
        self.constants.add(made)
        return [made] * len(line.made)

    def times(self, function: Function) -> Counter[Hashable]:
        """Count how often a function meets each bound, also in the functions that it calls."""
        found: Counter[Hashable] = Counter()
        for line in function.lines:
            if line.calls_function:
                found += self.times(self.program.function(line.op))
            elif facts(line.op).bounds:
                found.update(self.at.get(_place(function.name, line), frozenset()))
        return found


def _place(function: str, line: Line) -> tuple[str, str, str]:
    return function, ", ".join(value.name for value in line.made), line.op


def _numbers(line: Line, kinds: type | tuple[type, ...] = (float, int)) -> frozenset[Hashable]:
    key = "numbers", kinds
    if key not in line.derived:
        numbers = numbers_in((line.args, dict(line.kwargs)))
        line.derived[key] = frozenset(_number(number) for number in numbers if isinstance(number, kinds))
    stored: frozenset[Hashable] = line.derived[key]
    return stored


def _number(number: float) -> float:
    """Return the number as a float. Every NaN becomes the same object, so that a set finds it again."""
    return nan if isnan(number) else float(number)
