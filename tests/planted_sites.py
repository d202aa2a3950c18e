"""Where a bug can be planted: a line of a function of a program, and the programs with something else there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from parc.compiler.layout.placement import TensorType
from parc.compiler.program.actions import Action
from parc.compiler.program.program import Function, Line, Program, Ref, Value, map_references

Programs = Mapping[str, Program]


@dataclass(frozen=True)
class Mutant:
    """A build with one bug: its class, what was done, and what is no longer as it was."""

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
        """The programs with other lines here; ``read`` is what later lines read in place of the result."""
        old = self.line.results[0].name if self.line.results[0] is not None else ""

        def change(name: str) -> Ref:
            return Ref(read if read is not None and name == old else name)

        after = [
            _reading(line, change) if old in line.uses() else line for line in self.function.lines[self.index + 1 :]
        ]
        returns = tuple((key, change(name).name) for key, name in self.function.returns)
        body = (*self.function.lines[: self.index], *lines, *after)
        return with_function(self.programs, self.action, replace(self.function, lines=body, returns=returns))


def _reading(line: Line, change: Callable[[str], Ref]) -> Line:
    kwargs = tuple((key, map_references(item, change)) for key, item in line.kwargs)
    return replace(line, args=map_references(line.args, change), kwargs=kwargs)


def with_function(programs: Programs, action: str, function: Function) -> Programs:
    """The programs with one function in the place of its namesake."""
    program = programs[action]
    functions = tuple(function if known.name == function.name else known for known in program.functions)
    return {**programs, action: replace(program, functions=functions)}


def sites(programs: Programs, wanted: Callable[[Line], bool]) -> Iterator[Site]:
    """Every line of every program that is wanted."""
    for action, program in programs.items():
        for function in program.functions:
            for index, line in enumerate(function.lines):
                if wanted(line):
                    yield Site(programs, action, function, index)
