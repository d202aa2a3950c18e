"""The check of the numbers that F and B compute with: shares, epsilons, exponents, powers, scales, probabilities.

Random data may never show them: ``x * sigmoid(x + 1000)`` is ``x``, and an epsilon of 1e-12 is beside any variance. So
each operator of F that has numbers must be one of the captured graph with the same numbers, as often as the graph has
it, and the graph's must all be there. Those of B are F's, or what torch's own derivative of a line of F brings: here it
is derived again, operator by operator, on tensors without numbers.

Whole numbers of whole numbers are the business of the certificate, the numbers in padding of ``check_padding``, and
those of the programs that run once a step of the checks of sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import isnan, nan
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..analysis.dataflow import Question, line_call, questions
from ..analysis.torch_runs import run_line
from ..layout.collectives import COLLECTIVES
from ..ops.factors import Operand, fill_operands
from ..ops.precision import base_name
from ..ops.rules import facts
from ..program.actions import BACKWARD, COUNTING, FORWARD
from ..program.binding import PARAMETERS
from ..program.program import Fault, Function, Program, operator

Numbered = tuple[str, tuple[tuple[str, float], ...]]
"""An operator without its overload, and those of its arguments that are numbers other than its defaults, by name."""
_VALUED = frozenset({"Tensor", "Optional[Tensor]", "number", "Optional[number]", "float", "Optional[float]"})
"""The types of arguments whose numbers are computed with; whole numbers of other types are dims and sizes."""
_WEIGHTS = frozenset({*PARAMETERS, "weight"})
"""The kinds of values that depend on parameters."""
_POSITIONS = frozenset({"padding", "padding_idx", "ignore", "ignore_index"})
"""The arguments that name a row or a class by a whole number."""
_CREATED = "full"
"""The name of all operators that repeat a number."""
_NEUTRAL = frozenset(
    {(name, (("other", number),)) for name, number in (("mul", 1.0), ("div", 1.0), ("add", 0.0), ("sub", 0.0))}
)
"""The operators with a number that change nothing, as a mask of targets that are known and all count."""
_PADDING = "parc.fill_pad.default"
"""The operator whose number no entry of the model sees."""
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_DATA: Hashable = "data"
"""The knowledge of a value that depends on parameters."""
_TABLE: Hashable = "table"
"""The knowledge of a value that depends on inputs, buffers and constants alone: each stage may make it again."""


def check_constants(programs: Mapping[str, Program], reference: Program) -> Iterator[Fault]:
    """Find numbers in COUNT, F and B that are not the captured graph's, and those of the graph that COUNT and F
    lack."""
    model = _CountedNumbers(reference, reference.main)
    forward = _CountedNumbers(programs[FORWARD], programs[FORWARD].main)
    yield from _differences(FORWARD, forward, model)
    if COUNTING in programs:
        counts, of_model = programs[COUNTING], reference.functions[0]
        yield from _differences(COUNTING, _CountedNumbers(counts, counts.main), _CountedNumbers(reference, of_model))
    if BACKWARD in programs:
        yield from _backward_faults(programs[BACKWARD], forward)


def _differences(action: str, program: _CountedNumbers, model: _CountedNumbers) -> Iterator[Fault]:
    for numbered in sorted({*program.of_data, *model.of_data}):
        times, of_model = program.of_data[numbered], model.of_data[numbered]
        if times > of_model or (times < of_model and numbered not in model.replaced):
            message = f"has {_words(numbered)} {times} times, and the captured graph {of_model} times"
            yield Fault("types", f"{action} {program.places.get(numbered, 'main')}", message)
    for numbered in sorted(program.of_tables - model.of_tables - model.of_data.keys()):
        message = f"has {_words(numbered)}, which no such operator of the captured graph has"
        yield Fault("types", f"{action} {program.places[numbered]}", message)
    for numbered in sorted(model.of_tables - program.of_tables - model.replaced):
        yield Fault("types", action, f"has no {_words(numbered)}, which the captured graph has")
    for number in sorted(program.created.keys() - model.all_numbers - {0.0}):
        message = f"makes {number!r}, which is no number of the captured graph"
        yield Fault("types", f"{action} {program.created[number]}", message)


def _backward_faults(backward: Program, forward: _CountedNumbers) -> Iterator[Fault]:
    """Find numbers in B that no line of F has, and that no derivative of one brings. Derivatives are asked for until
    they explain all, first those of lines with numbers."""
    known = {numbered for question in forward.questions for numbered in _line_numbers(question)}
    known |= {_creation(number) for number in (*forward.all_numbers, 0.0)}
    lines = [
        (function.name, line, unexplained)
        for function in backward.functions
        for line, question in questions(function, backward.mesh)
        if question is not None and (unexplained := {*_line_numbers(question)} - known)
    ]
    other = set[Numbered]().union(*(unexplained for _, _, unexplained in lines))
    for question in sorted(forward.questions, key=lambda question: not _line_numbers(question)):
        if not other:
            return
        other -= _derivative_numbers(question)
    for function, line, unexplained in lines:
        if wrong := unexplained & other:
            message = f"has {_words(min(wrong))}, which neither F nor the derivative of one of its operators has"
            yield Fault("types", f"{BACKWARD} {function}: {line.names}", message)


def _words(numbered: Numbered) -> str:
    name, numbers = numbered
    return f"{name} with {', '.join(f'{argument} {number!r}' for argument, number in numbers)}"


class _CountedNumbers:
    """The operators of a program that have numbers: how often each computes with what depends on parameters, and the
    set of the others, whose results are made wherever they are read."""

    def __init__(self, program: Program, main: Function) -> None:
        self.program = program
        self.of_tables: set[Numbered] = set()
        self.created: dict[float, str] = {}
        """The numbers that operators repeat, and the first place of each."""
        self.places: dict[Numbered, str] = {}
        self.replaced: set[Numbered] = set()
        """The numbers of operators in whose place a program may have others."""
        self.questions: dict[Question, None] = {}
        self._walked: dict[tuple[str, tuple[Hashable, ...]], tuple[Counter[Numbered], list[Hashable]]] = {}
        self.of_data, _ = self._walk(main, tuple(_DATA if v.kind in _WEIGHTS else _TABLE for v in main.parameters))

    @property
    def all_numbers(self) -> set[float]:
        """All numbers of the program."""
        return {
            number for _, numbers in {*self.of_data, *self.of_tables} for _, number in numbers
        } | self.created.keys()

    def _walk(
        self, function: Function, of_parameters: tuple[Hashable, ...]
    ) -> tuple[Counter[Numbered], list[Hashable]]:
        """Count what a function has, with the functions that it calls. Return what is known of its results too."""
        key = function.name, of_parameters
        if key not in self._walked:
            counts: Counter[Numbered] = Counter()
            known = dict(zip((value.name for value in function.parameters), of_parameters, strict=True))
            for line, question in questions(function, self.program.mesh):
                read = tuple(map(known.__getitem__, line.uses))
                if question is None:
                    of_call, results = self._walk(self.program.function(line.op), read)
                    counts += of_call
                else:
                    self.questions[question] = None
                    results = [_known_of_result(question, read)] * len(line.made)
                    constants = tuple(known if isinstance(known, float) else None for known in read)
                    for numbered in _line_numbers(question, constants if {*constants} - {None} else ()):
                        self.places.setdefault(numbered, f"{function.name}: {line.names}")
                        if facts(line.op).replaced:
                            self.replaced.add(numbered)
                        if numbered[0] == _CREATED:
                            self.created.setdefault(numbered[1][0][1], f"{function.name}: {line.names}")
                        elif _DATA in read:
                            counts[numbered] += 1
                        else:
                            self.of_tables.add(numbered)
                known.update(zip((value.name for value in line.made), results, strict=True))
            self._walked[key] = counts, [known[name] for _, name in function.returns]
        return self._walked[key]


def _known_of_result(question: Question, read: tuple[Hashable, ...]) -> Hashable:
    """Return the number that a line repeats, or whether its results depend on parameters."""
    line, row = question.line, facts(question.line.op)
    if row.creates:
        return _number(row.number_in(line.args))
    if read and (line.op in COLLECTIVES or row.keeps_values or row.casts):
        return read[0]
    if row.elementwise and read and all(isinstance(number, float) for number in read):
        pairs = zip(read, question.operands, strict=True)
        numbers = [torch.tensor(number, dtype=_wide(type_.dtype)) for number, type_ in pairs]
        call = line_call(line, question.operands, question.results, lambda item: item.size)
        args, kwargs = fill_operands((call.args, dict(call.kwargs)), numbers)
        return _number(float(operator(line.op)(*args, **kwargs)))
    return _DATA if _DATA in read else _TABLE


@lru_cache(maxsize=8192)
def _line_numbers(question: Question, constants: tuple[float | None, ...] = ()) -> tuple[Numbered, ...]:
    """Return the numbers with which a line computes, other than whole ones of whole numbers: those of its parts, if it
    is composed. ``constants`` are the numbers that operands repeat, or none of them is known."""
    line = question.line
    if line.op in (*COLLECTIVES, _PADDING) or not _floating(question):
        return ()
    target, row = operator(line.op), facts(line.op)
    plain = row.moves or (row.precision == "product" and not constants) or line.op.startswith("parc.")
    if not plain and target.has_kernel_for_dispatch_key(_COMPOSITE):
        return tuple(_numbers_of_parts(question, constants))
    call = line_call(line, question.operands, question.results, lambda item: item.size)

    def constant(item: Any) -> float | None:
        return constants[item.index] if isinstance(item, Operand) and constants else None

    numbered = _numbers_of_call(target, call.args, dict(call.kwargs), constant)
    return (numbered,) if numbered[1] else ()


@lru_cache(maxsize=8192)
def _derivative_numbers(question: Question) -> frozenset[Numbered]:
    """Return the numbers with which torch's derivative of a line computes."""
    if question.line.op in COLLECTIVES or not _floating(question):
        return frozenset()
    return frozenset(run_line(question, lambda _: _Recorder(None), derivative=True).numbers)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _floating(question: Question) -> bool:
    return any(type_.dtype.is_floating_point for type_ in (*question.operands, *question.results))


def _numbers_of_call(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], constant: Callable[[Any], float | None]
) -> Numbered:
    """Return the numbers among the arguments of a call, with those that its operands repeat if it computes entry by
    entry; of a call that makes such an operand, its number. A row -1 is none."""
    row = facts(target)
    if row.creates:
        return _creation(_number(row.number_in(args)))
    if base_name(str(target)).removesuffix("_") == "fill" and isinstance(
        args[1], (int, float)
    ):  # of a temporary, as a backward makes a number
        return _creation(_number(args[1]))
    numbers = []
    for at, argument in enumerate(target._schema.arguments):
        item = args[at] if at < len(args) else kwargs.get(argument.name)
        if row.elementwise and (repeated := constant(item)) is not None:
            numbers.append((argument.name, repeated))
        positions = argument.name in _POSITIONS
        if not isinstance(item, (int, float)) or isinstance(item, bool):
            continue
        if not (positions or str(argument.type) in _VALUED):
            continue
        if item != argument.default_value and not (positions and item == -1):
            numbers.append((argument.name, _number(item)))
    numbered = base_name(str(target)).removesuffix("_"), tuple(sorted(numbers))
    return (numbered[0], ()) if numbered in _NEUTRAL else numbered


def _creation(number: float) -> Numbered:
    return _CREATED, (("fill_value", number),)


def _number(number: float) -> float:
    """Return the number as a float. Every NaN becomes the same object, so that a set finds it again."""
    return nan if isnan(number) else float(number)


class _Recorder(TorchDispatchMode):
    """A mode that notes the numbers of the operators that run in it. It follows ``constants``, the numbers that tensors
    repeat by the ids of these; none where that is None."""

    def __init__(self, constants: dict[int, float] | None) -> None:
        super().__init__()
        self.numbers: list[Numbered] = []
        self._constants = constants
        self._alive: list[Any] = []  # tensors that live keep their ids

    def _constant(self, item: Any) -> float | None:
        return self._constants.get(id(item)) if self._constants is not None else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        numbered = _numbers_of_call(func, args, kwargs or {}, self._constant)
        self.numbers += [numbered] if numbered[1] else []
        result, row = func(*args, **(kwargs or {})), facts(func)
        self._alive.append(result)
        repeated = self._constant(args[0]) if args and (row.keeps_values or row.casts) else None
        number = _number(row.number_in(args)) if row.creates else repeated
        if number is not None and self._constants is not None:
            self._constants[id(result)] = number
        return result


def _numbers_of_parts(question: Question, constants: tuple[float | None, ...]) -> list[Numbered]:
    """Return the numbers of the operators that a line is made of; ``constants`` are those that its operands repeat."""

    def watch(operands: Sequence[torch.Tensor]) -> _Recorder:
        pairs = zip(operands, constants or (None,) * len(operands), strict=True)
        return _Recorder({id(tensor): number for tensor, number in pairs if number is not None})

    return run_line(question, watch, derivative=False, wide=True).numbers
