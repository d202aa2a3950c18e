"""Lines of a program made ready to run; while torch's profiler runs, each is a range, named by the line's place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ...compiler.program.program import Function, Line, Program
from ..communication import Environment

_Run = Callable[[Sequence[Environment]], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A line made ready: the function ``run(environments)``, the values that must have arrived before it, and the names
    that nobody reads after it. Where it is several lines, ``line`` is the last of them."""

    line: Line
    run: _Run
    awaited: tuple[str, ...]
    dead: tuple[str, ...]
    first: Line | None = None

    def in_range(self, name: str) -> Prepared:
        """Return the line as a range of a profile."""

        def run(environments: Sequence[Environment]) -> None:
            with torch.profiler.record_function(name):
                self.run(environments)

        return replace(self, run=run)


class ProfileRanges:
    """The lines of a program as ranges of a profile."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._made: dict[str, list[Prepared]] = {}

    def of(self, function: Function, lines: Sequence[Prepared]) -> list[Prepared]:
        """Return prepared lines of a function as ranges. Their names hold the file of the program and the row in it,
        what is computed, and the origin in the model and the plan."""
        if function.name not in self._made:
            rows = self._rows(function)
            self._made[function.name] = [line.in_range(self._name(line, rows)) for line in lines]
        return self._made[function.name]

    def _rows(self, function: Function) -> dict[str, int]:
        """Return the number of the row of the program's text, from 1, in which each value of a function is made."""
        text = self._program.text().split("\n")
        first = text.index(f"def {function.name}(") + len(function.parameters) + 3
        original = self._program.function(function.name)
        return {value.name: row for row, line in enumerate(original.lines, first) for value in line.made}

    def _name(self, prepared: Prepared, rows: dict[str, int]) -> str:
        program, last = self._program, prepared.line
        found = [str(rows[line.made[0].name]) for line in (prepared.first or last, last) if line.made]
        made = ", ".join(value.name for value in last.made)
        place = f"{program.role}.{program.action}.py:{'-'.join(dict.fromkeys(found))}"
        return f"{place} {made} = {last.op} | {last.origin}"
