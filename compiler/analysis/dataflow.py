"""Dataflow: facts that travel along a program's lines from operands to results, and the stored parameter behind each
unsharded weight.

Passes, checks and reports read this. It decides nothing: each reader brings its own transfer function, which says what
a line makes of the facts about its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from ..layout.collectives import COLLECTIVES, RINGS, WAIT, axes_of
from ..layout.mesh import Mesh
from ..layout.placement import TensorType
from ..ops.factors import OpCall, Operand
from ..ops.rules import TABLE, OpRow, facts
from ..program.actions import UNSHARD
from ..program.binding import PARAMETERS, Binding
from ..program.program import (
    Function,
    Line,
    LocalSize,
    Program,
    Ref,
    Value,
    argument_text,
    map_references,
    remembered,
)


@dataclass(frozen=True)
class Question:
    """A line without its names, with the types of its operands: equal lines of all blocks are one question, which is
    answered once."""

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


@remembered
def questions(function: Function, mesh: Mesh) -> Sequence[tuple[Line, Question | None]]:
    """Return a function's lines, each with its question, or None where it calls another function."""
    types = {name: value.type for name, value in function.values().items()}
    return [(line, None if line.calls_function else _question(line, types, mesh)) for line in function.lines]


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
    question = line.derived["question"] = Question(text, TABLE.get(line.op), operands, declared, mesh, line)
    return question


_Fact = TypeVar("_Fact", bound=Hashable)
"""The type of what an analysis knows about one value."""


def follow(
    program: Program,
    function: Function,
    of_parameters: Sequence[_Fact],
    transfer: Callable[[str, Question, tuple[_Fact, ...]], Sequence[_Fact]],
) -> list[_Fact]:
    """Follow the facts about a function's parameters through its lines and the functions that these call, and return
    the facts about each value that ``function`` returns.

    ``transfer(name of the function, line, facts about its operands)`` returns the facts about a line's results.
    """
    walked: dict[tuple[str, tuple[_Fact, ...]], list[_Fact]] = {}

    def walk(function: Function, of_parameters: tuple[_Fact, ...]) -> list[_Fact]:
        key = function.name, of_parameters
        if key not in walked:
            known = dict(zip((value.name for value in function.parameters), of_parameters, strict=True))
            for line, question in questions(function, program.mesh):
                read = tuple(map(known.__getitem__, line.uses))
                of_results: Sequence[_Fact] = (
                    walk(program.function(line.op), read)
                    if question is None
                    else transfer(function.name, question, read)
                )
                known.update(zip((value.name for value in line.made), of_results, strict=True))
            walked[key] = [known[name] for _, name in function.returns]
        return walked[key]

    return walk(function, tuple(of_parameters))


def line_call(
    line: Line, operands: Sequence[TensorType], results: Sequence[TensorType], size: Callable[[LocalSize], Any],
    number: Callable[[int], Any] = int,
) -> OpCall:  # fmt: skip
    """Return a line as a call. ``size`` reads a size that ranks divide (whole, or a rank's part), ``number`` all other
    whole numbers."""
    places = iter(range(len(operands)))
    args = tuple(_as_operand(item, places, size, number) for item in line.args)
    kwargs = {key: _as_operand(item, places, size, number) for key, item in line.kwargs}
    return OpCall(line.op, args, kwargs, tuple(t.shape for t in operands), tuple(t.shape for t in results))


def local_call(line: Line, values: Mapping[str, Value], mesh: Mesh) -> OpCall:
    """Return a line as one rank's call, with local shapes; a ring as the attention of one block of keys."""
    operands, results = [values[name].type for name in line.uses], [value.type for value in line.made]
    if line.op in RINGS:
        line = replace(line, op=RINGS[line.op].attention, args=tuple(RINGS[line.op].inner(line.args)))
    call = line_call(line, operands, results, lambda size: size.local(mesh))
    shapes, results_shapes = (tuple(type_.local(mesh) for type_ in types) for types in (operands, results))
    return replace(call, operands=shapes, results=results_shapes, packed=operands[0].packed if operands else None)


def _as_operand(
    item: Any, places: Iterator[int], size: Callable[[LocalSize], Any], number: Callable[[int], Any]
) -> Any:  # fmt: skip
    """Return a line's argument as a call's: the next of the places stands for each value."""
    if isinstance(item, Ref):
        return Operand(next(places))
    if isinstance(item, LocalSize):
        return size(item)
    if isinstance(item, (list, tuple)):
        return type(item)(_as_operand(inner, places, size, number) for inner in item)
    return number(item) if type(item) is int else item


# ---- stored parameters behind unsharded weights


WeightSources = Mapping[Binding, Binding]
"""The stored parameter behind each weight that UNSHARD makes, by their bindings."""
_CUT = "parc.cut_pad.default"


def converts(line: Line) -> bool:
    """Return whether a line is a conversion: its result is its operand, apart from dtype, placement and padding."""
    return (
        COLLECTIVES[line.op].keeps
        if line.op in COLLECTIVES
        else bool(facts(line.op).casts or facts(line.op).carries) or line.op == _CUT
    )


def weight_sources(programs: Mapping[str, Program]) -> dict[Binding, Binding]:
    """Return the stored parameter of each weight that UNSHARD converts from a single one."""
    if UNSHARD not in programs:
        return {}
    known = stored_sources(programs[UNSHARD], {})
    return {key: known[name] for key, name in programs[UNSHARD].main.returns if name in known}


def parts_in_weights(program: Program) -> dict[Binding, tuple[str, tuple[str, ...]]]:
    """Return the weights that UNSHARD all-gathers along dim 0, in one line and with no cast, each with its parameter's
    name and the axes: the stored shard can lie in the weight as some of its rows, and needs no memory of its own."""
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
    """Return the stored parameter of each value of a main function that is one, or that is converted from one."""
    known = {value.name: weights.get(value.binding, value.binding) for value in program.main.parameters
             if value.binding is not None and (value.kind in PARAMETERS or value.binding in weights)}  # fmt: skip
    for line in program.main.lines:
        if not line.calls_function and converts(line) and (source := known.get(line.uses[0])) is not None:
            known.update((value.name, source) for value in line.made)
    return known
