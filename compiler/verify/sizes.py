"""Shapes proved at all sizes that a plan declares: operators run on tensors whose sizes are sympy expressions.

What a line makes must be, as an expression, what the program says, by whatever way torch goes at some sizes (one of
several kernels, a slice that is cut short).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import sympy
import torch

from ..analysis.dataflow import Question, line_call, questions
from ..layout.collectives import COLLECTIVES
from ..layout.mesh import Mesh
from ..layout.placement import TensorType
from ..ops.factors import fill_operands
from ..program.plain import without_rings
from ..program.program import Line, LocalSize, Program, operator
from ..program.text import parse_program
from ..sizes.polynomials import Polynomial
from ..sizes.template import ShapeFault, Template
from ..torch_private import SymbolicSizes
from .lines import call_faults, collective_faults, forms_of
from .numbers import binding_faults, number_faults

_MOST_CHOICES = 1 << 20
_MOST_WAYS = 16
_INTEGER = re.compile(r"-?\d+")
_OWN = ("aten.", "parc.")
_EXACT = {"Mod": sympy.Mod, "PythonMod": sympy.Mod, "FloorDiv": lambda a, b: sympy.floor(a / b)}
"""Functions of sizes in sympy that replace torch's, because sympy knows more about its own."""


def size_faults(template: Template, mesh: Mesh) -> list[ShapeFault]:
    """Find shapes that differ from the declared ones at some sizes, and numbers that the captured graph does not have.
    The template's numbers must be whole everywhere (``Template.faults``).

    Operators of other libraries, whose shape functions may take no expressions, are held at a few sizes, as all are.
    """
    sizes, numbers = _generic(template, mesh)
    proof = _Proof(template, numbers)
    programs = {file: without_rings(parse_program(text, file)) for file, text in template.at(sizes).items()}
    found = (*number_faults(template, programs, sizes, numbers), *binding_faults(programs))
    faults = {fault.message: fault for fault in found}
    for file, program in programs.items():
        for line, message in proof.faults(program):
            names = ", ".join(value.name for value in line.made)
            fault = ShapeFault(file, names, line.origin.module, line.origin.plan, message, divides=False)
            faults.setdefault(message, fault)
    return list(faults.values())


def _generic(template: Template, mesh: Mesh) -> tuple[dict[str, int], dict[int, Polynomial]]:
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


_PROVED: dict[Any, str] = {}
"""The faults ("" for none) of lines that were checked before, by the line, the expressions of its numbers, and the
sizes' ranges. Templates that are nearly the same, as a build's and its twin's, need the same proofs."""
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
        """Symbolic sizes of which the lines before assumed nothing, so that the next line may have them too."""

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
        types = (type_.text(q.mesh) for type_ in (*q.operands, *q.results))  # which name parts of dims too
        read = {int(number) for text in (q.text, *types) for number in _INTEGER.findall(text)}
        read.update(size for type_ in (*q.operands, *q.results) for size in type_.shape)
        named = tuple((number, self.numbers[number]) for number in sorted(read) if number in self.numbers)
        return q, named, tuple(self.ranges.items())

    def wrong(self, q: Question) -> str:
        """Return the fault of a line, or "" if it has none. Operators that only move values are not run: their numbers
        are checked elsewhere, and equal numbers are equal expressions here."""
        if q.line.op in COLLECTIVES:
            return next((message for _, message in collective_faults(q)), "")
        if not q.line.op.startswith(_OWN):
            return ""
        split = "/" in q.text or any(type_.placement.split_axes() for type_ in (*q.operands, *q.results))
        return self.wrong_on(q, False) or (self.wrong_on(q, True) if split else "")

    def wrong_on(self, q: Question, local: bool) -> str:
        """Return the fault of a line on whole shapes or, if ``local``, on one rank's shapes. An operator may take
        different branches at different sizes: it is run once for each branch, and one run proves all sizes of its
        branch."""
        op, mesh, left = q.line.op, q.mesh, None
        self.read = set()
        for _ in range(_MOST_WAYS):
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
            pairs = zip(
                itertools.chain(*filter(None, result_shapes)), itertools.chain(*filter(None, wanted)), strict=True
            )
            same = [form for pair in pairs if (form := _exact(sympy.Eq(*pair))) != sympy.true]
            assumed = self.symbolic.assumed()
            way = [form for guard in assumed if (form := _exact(guard)) != sympy.true]
            if not same and not way:
                self.spare = None if at or assumed else self.symbolic
                return ""
            names = sorted(self.read)
            if left is None:
                every = [range(low, high + 1) for low, high in map(self.steps.__getitem__, names)]
                if math.prod(map(len, every)) > _MOST_CHOICES:
                    return f"{op} is not proved to make {self.texts(wanted)}: there are too many sizes to try them all"
                left = [*itertools.product(*every)]
            symbols = [self.symbolic.symbols[name] for name in names]
            test, holds = (sympy.lambdify(symbols, sympy.And(*forms), "math") for forms in (way, same))
            if not all(holds(*choice) for choice in left if test(*choice)):
                return f"{op} makes {self.texts(result_shapes)}, not {self.texts(wanted)}"
            left = [choice for choice in left if not test(*choice)]
            if not left:
                return ""
        return f"{op} goes more than {_MOST_WAYS} ways at different sizes"

    # ---- numbers as expressions, in steps of the sizes

    def sizes_at(self, at: Mapping[str, int]) -> SymbolicSizes:
        """Return symbolic sizes within their bounds, which are those of one choice, or the largest, where an operator
        asks for more."""
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
        return [sympy.Add(*(self.stretch(part, mesh, local) for part in dim.strip(" ()").split(" + "))) for dim in dims]

    def stretch(self, text: str, mesh: Mesh, local: bool) -> sympy.Expr:
        length = sympy.Integer(1)
        for number, axes in re.findall(r"(-?\d+)((?:/~?\w+)*)", text):
            ways = math.prod(mesh.size(axis) for name in axes.split("/")[1:] for axis in mesh.parts(name.lstrip("~")))
            length *= self.expression(int(number)) / (ways if local else 1)
        return length

    def size(self, expression: sympy.Expr) -> Any:
        """Return an expression as a number, or as the symbolic number that torch takes for one."""
        return self.symbolic.size(expression) if expression.free_symbols else int(expression)

    def text(self, found: Any) -> str:
        """Return expressions as text in the names of the sizes."""
        if isinstance(found, list):
            return f"[{', '.join(map(self.text, found))}]"
        names = {symbol: sympy.Symbol(name) / self.ranges[name].step for name, symbol in self.symbolic.symbols.items()}
        return "-" if found is None else str(found.subs(names))

    def texts(self, found: Sequence[list[sympy.Expr] | None]) -> str:
        return "; ".join(map(self.text, found))

    def named(self, text: str) -> str:
        """Return torch's own words with the names of the sizes."""
        for name, symbol in self.symbolic.symbols.items():
            step = self.ranges[name].step
            text = text.replace(str(symbol), name if step == 1 else f"({name}/{step})")
        return text


def _exact(condition: sympy.Basic) -> sympy.Basic:
    """Return a condition in sympy's own functions, simplified."""
    exact = condition.replace(lambda e: type(e).__name__ in _EXACT, lambda e: _EXACT[type(e).__name__](*e.args))
    return sympy.Eq(sympy.expand(exact.lhs - exact.rhs), 0) if isinstance(exact, sympy.Eq) else exact
