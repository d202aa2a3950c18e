"""Places where a bug can be planted: a line of a function of a program, and the programs with something else there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from parc.compiler.layout.placement import TensorType
from parc.compiler.program.actions import Action
from parc.compiler.program.program import Function, Line, Program, Ref, Value, map_references

Programs = Mapping[str, Program]
"""Programs by action, or by the names of their files: ``stage0.F``."""
Mutants = Iterator[tuple[str, Programs]]
"""Pairs of what was done and the programs with it."""


@dataclass(frozen=True)
class Mutant:
    """A build with one bug: its class, its description, and the parts that changed."""

    kind: str
    what: str
    programs: Programs
    actions: Sequence[Action] | None = None


@dataclass(frozen=True)
class Site:
    """One line of one function of one program."""

    programs: Programs
    action: str
    function: Function
    index: int

    @property
    def line(self) -> Line:
        return self.function.lines[self.index]

    @property
    def result(self) -> Value:
        (value,) = self.line.results
        assert value is not None
        return value

    @property
    def source(self) -> Ref:
        source = self.line.args[0]
        assert isinstance(source, Ref)
        return source

    @property
    def operand(self) -> TensorType:
        return self.function.values()[self.source.name].type

    def named(self, change: str) -> str:
        return f"{change} {self.action} {self.function.name}: {self.result.name} = {self.line.op}{self.line.args[1:]}"

    def replaced(self, *lines: Line, read: str | None = None) -> Programs:
        """Return the programs with other lines here; ``read`` is the value that later lines read in place of the
        result."""
        old = self.line.results[0].name if self.line.results[0] is not None else ""
        function = reading(self.function, old, old if read is None else read, self.index + 1)
        body = (*function.lines[: self.index], *lines, *function.lines[self.index + 1 :])
        return with_function(self.programs, self.action, replace(function, lines=body))


def sites(programs: Programs, wanted: str | Callable[[Line], bool], *actions: str) -> Iterator[Site]:
    """Yield every wanted line, or every line of an operator: in all programs, or in those of some actions or names."""
    for action, program in programs.items():
        for function in program.functions if not actions or {action, program.action} & set(actions) else ():
            for index, line in enumerate(function.lines):
                if line.op == wanted if isinstance(wanted, str) else wanted(line):
                    yield Site(programs, action, function, index)


def reading(function: Function, old: str, new: str, start: int = 0) -> Function:
    """Return the function with a new value for an old one where its lines read, from a line on, and in its returns."""

    def change(name: str) -> Ref:
        return Ref(new if name == old else name)

    lines = [
        replace(line, args=map_references(line.args, change),
                kwargs=tuple((key, map_references(item, change)) for key, item in line.kwargs))
        if at >= start and old in line.uses else line for at, line in enumerate(function.lines)
    ]  # fmt: skip
    returns = tuple((key, change(name).name) for key, name in function.returns)
    return replace(function, lines=tuple(lines), returns=returns)


def through(function: Function, name: str, steps: Sequence[tuple[str, tuple[Any, ...], torch.dtype]]) -> Function:
    """Return the function with a value going through some operators as soon as it is there; casts need no arguments."""
    value = function.values()[name]
    at = next((place + 1 for place, line in enumerate(function.lines) if value in line.results), 0)
    lines, last = [], name
    for place, (op, args, dtype) in enumerate(steps):
        made = Value(f"{name}_through_{place}", replace(value.type, dtype=dtype))
        kwargs = (("dtype", dtype),) if op == "aten._to_copy.default" else ()
        lines.append(Line((made,), op, (Ref(last), *args), kwargs, function.lines[max(at - 1, 0)].origin))
        last = made.name
    later = reading(function, name, last, at)
    return replace(later, lines=(*later.lines[:at], *lines, *later.lines[at:]))


def with_argument(line: Line, place: int, item: Any) -> Line:
    """Return the line with another argument at a place."""
    return replace(line, args=(*line.args[:place], item, *line.args[place + 1 :]))


def stacked(site: Site, items: list[Any]) -> Line:
    """Return a stacking line with other items."""
    longer = replace(site.result, type=replace(site.result.type, shape=(len(items),)))
    return replace(site.line, results=(longer,), args=(items,))


def with_lines(programs: Programs, action: str, changed: Mapping[int, Line]) -> Programs:
    """Return the programs with some lines of a main function replaced."""
    lines = programs[action].main.lines
    return with_main(programs, action, lines=tuple(changed.get(at, line) for at, line in enumerate(lines)))


def with_main(programs: Programs, action: str, **changes: Any) -> Programs:
    """Return the programs with parts of a main function replaced."""
    return with_function(programs, action, replace(programs[action].main, **changes))


def with_function(programs: Programs, action: str, function: Function) -> Programs:
    """Return the programs with one function in place of its namesake."""
    program = programs[action]
    functions = tuple(function if known.name == function.name else known for known in program.functions)
    return {**programs, action: replace(program, functions=functions)}
