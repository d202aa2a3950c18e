"""The checker of whole numbers: programs compute the same with tokens, targets, positions and masks as the model does.

Small vocabularies and short sequences fit into eight bits, and what random numbers are drawn from is small in the first
steps, so no test of small numbers sees one that is clamped, taken modulo something, or too long for its type. Each
integer or boolean, and each table that is made of these and of buffers, gets an expression of what it is made of,
whatever moves it between dims and ranks; arithmetic in a program is to be arithmetic of the captured graph, whose
operators are taken apart by torch as they were for the programs. What depends on an activation or a weight is left to
the numbers, but for the arithmetic of whole numbers that an activation chose, such as the experts of a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import inf, isnan, nan
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..analysis.dataflow import Question, follow, line_call
from ..layout.collectives import COLLECTIVES
from ..ops.factors import fill_operands
from ..ops.precision import base_name
from ..ops.results import changed
from ..ops.rules import facts, has_rule
from ..program.actions import BACKWARD, FORWARD, step_kinds, work_kinds
from ..program.binding import BUFFERS
from ..program.program import Fault, Function, Line, Program, Value, default_numbers, numbers_in, operator
from ..torch_private import is_composite

_HOW = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format"})
_ACTIVATION = 0


class _Expressions:
    """A number for every expression; equal expressions have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {("activation",): _ACTIVATION}
        self._answers: dict[tuple[Question, tuple[int, ...]], tuple[list[int], list[int], list[int]]] = {}
        self._mode = FakeTensorMode()
        self.constants: set[int] = set()
        self.stream = self("stream")
        self.rng = self("rng")

    def __call__(self, *words: Hashable) -> int:
        return self._numbers.setdefault(words, len(self._numbers))

    def constant(self, number: Hashable) -> int:
        expression = self("constant", number)
        self.constants.add(expression)
        return expression

    def source(self, value: Value, saved: Mapping[str, int]) -> int:
        """Return the number of the expression of a program's parameter. Integer inputs, buffers and random streams are
        followed exactly. A saved value has the expression under which F saved it. Weights and activations are not
        followed."""
        kind = value.kind
        if value.binding is not None and kind == "saved":
            return saved.get(value.binding.name, _ACTIVATION)  # what is never saved, others refuse
        exact = kind in BUFFERS or (kind == "input" and not value.type.dtype.is_floating_point)
        return self(value.binding) if exact else self.rng if kind == "rng" else _ACTIVATION

    def answer(self, question: Question, given: tuple[int, ...]) -> tuple[list[int], list[int], list[int]]:
        """Return the expressions of a line's results, and those of the arithmetic in its parts: first with whole
        numbers, then without."""
        key = question, given
        if key not in self._answers:
            self._answers[key] = self._answer(question, given)
        return self._answers[key]

    def _answer(self, question: Question, given: tuple[int, ...]) -> tuple[list[int], list[int], list[int]]:
        line, row = question.line, facts(question.line.op)
        if line.op == "parc.stream_key.default" and given == (self.rng,):
            return [self.stream], [], []
        if self.rng in given or (self.stream in given and row.key_at is None):
            return [_ACTIVATION] * len(line.made), [self("random", base_name(line.op))], []
        chosen = _counts(row.casts, question.operands, question.results)
        if line.op in COLLECTIVES or row.keeps_values or (given and not any(given) and not chosen):
            return [given[0]] * len(line.made), [], []
        # made of floating numbers alone, or into them: also the comparison of an activation with a constant
        floats = any(all(t.dtype.is_floating_point for t in types) for types in (question.operands, question.results))
        drawn = not {_ACTIVATION, self.stream}.isdisjoint(given)
        if floats and drawn and not chosen and not is_composite(operator(line.op)):
            return [_ACTIVATION] * len(line.made), [], []
        return self._run(question, given)

    def ignored(self, question: Question, given: tuple[int, ...]) -> list[int]:
        """Return the expression `target != ignore_index` where a loss of the captured graph ignores targets, because
        programs write this comparison out. The list is empty for other operators."""
        row = facts(question.line.op)
        if row.ignored_at is None:
            return []
        index = question.line.args[row.ignored_at]
        return [self("ne", str(([f"%{given[row.named_at]}", index], ())), str(torch.bool))]

    def _run(self, question: Question, given: tuple[int, ...]) -> tuple[list[int], list[int], list[int]]:
        call = line_call(question.line, question.operands, question.results, lambda item: item.size)
        with self._mode:
            tensors = [torch.empty(type_.shape, dtype=type_.dtype) for type_ in question.operands]
            with _Parts(self, tensors, given) as parts:
                target, kwargs = operator(call.op), fill_operands(dict(call.kwargs), tensors)
                if any(argument.name == "device" for argument in target._schema.arguments):
                    kwargs["device"] = torch.device("cpu")
                output = target(*fill_operands(call.args, tensors), **kwargs)
        results = output if isinstance(output, (tuple, list)) else [output]
        kept = [x for x, value in zip(results, question.line.results, strict=True) if value is not None]
        return [parts.known.get(id(x), _ACTIVATION) for x in kept], parts.arithmetic, parts.tables


class _Parts(TorchDispatchMode):
    """A mode that sees the parts of a composite operator, and notes the expressions of their results."""

    def __init__(self, expressions: _Expressions, operands: Sequence[torch.Tensor], given: Sequence[int]) -> None:
        super().__init__()
        self.express, self.alive = expressions, list(operands)
        self.known = {id(x): expression for x, expression in zip(operands, given, strict=True)}
        self.arithmetic: list[int] = []
        self.tables: list[int] = []
        """The arithmetic of floating numbers alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        results = [
            x for x in (output if isinstance(output, (tuple, list)) else [output]) if isinstance(x, torch.Tensor)
        ]
        expression = self._expression(func, args, kwargs, results)
        several = len(results) > 1 and expression != _ACTIVATION
        for index, result in enumerate(results):
            self.known[id(result)] = self.express("result", index, expression) if several else expression
        self.alive += results
        return output

    def _expression(self, func: Any, args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> int:
        row, name = facts(func), base_name(str(func)).removesuffix("_")
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        numbers = [self.known.get(id(x), _ACTIVATION) for x in operands]
        varying = [number for number in numbers if number not in self.express.constants]
        if row.number_at is not None:
            return self.express.constant(args[row.number_at])
        if row.keeps_values and numbers:
            return numbers[0]
        if _ACTIVATION in varying and (not any(varying) or all(x.is_floating_point() for x in results)):
            if _counts(row.casts, operands, results):  # arithmetic of what an activation chose
                self.arithmetic.append(self.express("chosen", name, str(tree_map(_plain, list(args)))))
            return _ACTIVATION
        dtypes = [str(x.dtype) for x in results if not x.is_floating_point()]
        if name == "_to_copy":
            source, result = operands[0].dtype, results[0].dtype
            if source == torch.bool or (source.is_floating_point and result.is_floating_point):
                return numbers[0]
            args, kwargs = args[:1], {}
        options = tuple(sorted((key, item) for key, item in kwargs.items() if key not in _HOW))
        words = changed((list(args[1:3] if name == "iota" else args), options), self._word)
        expression = self.express(name, str(words), *dtypes)
        if row.moves == "join" or not varying:
            return expression
        whole = dtypes or not all(x.is_floating_point() for x in operands)
        (self.arithmetic if whole else self.tables).append(expression)
        return expression

    def _word(self, tensor: torch.Tensor) -> str:
        return f"%{self.known.get(id(tensor), _ACTIVATION)}"


def _counts(casts: bool, operands: Sequence[Any], results: Sequence[Any]) -> bool:
    """Return whether an operator computes whole numbers of whole numbers, or casts something to them."""
    return bool(operands) and all(map(_whole, results)) and (casts or all(map(_whole, operands)))


def _whole(value: Any) -> bool:
    return not value.dtype.is_floating_point and value.dtype != torch.bool


def _plain(item: Any) -> Any:
    return "%" if isinstance(item, torch.Tensor) else item


def check_integers(programs: Mapping[str, Program], reference: Program) -> Iterator[Fault]:
    """Find arithmetic of whole numbers in COUNT, F and B that the captured graph does not have."""
    if "integers" not in reference.main.derived:
        reference.main.derived["integers"] = _of_model(reference)
    express, known = reference.main.derived["integers"]
    saved: dict[str, int] = {}
    for program in [programs[row.kind] for row in step_kinds() if row.each and row.kind in programs]:
        expressions, faults = _held(program, express, known, saved)
        ends = zip(program.main.returns, expressions, strict=True)
        saved.update((key.name, expression) for (key, _), expression in ends if key.kind == "saved")
        yield from faults


def _of_model(reference: Program) -> tuple[_Expressions, set[int]]:
    """Return the expressions of the captured graph, and those of its arithmetic."""
    express = _Expressions()
    known: set[int] = set()

    def noted(_: str, question: Question, given: tuple[int, ...]) -> list[int]:
        results, parts, tables = express.answer(question, given)
        known.update(parts, tables, express.ignored(question, given))
        return results

    for function in reference.functions:
        follow(reference, function, [express.source(value, {}) for value in function.parameters], noted)
    return express, known


def _held(
    program: Program, express: _Expressions, known: set[int], saved: Mapping[str, int]
) -> tuple[list[int], list[Fault]]:
    """Return the expressions of a program's results, and the faults of lines with arithmetic that is not ``known``."""
    faults: dict[str, Fault] = {}

    def held(function: str, question: Question, given: tuple[int, ...]) -> list[int]:
        results, parts, tables = express.answer(question, given)
        if not known.issuperset(parts if program.action == BACKWARD else [*parts, *tables]):  # B differentiates tables
            where = f"{program.action} {function}: {', '.join(value.name for value in question.line.made)}"
            what = "whole numbers" if parts else "tables"
            faults[where] = Fault("types", where, f"{question.line.op} makes other {what} than the model")
        return results

    given = [express.source(value, saved) for value in program.main.parameters]
    return follow(program, program.main, given, held), list(faults.values())


# ---- bounds: numbers at which an operator on activations changes its behaviour.
# Data may never reach them: of `torch.where(y > 50, 0, y)` random numbers tell nothing. So what F and B compare
# activations with, cut them off at or put in their place is held to be in the captured graph, a number or a tensor made
# of constants alone; and F must have every bound that the captured graph has, as often as that has it.


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
