"""Numbers at all sizes that a plan declares: programs compute with the numbers that the captured graph computes with.

Shapes follow from one another, so each size in a type or an argument is proved by what it makes of the sizes before it
(``verify.sizes``). A factor, a divisor, a bound or an offset makes no shape: one that is right at the sizes that are
looked at may be anything between them. So it must be a number of the captured graph; or ``a * d + c``, where ``d`` is a
dim of a tensor that its line reads or makes, or the captured graph in that place of the model's code, a product of one
tensor's dims, or a difference of two dims: ``S/2-1`` in a variance's derivative, ``S-1`` where a slice ends. The right
number is of that form too, and two of that form that agree at the sizes that are looked at are one, unless these lie on
a line; then all but dims are refused.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import Any

from ..layout.collectives import COLLECTIVES
from ..layout.mesh import Shape
from ..program.binding import Binding, Kind
from ..program.program import REFERENCE_FILE, Function, Line, Program, numbers_in
from ..sizes.polynomials import Polynomial, Sizes, check_points, choices_of
from ..sizes.template import ShapeFault, Template

_MADE: tuple[Kind, ...] = ("saved", "received", "input", "buffer")
_AROUND = "aten.roll.default"
"""The operator that counts around (a roll): numbers that differ at all sizes looked at may still do the same."""
_ONE = Polynomial.of({(): Fraction(1)})


def number_faults(
    template: Template, programs: Mapping[str, Program], sizes: Sizes, numbers: Mapping[int, Polynomial]
) -> Iterator[ShapeFault]:
    """Find numbers in programs that the captured graph does not have, and that are not computed from sizes of their own
    line.

    ``programs`` are the template's at ``sizes`` at which each number stands for one expression, as ``numbers`` says.
    """
    reference = programs.get(REFERENCE_FILE)
    if reference is None:
        return
    held = _Held(template, reference, sizes, numbers)
    for file, program in programs.items():
        for function in program.functions if program is not reference else ():
            for line in function.lines:
                if line.op not in COLLECTIVES and not line.calls_function and (other := held.other(line, function)):
                    names = ", ".join(value.name for value in line.made)
                    message = f"{line.op} computes with {other}, which is no number of the captured graph"
                    yield ShapeFault(file, names, line.origin.module, line.origin.plan, message, divides=False)


@dataclass
class _Held:
    """The numbers that a line may have, by the captured graph and by its own sizes."""

    template: Template
    reference: Program
    sizes: Sizes
    numbers: Mapping[int, Polynomial]
    courses: dict[frozenset[Shape], frozenset[Polynomial]] = field(default_factory=dict)

    def other(self, line: Line, function: Function) -> str:
        """Return the first number of a line that it may not have, "" if there is none."""
        for number in numbers_in((line.args, dict(line.kwargs))):
            size, text = self.expression(number)
            if line.op == _AROUND:
                if number not in self.shifts and -number not in self.shifts:
                    return text or str(number)
            elif size is not None and not (
                {number, -number} & self.known or self.follows(number, size, line, function)
            ):
                return text
        return ""

    def expression(self, number: float) -> tuple[Polynomial | None, str]:
        """Return the polynomial that a number stands for, or divides by, and its text. The polynomial is None if the
        number stands for no size."""
        if isinstance(number, int):
            size = self.numbers.get(number)
            return (size if size is not None and size.names else None), str(size)
        return self.floats.get(number, (None, ""))

    @cached_property
    def floats(self) -> dict[float, tuple[Polynomial, str]]:
        """The floating numbers of the template by their value at the sizes."""
        kinds = [expression for expression in self.template.expressions() if expression.kind]
        return {float(expression.at(self.sizes)): (expression.size, str(expression)) for expression in kinds}

    @cached_property
    def known(self) -> set[float]:
        """The numbers of the captured graph."""
        lines = (line for function in self.reference.functions for line in function.lines)
        return {number for line in lines for number in numbers_in((line.args, dict(line.kwargs)))}

    @cached_property
    def shifts(self) -> set[float]:
        """The numbers of the captured graph's rolls."""
        lines = (line for function in self.reference.functions for line in function.lines if line.op == _AROUND)
        return {number for line in lines for number in numbers_in(line.args)}

    def follows(self, number: float, size: Polynomial, line: Line, function: Function) -> bool:
        """Return whether a number is the size of a dim of its line, or is computed from such sizes. At the sizes looked
        at, no other size of the line may give the same number."""
        own = _shapes(line, function)
        if any(number in shape for shape in own):
            return True
        return any(self.alone(size.course, shapes) for shapes in (own, own | self.shapes[_place(line)]))

    def alone(self, course: Polynomial, shapes: frozenset[Shape]) -> bool:
        """Return whether a course is one of the courses of these shapes, and differs from the others at the sizes
        looked at."""
        if shapes not in self.courses:
            self.courses[shapes] = frozenset(_courses([[*map(self.size, shape)] for shape in shapes]))
        every = self.courses[shapes]
        return course in every and (self.complete or all(self.apart(course, other) for other in every - {course}))

    @cached_property
    def shapes(self) -> Mapping[Any, frozenset[Shape]]:
        """The shapes that the captured graph's operators read and make, by the place in the model's code."""
        by_place: dict[Any, frozenset[Shape]] = defaultdict(frozenset)
        for function in self.reference.functions:
            for line in function.lines:
                by_place[_place(line)] |= _shapes(line, function)
        return by_place

    def size(self, number: int) -> Polynomial:
        return self.numbers.get(number) or Polynomial.of({(): Fraction(number)})

    @cached_property
    def points(self) -> list[dict[str, int]]:
        """The choices of sizes that are looked at."""
        return check_points(self.template.ranges)

    @cached_property
    def complete(self) -> bool:
        """True where every choice of sizes in the declared ranges is looked at."""
        return len(self.points) >= choices_of(self.template.ranges)

    def apart(self, one: Polynomial, other: Polynomial) -> bool:
        """Return whether, at the sizes looked at, no ``a * one + c`` equals a ``b * other + d`` except constants."""
        (x, y), *rest = [(one.at(point), other.at(point)) for point in self.points]
        return any((x1 - x) * (y2 - y) != (x2 - x) * (y1 - y) for (x1, y1), (x2, y2) in itertools.combinations(rest, 2))


def _shapes(line: Line, function: Function) -> frozenset[Shape]:
    """Return the shapes of a line's operands and results."""
    values = function.values()
    return frozenset({values[name].type.shape for name in line.uses} | {value.type.shape for value in line.made})


def _place(line: Line) -> tuple[str, str]:
    return line.origin.module, line.origin.source


def _courses(shapes: Sequence[Sequence[Polynomial]]) -> Iterator[Polynomial]:
    """Yield the courses of dims, of products of one tensor's dims, and of differences of dims."""
    moving = [[size for size in shape if size.names] for shape in shapes]
    for shape in moving:
        for count in range(1, len(shape) + 1):
            for chosen in itertools.combinations(shape, count):
                yield prod(chosen, start=_ONE).course
    for one, other in itertools.combinations(dict.fromkeys(itertools.chain(*moving)), 2):
        if (difference := one - other).names:
            yield difference.course


def binding_faults(programs: Mapping[str, Program]) -> Iterator[ShapeFault]:
    """Find parameters of programs whose sizes differ from those of the captured graph's inputs, or of the results that
    other programs make."""
    reference = programs.get(REFERENCE_FILE)
    if reference is None:
        return
    parameters = (value for function in reference.functions for value in function.parameters)
    shapes = {("", value.binding): value.type.shape for value in parameters}
    for program in programs.values():
        values = program.main.values()
        for key, name in program.main.returns:
            if key.kind == "saved":  # what a stage saves it reads itself
                shapes[program.role, key] = values[name].type.shape
            if key.kind == "sent":
                shapes[program.action, Binding("received", key.name)] = values[name].type.shape
    for file, program in programs.items():
        for value in program.main.parameters if program is not reference else ():
            places = (("", value.binding), (program.role, value.binding), (program.action, value.binding))
            sources = [shapes[place] for place in places if place in shapes]
            if value.kind in _MADE and sources[:1] != [value.type.shape]:
                message = f"`{value.binding}` has other sizes where it is made"
                yield ShapeFault(file, value.name, "", 0, message, divides=False)
