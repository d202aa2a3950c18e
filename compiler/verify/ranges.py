"""Shapes and numbers of programs, proved at all sizes that a plan declares.

Shapes: operators run on tensors whose sizes are sympy expressions, and the shape of each result must be, as an
expression, the one that the program declares, on every branch that torch takes at some sizes (one of several kernels, a
slice that is cut short).

Numbers: shapes follow from one another, so each size in a type or an argument is proved by the shape that it gives. A
factor, a divisor, a bound or an offset gives no shape: one that is right at the sizes looked at may be anything between
them. So it must be a number of the captured graph; or ``a * d + c``, where ``d`` is a dim of a tensor that its
line reads or makes, or the captured graph in that place of the model's code, a product of one tensor's dims, or a
difference of two dims: ``S/2-1`` in a variance's derivative, ``S-1`` where a slice ends. The right number has that form
too, and two of that form that agree at the sizes that are looked at are one, unless these lie on a line; then all but
dims are refused.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, partial
from math import prod
from typing import Any

import sympy
import torch

from ..analysis.dataflow import Question, line_call, questions
from ..layout.collectives import COLLECTIVES
from ..layout.mesh import Mesh, Shape
from ..layout.placement import TensorType
from ..ops.factors import fill_operands
from ..program.binding import Binding, Kind
from ..program.plain import without_rings
from ..program.program import REFERENCE_FILE, Function, Line, LocalSize, Program, numbers_in, operator
from ..program.text import parse_program
from ..sizes.polynomials import Polynomial, Sizes, check_points, choices_of
from ..sizes.template import ShapeFault, Template
from ..torch_private import SymbolicSizes
from .lines import call_faults, collective_faults, forms_of

_SHAPED_ELSEWHERE: tuple[Kind, ...] = ("saved", "received", "input", "buffer")
"""The kinds of parameters whose shape the captured graph or another program determines."""
_ROLL = "aten.roll.default"
"""The operator that counts modulo a size: numbers that differ at all sizes looked at may still do the same."""
_CONSTANT_ONE = Polynomial.of({(): Fraction(1)})
_MOST_CHOICES = 1 << 20
_MOST_BRANCHES = 16
_INTEGER = re.compile(r"-?\d+")
_SYMBOLIC = ("aten.", "parc.")
"""The libraries whose operators run on symbolic sizes. Those of others are run at a few sizes, as all are."""
_EXACT = {"Mod": sympy.Mod, "PythonMod": sympy.Mod, "FloorDiv": lambda a, b: sympy.floor(a / b)}
"""Functions of sizes in sympy that replace torch's, because sympy knows more about its own."""


def size_faults(template: Template, mesh: Mesh) -> list[ShapeFault]:
    """Find shapes that differ from the declared ones at some sizes, and numbers that the captured graph does not have.
    The template's numbers must be whole everywhere (``Template.faults``)."""
    sizes, numbers = _distinguishing_sizes(template, mesh)
    proof = _Proof(template, numbers)
    programs = {file: without_rings(parse_program(text, file)) for file, text in template.at(sizes).items()}
    by_number = (*_number_faults(template, programs, sizes, numbers), *binding_faults(programs))
    faults = {fault.message: fault for fault in by_number}
    for file, program in programs.items():
        for line, message in proof.faults(program):
            faults.setdefault(message, _line_fault(file, line, message))
    return list(faults.values())


def _line_fault(file: str, line: Line, message: str) -> ShapeFault:
    return ShapeFault(file, line.names, line.origin.module, line.origin.plan, message, divides=False)


def _distinguishing_sizes(template: Template, mesh: Mesh) -> tuple[dict[str, int], dict[int, Polynomial]]:
    """Return sizes, declared or not, at which each number of the programs stands for one expression; and the expression
    of each."""
    expressions = {expression.size for expression in template.expressions() if not expression.kind}
    fixed = {int(number) for text in template.texts.values() for number in _INTEGER.findall(text)}
    # at multiples of these all are whole, and so are their parts
    below = mesh.world * math.lcm(*(factor.denominator for size in expressions for _, factor in size.terms))
    for first in itertools.count(1000, 1000):
        ranges = enumerate(template.ranges.items())
        sizes = {name: size.step * below * int(sympy.prime(first + place)) for place, (name, size) in ranges}
        numbers = {int(size.at(sizes)): size for size in expressions}
        if len(numbers) == len(expressions) and fixed.isdisjoint(numbers):
            break
    return sizes, numbers


# ---- numbers


def _number_faults(
    template: Template, programs: Mapping[str, Program], sizes: Sizes, numbers: Mapping[int, Polynomial]
) -> Iterator[ShapeFault]:
    """Find numbers in programs that the captured graph does not have, and that are not computed from sizes of their own
    line.

    ``programs`` are the template's at ``sizes`` at which each number stands for one expression, as ``numbers`` says.
    """
    reference = programs.get(REFERENCE_FILE)
    if reference is None:
        return
    allowed = _AllowedNumbers(template, reference, sizes, numbers)
    for file, program in programs.items():
        for function in program.functions if program is not reference else ():
            for line in function.lines:
                computes = line.op not in COLLECTIVES and not line.calls_function
                if computes and (bad := allowed.first_bad(line, function)):
                    message = f"{line.op} computes with {bad}, which is no number of the captured graph"
                    yield _line_fault(file, line, message)


@dataclass
class _AllowedNumbers:
    """The numbers that a line may have, by the captured graph and by its own sizes."""

    template: Template
    reference: Program
    sizes: Sizes
    numbers: Mapping[int, Polynomial]
    courses: dict[frozenset[Shape], frozenset[Polynomial]] = field(default_factory=dict)

    def first_bad(self, line: Line, function: Function) -> str:
        """Return the first number of a line that it may not have, "" if there is none."""
        for number in numbers_in((line.args, dict(line.kwargs))):
            size, text = self.expression(number)
            if line.op == _ROLL:
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
        lines = (line for function in self.reference.functions for line in function.lines if line.op == _ROLL)
        return {number for line in lines for number in numbers_in(line.args)}

    def follows(self, number: float, size: Polynomial, line: Line, function: Function) -> bool:
        """Return whether a number is the size of a dim of its line, or is computed from such sizes. At the sizes looked
        at, no other size of the line may give the same number."""
        of_line = _shapes(line, function)
        if any(number in shape for shape in of_line):
            return True
        with_model = of_line | self.shapes[_code_place(line)]
        return any(self.alone(size.course, shapes) for shapes in (of_line, with_model))

    def alone(self, course: Polynomial, shapes: frozenset[Shape]) -> bool:
        """Return whether a course is one of these shapes', and differs from their others at the sizes looked at."""
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
                by_place[_code_place(line)] |= _shapes(line, function)
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


def _code_place(line: Line) -> tuple[str, str]:
    return line.origin.module, line.origin.source


def _courses(shapes: Sequence[Sequence[Polynomial]]) -> Iterator[Polynomial]:
    """Yield the courses (polynomials without constant factor and summand) of dims, of products of one tensor's dims,
    and of differences of dims."""
    moving = [[size for size in shape if size.names] for shape in shapes]
    for shape in moving:
        for count in range(1, len(shape) + 1):
            for chosen in itertools.combinations(shape, count):
                yield prod(chosen, start=_CONSTANT_ONE).course
    for one, other in itertools.combinations(dict.fromkeys(itertools.chain(*moving)), 2):
        if (difference := one - other).names:
            yield difference.course


def binding_faults(programs: Mapping[str, Program]) -> Iterator[ShapeFault]:
    """Find parameters of programs whose shapes differ from those of the captured graph's inputs, or of the results that
    other programs return."""
    reference = programs.get(REFERENCE_FILE)
    if reference is None:
        return
    parameters = (value for function in reference.functions for value in function.parameters)
    shapes = {("", value.binding): value.type.shape for value in parameters}
    for program in programs.values():
        values = program.main.values()
        for key, name in program.main.returns:
            if key.kind == "saved":  # its own stage reads it
                shapes[program.role, key] = values[name].type.shape
            if key.kind == "sent":
                shapes[program.action, Binding("received", key.name)] = values[name].type.shape
    for file, program in programs.items():
        for value in program.main.parameters if program is not reference else ():
            places = (("", value.binding), (program.role, value.binding), (program.action, value.binding))
            sources = [shapes[place] for place in places if place in shapes]
            if value.kind in _SHAPED_ELSEWHERE and sources[:1] != [value.type.shape]:
                message = f"`{value.binding}` has other sizes where it is made"
                yield ShapeFault(file, value.name, "", 0, message, divides=False)


# ---- shapes


_PROVED: dict[Any, str] = {}
"""The faults ("" for none) of lines that were checked before, by the line, the expressions of its numbers, and the
sizes' ranges: templates that are nearly the same, as a build's and its twin's, need the same proofs."""
_MOST_PROVED = 1 << 14


class _Proof:
    """The check of programs' lines at generic sizes. Equal lines are checked once. ``numbers`` are the expressions that
    numbers stand for."""

    def __init__(self, template: Template, numbers: Mapping[int, Polynomial]) -> None:
        self.ranges, self.numbers = template.ranges, numbers
        self.steps = {name: (size.low // size.step, size.high // size.step) for name, size in self.ranges.items()}
        self.read: set[str] = set()
        """The sizes that the present line depends on."""
        self.spare: SymbolicSizes | None = None
        """Symbolic sizes of which no line has assumed anything, so that the next line may use them again."""

    def faults(self, program: Program) -> Iterator[tuple[Line, str]]:
        """Yield the lines that have a fault, with it."""
        called = {function.name: function for function in program.functions}
        for function in program.functions:
            for line, question in questions(function, program.mesh):
                if question is None:
                    faults = call_faults(line, function.values(), called[line.op])
                    wrong = next((message for _, message in faults), "")
                else:
                    key = self.key(question)
                    if key not in _PROVED:
                        if len(_PROVED) >= _MOST_PROVED:
                            _PROVED.clear()
                        _PROVED[key] = self.wrong(question)
                    wrong = _PROVED[key]
                if wrong:
                    yield line, wrong

    def key(self, q: Question) -> Any:
        """Return all that a line's proof depends on."""
        types = (type_.text(q.mesh) for type_ in (*q.operands, *q.results))  # with the parts of joined dims
        read = {int(number) for text in (q.text, *types) for number in _INTEGER.findall(text)}
        read.update(size for type_ in (*q.operands, *q.results) for size in type_.shape)
        named = tuple((number, self.numbers[number]) for number in sorted(read) if number in self.numbers)
        return q, named, tuple(self.ranges.items())

    def wrong(self, q: Question) -> str:
        """Return the fault of a line, or "" if it has none. A collective is not run: at these sizes equal numbers are
        equal expressions, so its types are compared as they are."""
        if q.line.op in COLLECTIVES:
            return next((message for _, message in collective_faults(q)), "")
        if not q.line.op.startswith(_SYMBOLIC):
            return ""
        split = "/" in q.text or any(type_.placement.split_axes() for type_ in (*q.operands, *q.results))
        return self.wrong_on(q, False) or (self.wrong_on(q, True) if split else "")

    def wrong_on(self, q: Question, local: bool) -> str:
        """Return the fault of a line on whole shapes or, if ``local``, on one rank's shapes. An operator may take
        different branches at different sizes: it is run once for each branch, which proves all sizes of that branch.
        ``left`` are the choices of sizes that no run has proved yet."""
        op, mesh, left = q.line.op, q.mesh, None
        self.read = set()
        for _ in range(_MOST_BRANCHES):
            at: dict[str, int] = dict(zip(sorted(self.read), left[0], strict=True)) if left else {}
            self.symbolic = self.sizes_at(at)
            wanted = [None if type_ is None else self.shape(type_, mesh, local) for type_ in q.declared]
            shapes = [[self.size(size) for size in self.shape(type_, mesh, local)] for type_ in q.operands]
            cut = partial(self.cut, mesh, local)
            call = line_call(q.line, q.operands, q.results, cut, lambda number: self.size(self.expression(number)))
            try:
                with self.symbolic.mode():
                    tensors = [torch.empty(s, dtype=type_.dtype) for s, type_ in zip(shapes, q.operands, strict=True)]
                    results = operator(op)(
                        *fill_operands(call.args, tensors), **fill_operands(dict(call.kwargs), tensors)
                    )
                result_shapes = [
                    None if x is None else list(map(self.symbolic.expression, x[1])) for x in forms_of(results)
                ]
            except Exception as problem:  # whatever an operator raises for operands that it does not take
                reason = str(problem).strip() or type(problem).__name__
                return f"{op} does not take all sizes: {self.named(reason.splitlines()[0])}"
            if [shape and len(shape) for shape in result_shapes] != [shape and len(shape) for shape in wanted]:
                return f"{op} makes {self.texts(result_shapes)}, not {self.texts(wanted)}"
            pairs = zip(*(itertools.chain(*filter(None, side)) for side in (result_shapes, wanted)), strict=True)
            same = [form for pair in pairs if (form := _exact(sympy.Eq(*pair))) != sympy.true]
            assumed = self.symbolic.assumed()
            branch = [form for guard in assumed if (form := _exact(guard)) != sympy.true]
            if not same and not branch:
                self.spare = None if at or assumed else self.symbolic
                return ""
            names = sorted(self.read)
            if left is None:
                every = [range(low, high + 1) for low, high in map(self.steps.__getitem__, names)]
                if math.prod(map(len, every)) > _MOST_CHOICES:
                    return f"{op} is not proved to make {self.texts(wanted)}: there are too many sizes to try them all"
                left = [*itertools.product(*every)]
            symbols = [self.symbolic.symbols[name] for name in names]
            taken, holds = (sympy.lambdify(symbols, sympy.And(*forms), "math") for forms in (branch, same))
            if not all(holds(*choice) for choice in left if taken(*choice)):
                return f"{op} makes {self.texts(result_shapes)}, not {self.texts(wanted)}"
            left = [choice for choice in left if not taken(*choice)]
            if not left:
                return ""
        return f"{op} goes more than {_MOST_BRANCHES} ways at different sizes"

    # ---- numbers as expressions, in steps of the sizes

    def sizes_at(self, at: Mapping[str, int]) -> SymbolicSizes:
        """Return symbolic sizes within their bounds; where an operator asks for a number they are those of the choice
        ``at``, or the largest."""
        spare, self.spare = self.spare, None
        if spare is not None and not at:
            return spare
        return SymbolicSizes({name: (low, at.get(name, high), high) for name, (low, high) in self.steps.items()})

    def expression(self, number: int) -> sympy.Expr:
        """Return the expression in the plan's sizes that a number of the program stands for."""
        size = self.numbers.get(number)
        if size is None:
            return sympy.Integer(number)
        self.read |= size.names
        terms = (
            sympy.Rational(factor.numerator, factor.denominator)
            * math.prod((self.ranges[name].step * self.symbolic.symbols[name]) ** power for name, power in monomial)
            for monomial, factor in size.terms
        )
        return sympy.Add(*terms)

    def cut(self, mesh: Mesh, local: bool, cut: LocalSize) -> Any:
        """Return a size in an argument as a number: that of the whole tensor, or that of a rank."""
        return self.size(self.expression(cut.size) / (math.prod(map(mesh.size, cut.axes)) if local else 1))

    def shape(self, type_: TensorType, mesh: Mesh, local: bool) -> list[sympy.Expr]:
        """Return the dims of a value, whose text gives them as sums of products such as ``(2 {S}/tp + 64/tp)``."""
        dims = re.findall(r"[^\[\],]+", type_.text(mesh).partition("[")[2].rpartition("]")[0])
        return [sympy.Add(*(self.product(part, mesh, local) for part in dim.strip(" ()").split(" + "))) for dim in dims]

    def product(self, text: str, mesh: Mesh, local: bool) -> sympy.Expr:
        """Return one product in the text of a dim, or a rank's part of it."""
        length = sympy.Integer(1)
        for number, axes in re.findall(r"(-?\d+)((?:/~?\w+)*)", text):
            parts = math.prod(mesh.size(axis) for name in axes.split("/")[1:] for axis in mesh.parts(name.lstrip("~")))
            length *= self.expression(int(number)) / (parts if local else 1)
        return length

    def size(self, expression: sympy.Expr) -> Any:
        """Return an expression as a number, or as the symbolic number that torch takes for one."""
        return self.symbolic.size(expression) if expression.free_symbols else int(expression)

    def texts(self, shapes: Sequence[list[sympy.Expr] | None]) -> str:
        """Return shapes as text in the names of the sizes."""
        names = {symbol: sympy.Symbol(name) / self.ranges[name].step for name, symbol in self.symbolic.symbols.items()}
        return "; ".join(
            "-" if shape is None else f"[{', '.join(str(size.subs(names)) for size in shape)}]" for shape in shapes
        )

    def named(self, text: str) -> str:
        """Return torch's message with the names of the sizes."""
        for name, symbol in self.symbolic.symbols.items():
            step = self.ranges[name].step
            text = text.replace(str(symbol), name if step == 1 else f"({name}/{step})")
        return text


def _exact(condition: sympy.Basic) -> sympy.Basic:
    """Return a condition in sympy's own functions, simplified."""
    exact = condition.replace(lambda e: type(e).__name__ in _EXACT, lambda e: _EXACT[type(e).__name__](*e.args))
    return sympy.Eq(sympy.expand(exact.lhs - exact.rhs), 0) if isinstance(exact, sympy.Eq) else exact
