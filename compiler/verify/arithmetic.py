"""Checks of what no test with small random numbers sees: arithmetic of whole numbers, and thresholds of activations.

Whole numbers (tokens, targets, positions, masks): small vocabularies and short sequences fit into eight bits, and the
keys of random streams are small in the first steps, so no test sees a number that is clamped, taken modulo something,
or too long for its type. Each integer or boolean, and each table that is computed from these and from buffers, gets an
expression of what it is computed from, whatever moves it between dims and ranks. Each such expression in a program must
be one of the captured graph, whose operators torch decomposes as it did for the programs. Values that depend on an
activation or a weight are left to the tests of numbers, except arithmetic of whole numbers that an activation chose,
such as the experts of a token.

Thresholds: random data may never cross the 50 of ``torch.where(y > 50, 0, y)``. So what F and B compare activations
with, clamp them to or put in their place must be in the captured graph, as a number or as a tensor that is computed
from constants alone; and F must have every threshold of the captured graph, as often as that has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan, nan
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..analysis.dataflow import Question, follow, line_call
from ..analysis.torch_runs import run_line
from ..layout.collectives import COLLECTIVES
from ..ops.factors import fill_operands
from ..ops.precision import base_name
from ..ops.results import changed
from ..ops.rules import facts, has_rule
from ..program.actions import BACKWARD, FORWARD, step_kinds, work_kinds
from ..program.binding import BUFFERS
from ..program.program import Fault, Function, Line, Program, Value, default_numbers, numbers_in, operator, remembered
from ..torch_private import is_composite
from .lines import follow_with_faults

_STORAGE_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format"})
_ACTIVATION = 0
"""The expression of all values that depend on activations or weights."""


@dataclass(frozen=True, slots=True)
class _Computed:
    """The expressions of a line's results, and those of the arithmetic in its decomposition."""

    results: list[int]
    arithmetic: Sequence[int] = ()
    """Arithmetic that reads or gives integers or booleans."""
    tables: Sequence[int] = ()
    """Arithmetic of floating numbers alone."""


class _Expressions:
    """A number for every expression; equal expressions have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {("activation",): _ACTIVATION}
        self._computed: dict[tuple[Question, tuple[int, ...]], _Computed] = {}
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
        """Return the expression of a program's parameter. Integer inputs, buffers and random streams have one of their
        own, a saved value has that with which F saved it."""
        kind = value.kind
        if value.binding is not None and kind == "saved":
            return saved.get(value.binding.name, _ACTIVATION)  # `check_bindings` refuses one that F does not save
        exact = kind in BUFFERS or (kind == "input" and not value.type.dtype.is_floating_point)
        return self(value.binding) if exact else self.rng if kind == "rng" else _ACTIVATION

    def computed(self, question: Question, operands: tuple[int, ...]) -> _Computed:
        """Return what a line computes, from the expressions of its operands."""
        key = question, operands
        if key not in self._computed:
            self._computed[key] = self._compute(question, operands)
        return self._computed[key]

    def _compute(self, question: Question, operands: tuple[int, ...]) -> _Computed:
        line, row = question.line, facts(question.line.op)
        if line.op == "parc.stream_key.default" and operands == (self.rng,):
            return _Computed([self.stream])
        if self.rng in operands or (self.stream in operands and row.key_at is None):
            return _Computed([_ACTIVATION] * len(line.made), [self("random", base_name(line.op))])
        chosen = _counts(row.casts, question.operands, question.results)
        if line.op in COLLECTIVES or row.keeps_values or (operands and not any(operands) and not chosen):
            return _Computed([operands[0]] * len(line.made))
        # from floating numbers alone, or to them: also the comparison of an activation with a constant
        floats = any(all(t.dtype.is_floating_point for t in types) for types in (question.operands, question.results))
        drawn = not {_ACTIVATION, self.stream}.isdisjoint(operands)
        if floats and drawn and not chosen and not is_composite(operator(line.op)):
            return _Computed([_ACTIVATION] * len(line.made))
        return self._decompose(question, operands)

    def ignored(self, question: Question, operands: tuple[int, ...]) -> list[int]:
        """Return the expression `target != ignore_index` where a loss of the captured graph ignores targets, because
        programs write this comparison out. The list is empty for other operators."""
        row = facts(question.line.op)
        if row.ignored_at is None:
            return []
        index = question.line.args[row.ignored_at]
        return [self("ne", str(([f"%{operands[row.named_at]}", index], ())), str(torch.bool))]

    def _decompose(self, question: Question, operands: tuple[int, ...]) -> _Computed:
        """Run the operator on fake tensors, and note the expressions of the operators that torch decomposes it to."""
        call = line_call(question.line, question.operands, question.results, lambda item: item.size)
        with self._mode:
            tensors = [torch.empty(type_.shape, dtype=type_.dtype) for type_ in question.operands]
            with _Decomposition(self, tensors, operands) as parts:
                target, kwargs = operator(call.op), fill_operands(dict(call.kwargs), tensors)
                if any(argument.name == "device" for argument in target._schema.arguments):
                    kwargs["device"] = torch.device("cpu")
                output = target(*fill_operands(call.args, tensors), **kwargs)
        results = output if isinstance(output, (tuple, list)) else [output]
        kept = [x for x, value in zip(results, question.line.results, strict=True) if value is not None]
        return _Computed([parts.known.get(id(x), _ACTIVATION) for x in kept], parts.arithmetic, parts.tables)


class _Decomposition(TorchDispatchMode):
    """A mode that sees the operators that a composite one decomposes to, and notes the expressions of their results."""

    def __init__(self, express: _Expressions, tensors: Sequence[torch.Tensor], operands: Sequence[int]) -> None:
        super().__init__()
        self.express, self.alive = express, list(tensors)  # tensors that live keep their ids
        self.known = {id(x): expression for x, expression in zip(tensors, operands, strict=True)}
        self.arithmetic: list[int] = []
        self.tables: list[int] = []

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
            if _counts(row.casts, operands, results):  # arithmetic of whole numbers that an activation chose
                without_names = tree_map(lambda item: "%" if isinstance(item, torch.Tensor) else item, list(args))
                self.arithmetic.append(self.express("chosen", name, str(without_names)))
            return _ACTIVATION
        dtypes = [str(x.dtype) for x in results if not x.is_floating_point()]
        if name == "_to_copy":
            source, result = operands[0].dtype, results[0].dtype
            if source == torch.bool or (source.is_floating_point and result.is_floating_point):
                return numbers[0]
            args, kwargs = args[:1], {}
        options = tuple(sorted((key, item) for key, item in kwargs.items() if key not in _STORAGE_OPTIONS))
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


def check_integers(programs: Mapping[str, Program], reference: Program) -> Iterator[Fault]:
    """Find arithmetic of whole numbers in COUNT, F and B that the captured graph does not have."""
    if "integers" not in reference.main.derived:
        reference.main.derived["integers"] = _ModelArithmetic(reference)
    model: _ModelArithmetic = reference.main.derived["integers"]
    saved: dict[str, int] = {}
    for program in [programs[row.kind] for row in step_kinds() if row.each and row.kind in programs]:
        expressions, faults = _checked_arithmetic(program, model, saved)
        ends = zip(program.main.returns, expressions, strict=True)
        saved.update((key.name, expression) for (key, _), expression in ends if key.kind == "saved")
        yield from faults


class _ModelArithmetic:
    """The arithmetic of the captured graph in expressions, and that of torch's derivatives of its operators."""

    def __init__(self, reference: Program) -> None:
        self.express = _Expressions()
        self.known: set[int] = set()
        self._questions: dict[Question, None] = {}
        self._of_derivatives: set[int] | None = None
        for function in reference.functions:
            parameters = [self.express.source(value, {}) for value in function.parameters]
            follow(reference, function, parameters, self._note)

    def _note(self, _: str, question: Question, operands: tuple[int, ...]) -> list[int]:
        computed = self.express.computed(question, operands)
        self.known.update(computed.arithmetic, computed.tables, self.express.ignored(question, operands))
        if any(type_.dtype.is_floating_point for type_ in question.operands) and question.line.op not in COLLECTIVES:
            self._questions[question] = None
        return computed.results

    def of_derivatives(self) -> set[int]:
        """Return the arithmetic of derivatives, such as that of positions in the derivative of ``cumprod``."""
        if self._of_derivatives is None:
            runs = (run_line(question, self._watch, derivative=True) for question in self._questions)
            self._of_derivatives = {expression for run in runs for expression in run.arithmetic}
        return self._of_derivatives

    def _watch(self, operands: Sequence[torch.Tensor]) -> _Decomposition:
        whole = self.express("whole numbers under a derivative")
        expressions = [_ACTIVATION if x.is_floating_point() else whole for x in operands]
        return _Decomposition(self.express, operands, expressions)


def _checked_arithmetic(
    program: Program, model: _ModelArithmetic, saved: Mapping[str, int]
) -> tuple[list[int], list[Fault]]:
    """Return the expressions of a program's results, and the faults of lines with arithmetic that is not the model's.
    B may have that of derivatives too."""
    express, backward = model.express, program.action == BACKWARD

    def checked(question: Question, operands: tuple[int, ...]) -> tuple[list[int], str]:
        computed = express.computed(question, operands)
        other = {*computed.arithmetic, *(() if backward else computed.tables)} - model.known
        if not other or (backward and other <= model.of_derivatives()):
            return computed.results, ""
        what = "whole numbers" if computed.arithmetic else "tables"
        return computed.results, f"{question.line.op} makes other {what} than the model"

    return follow_with_faults(program, [express.source(value, saved) for value in program.main.parameters], checked)


# ---- thresholds of activations; a row of an operator calls them ``bounds``


_OF_DERIVATIVES: frozenset[Hashable] = frozenset({-inf, -1.0, 0.0, 1.0, inf})
"""Numbers with which derivatives and masks compare though no line of a model has them."""
_DATA: Hashable = None
"""The knowledge of a value that depends on data, not on constants alone."""


def check_bounds(programs: Mapping[str, Program], reference: Program) -> Iterator[Fault]:
    """Find thresholds of activations in F and B that the captured graph does not have, and thresholds that F lacks."""
    model, lines = _Bounds(reference), [line for function in reference.functions for line in function.lines]
    for function in reference.functions:
        model.follow(function, {})
    of_model = model.constants.union(*map(_line_numbers, lines), *(default_numbers(line.op).values() for line in lines))
    of_model = of_model.union(*model.at.values())
    saved: dict[str, Hashable] = {}
    for program in (programs[action] for action in work_kinds() if action in programs):
        bounds = _Bounds(program)
        saved |= bounds.follow(program.main, saved)
        # derivatives of a maximum compare with NaN
        known = of_model | _OF_DERIVATIVES | ({nan} if program.action != FORWARD else set())
        for (name, results, op), numbers in bounds.at.items():
            # the derivative of an operator has its thresholds, so infinite ones only where the model has them
            if other := numbers - (known - ({-inf, inf} - of_model) if facts(op).backward else known):
                word = next((repr(number) for number in other if isinstance(number, float)), "a constant")
                message = f"{op} has {word}, which is no number of the captured graph"
                yield Fault("types", f"{program.action} {name}: {results}", message)
        if program.action == FORWARD:
            missing = model.times(reference.main) - bounds.times(program.main)
            for number in sorted(missing.keys() - _OF_DERIVATIVES - {nan}, key=str):
                yield Fault("types", FORWARD, f"has fewer bounds of {number!r} than the captured graph")


class _Bounds:
    """The thresholds of activations in a program, by line: numbers, and descriptions of how other constants are
    computed."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.at: dict[tuple[str, str, str], frozenset[Hashable]] = {}
        self.constants: set[Hashable] = set()

    def follow(self, function: Function, saved: Mapping[str, Hashable]) -> dict[str, Hashable]:
        """Note the thresholds of a main function and of the functions that it calls. Return what is known of the values
        that it saves."""
        parameters = [saved.get(value.name, _DATA) if value.kind == "saved" else _DATA for value in function.parameters]
        ends = zip(function.returns, follow(self.program, function, parameters, self._note), strict=True)
        return {key.name: constant for (key, _), constant in ends if key.kind == "saved"}

    def _note(self, function: str, question: Question, operands: tuple[Hashable, ...]) -> list[Hashable]:
        """Note the thresholds of a line. Return what is known of its results, from what is known of its operands."""
        line, row = question.line, facts(question.line.op)
        floats = any(type_.dtype.is_floating_point for type_ in question.operands)
        if _DATA in operands and floats and (row.bounds or not (has_rule(line.op) or line.op in COLLECTIVES)):
            key = _line_key(function, line)
            # an operator without a rule may do anything with its numbers, of which whole ones may be sizes
            numbers = _line_numbers(line, float if not row.bounds else (float, int))
            numbers = numbers.union(row.limits, (constant for constant in operands if constant is not _DATA))
            self.at[key] = self.at.get(key, frozenset()) | numbers
        # a number may stand in the place of a tensor that holds it alone
        alone = {constant for constant in operands if isinstance(constant, float)}
        constant: Hashable = (
            base_name(line.op),
            _line_numbers(line) | alone,
            tuple(c for c in operands if c not in alone),
        )
        if _DATA in operands:
            constant = _DATA
        elif row.creates:
            constant = _as_float(row.number_in(line.args))
        elif operands and (line.op in COLLECTIVES or row.keeps_values or row.casts):
            constant = operands[0]
        self.constants.add(constant)
        return [constant] * len(line.made)

    def times(self, function: Function) -> Counter[Hashable]:
        """Count how often a function has each threshold, also in the functions that it calls."""
        counts: Counter[Hashable] = Counter()
        for line in function.lines:
            if line.calls_function:
                counts += self.times(self.program.function(line.op))
            elif facts(line.op).bounds:
                counts.update(self.at.get(_line_key(function.name, line), frozenset()))
        return counts


def _line_key(function: str, line: Line) -> tuple[str, str, str]:
    return function, line.names, line.op


@remembered
def _line_numbers(line: Line, kinds: type | tuple[type, ...] = (float, int)) -> frozenset[Hashable]:
    numbers = numbers_in((line.args, dict(line.kwargs)))
    return frozenset(_as_float(number) for number in numbers if isinstance(number, kinds))


def _as_float(number: float) -> float:
    """Return the number as a float. Every NaN becomes the same object, so that a set finds it again."""
    return nan if isnan(number) else float(number)
