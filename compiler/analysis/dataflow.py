"""Facts that travel along a program: its lines as questions without names, and a walk that follows what is known
about each value.

Passes, checks and reports read this. It decides nothing: what a line makes of the facts about its operands is the
reader's own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from ..layout.collectives import COLLECTIVES, WAIT, axes_of
from ..layout.mesh import Mesh
from ..layout.placement import TensorType
from ..ops.factors import OpCall, Operand
from ..ops.rules import TABLE, OpRow, facts
from ..program.actions import UNSHARD
from ..program.binding import PARAMETERS, Binding
from ..program.program import Function, Line, LocalSize, Program, Ref, argument_text, map_references


@dataclass(frozen=True)
class Question:
    """A line without its names, with the types of its operands. Equal lines are checked once."""

    text: str
    rule: OpRow | None
    operands: tuple[TensorType, ...]
    declared: tuple[TensorType | None, ...]
    mesh: Mesh
    line: Line = field(compare=False)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.text, self.operands, self.declared))

    @property
    def results(self) -> list[TensorType]:
        """The declared types of the results, without absent ones."""
        return [type_ for type_ in self.declared if type_ is not None]


Knowledge = TypeVar("Knowledge", bound=Hashable)
"""The type of the facts that a checker keeps about one value."""


def questions(function: Function, mesh: Mesh) -> Sequence[tuple[Line, Question | None]]:
    """Return a function's lines, each with its question, or None where it calls another function."""
    key = "questions", mesh
    if key not in function.derived:
        types = {name: value.type for name, value in function.values().items()}
        function.derived[key] = [
            (line, None if line.calls_function else _question(line, types, mesh)) for line in function.lines
        ]
    stored: Sequence[tuple[Line, Question | None]] = function.derived[key]
    return stored


def _question(line: Line, types: Mapping[str, TensorType], mesh: Mesh) -> Question:
    operands = tuple(types[name] for name in line.uses)
    known: Question | None = line.derived.get("question")  # lines are shared by functions that are almost equal
    if known is not None and (known.operands, known.mesh) == (operands, mesh):
        return known
    declared = tuple(None if value is None else value.type for value in line.results)
    names = iter(f"%{index}" for index in range(len(operands)))

    def word(item: object) -> str:
        return argument_text(map_references(item, lambda _: Ref(next(names))), mesh)

    words = [*map(word, line.args), *(f"{key}={word(item)}" for key, item in line.kwargs)]
    text = f"{line.op}({', '.join(words)})"
    made = line.derived["question"] = Question(text, TABLE.get(line.op), operands, declared, mesh, line)
    return made


def follow(
    program: Program,
    function: Function,
    given: Sequence[Knowledge],
    made: Callable[[str, Question, tuple[Knowledge, ...]], Sequence[Knowledge]],
) -> list[Knowledge]:
    """Walk through a program line by line, and return the facts known about each value that ``function`` returns.

    ``given`` are the facts about the function's parameters. ``made(function's name, line, facts)`` returns the facts
    about a line's results, from those about the values that the line reads.
    """
    memory: dict[tuple[str, tuple[Knowledge, ...]], list[Knowledge]] = {}

    def walk(function: Function, given: tuple[Knowledge, ...]) -> list[Knowledge]:
        key = function.name, given
        if key not in memory:
            known = dict(zip((value.name for value in function.parameters), given, strict=True))
            for line, question in questions(function, program.mesh):
                read = tuple(map(known.__getitem__, line.uses))
                if question is None:
                    facts_of_results: Sequence[Knowledge] = walk(program.function(line.op), read)
                else:
                    facts_of_results = made(function.name, question, read)
                for value, fact in zip(line.made, facts_of_results, strict=True):
                    known[value.name] = fact
            memory[key] = [known[name] for _, name in function.returns]
        return memory[key]

    return walk(function, tuple(given))


def line_call(
    line: Line, operands: Sequence[TensorType], results: Sequence[TensorType], size: Callable[[LocalSize], Any],
    number: Callable[[int], Any] = int,
) -> OpCall:  # fmt: skip
    """Return the line as a call, with its sizes read by ``size`` (whole or a rank's) and other whole numbers by
    ``number``."""
    places = iter(range(len(operands)))
    args = tuple(_as_operand(item, places, size, number) for item in line.args)
    kwargs = {key: _as_operand(item, places, size, number) for key, item in line.kwargs}
    return OpCall(line.op, args, kwargs, tuple(t.shape for t in operands), tuple(t.shape for t in results))


def _as_operand(
    item: Any, places: Iterator[int], size: Callable[[LocalSize], Any], number: Callable[[int], Any]
) -> Any:  # fmt: skip
    """Return an argument of a line as one of a call, in which a value is an operand by its place."""
    if isinstance(item, Ref):
        return Operand(next(places))
    if isinstance(item, LocalSize):
        return size(item)
    if isinstance(item, (list, tuple)):
        return type(item)(_as_operand(inner, places, size, number) for inner in item)
    return number(item) if type(item) is int else item


# ---- weights: the values that the programs of a step make of stored parameters by conversions alone.


WeightSources = Mapping[Binding, Binding]
"""The stored parameter behind each weight that UNSHARD makes."""
_CUT = "parc.cut_pad.default"


def converts(line: Line) -> bool:
    """Return whether a line's result is its operand, apart from dtype, placement and padding."""
    return (
        COLLECTIVES[line.op].keeps
        if line.op in COLLECTIVES
        else bool(facts(line.op).casts or facts(line.op).carries) or line.op == _CUT
    )


def weight_sources(programs: Mapping[str, Program]) -> dict[Binding, Binding]:
    """Return the stored parameter of each weight that UNSHARD makes of one parameter by conversions alone."""
    if UNSHARD not in programs:
        return {}
    known = stored_sources(programs[UNSHARD], {})
    return {key: known[name] for key, name in programs[UNSHARD].main.returns if name in known}


def parts_in_weights(program: Program) -> dict[Binding, tuple[str, tuple[str, ...]]]:
    """Return the weights of UNSHARD in which a stored parameter lies as some of their rows, by their bindings: the
    parameter's name, and the axes over which its rows are gathered, by one line. It needs no memory of its own."""
    main = program.main
    stored = {value.name: value for value in main.parameters if value.kind == "parameter"}
    parts: dict[Binding, tuple[str, tuple[str, ...]]] = {}
    for key, name in main.returns:
        line = main.makers.get(name)
        if line is not None and line.op == WAIT:
            line = main.makers.get(line.uses[0])
        if line is None or line.op != "parc.all_gather" or line.args[2:] != (0, 1):
            continue
        source = stored.get(line.uses[0])
        if source is not None and source.binding is not None:
            parts[key] = source.binding.name, axes_of(line.args[1:])
    return parts


def stored_sources(program: Program, weights: WeightSources) -> dict[str, Binding]:
    """Return the stored parameter of each value of a main function that is one, or is made of one by conversions."""
    known = {value.name: weights.get(value.binding, value.binding) for value in program.main.parameters
             if value.binding is not None and (value.kind in PARAMETERS or value.binding in weights)}  # fmt: skip
    for line in program.main.lines:
        if not line.calls_function and converts(line) and (source := known.get(line.uses[0])) is not None:
            known.update((value.name, source) for value in line.made)
    return known
