"""Flights of messages: where each starts, where its result is awaited, and the work that hides it between the two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from parc.compiler.analysis.communication import PlacedMessage, placed_messages
from parc.compiler.layout.collectives import COLLECTIVES, MESSAGE, RINGS, SUMS, WAIT
from parc.compiler.ops.rules import facts
from parc.compiler.program.actions import ACTIONS, FORWARD, REDUCE, UNSHARD
from parc.compiler.program.binding import Binding
from parc.compiler.program.blocks import complete, working
from parc.compiler.program.plain import on_their_way
from parc.compiler.program.program import Function, Line, Program
from parc.compiler.program.roles import Role
from parc.report_words import modules_text


@dataclass(frozen=True, slots=True)
class Flight:
    """The flight of a message. ``start`` are words for its start, by the last work before it, and ``before`` for the
    line that awaits it; ``behind`` are the modules, or operators, that compute meanwhile, in order."""

    start: str
    before: str
    behind: tuple[str, ...]

    @property
    def hidden_words(self) -> str:
        """The work that hides the message, in words."""
        return modules_text(self.behind)


class RoleMessages:
    """The messages of a role's step by their numbers, with their flights and with the values that they carry."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.placed: Sequence[PlacedMessage] = [placed for _, placed in placed_messages(role)]

    def flight(self, number: int) -> Flight:
        """Return the flight of a message."""
        placed = self.placed[number]
        program, function, index = placed.program, placed.function, placed.index
        lines = function.lines
        if placed.message.op == "send":
            row = ACTIONS[program.action]
            return Flight(
                f"at the end of {program.action}", f"{row.kind} of the stage {_beside(row.to)}", ("other actions",)
            )
        line = lines[index]
        if line.op in RINGS:
            return Flight(
                self._before(placed), "each hop by the attention of the next part", ("attention of other parts",)
            )
        if line.op not in SUMS and MESSAGE not in dict(line.kwargs):
            return Flight(self._before(placed), self._reader(placed, line.made[0].name), ())
        name = line.made[0].name
        end = next((at for at, one in enumerate(lines) if at > index and name in one.uses), len(lines))
        behind = [*self._works(program, lines[index + 1 : end], placed.message.origin.module)]
        if end < len(lines):
            awaited = lines[end].made[0].name if lines[end].op == WAIT else name
            return Flight(self._before(placed), self._reader(placed, awaited), tuple(behind))
        before, more = self._elsewhere(program, name)
        return Flight(self._before(placed), before, (*behind, *more))

    # ---- words for lines

    def _before(self, placed: PlacedMessage) -> str:
        """Return words for the start of a message: behind which work it is."""
        before = [*self._works(placed.program, placed.function.lines[: placed.index], placed.message.origin.module)]
        return f"after {before[-1]}" if before else f"at the start of {self._place(placed)}"

    def _place(self, placed: PlacedMessage) -> str:
        main = placed.function in placed.program.mains
        return placed.program.action if main else f"`{placed.function.name}`"

    def _reader(self, placed: PlacedMessage, name: str) -> str:
        """Return words for the first line that reads a value and does more than to view or to cast it."""
        for line in readers(placed.function, name):
            return line_words(placed.program, line, placed.message.origin.module)
        return f"the end of {self._place(placed)}"

    def _works(self, program: Program, lines: Sequence[Line], like: str = "") -> Iterator[str]:
        """Yield words for those lines that compute for long: products, attention, and calls of functions with such."""
        works = self._working[id(program)]
        for line in lines:
            if line.op in works or facts(line.op).precision == "product":
                yield line_words(program, line, like)

    @cached_property
    def _working(self) -> Mapping[int, frozenset[str]]:
        """The functions of each program that compute for long, by the program's identity."""
        return {id(program): working(program) for program in self.role.programs.values()}

    def _elsewhere(self, program: Program, name: str) -> tuple[str, list[str]]:
        """Return words for the line of a later program that awaits a value, and the work of that program before it."""
        coming: dict[str, Binding] = {value: key for key, value in on_their_way(program).items()}
        key, kind = coming.get(name), FORWARD if program.action == UNSHARD else REDUCE
        behind: list[str] = []
        if key is None:
            return f"the end of {program.action}", behind
        for later in (one for one in self.role.programs.values() if one.action == kind):
            bound = {value.name for value in later.main.parameters if value.binding == key}
            for index, line in enumerate(later.main.lines):
                if line.op == WAIT and line.uses[0] in bound:
                    behind += self._works(later, later.main.lines[:index])
                    first = next(readers(later.main, line.made[0].name), None)
                    return f"{line_words(later, first) if first is not None else kind}", behind
        return kind, behind


def _beside(step: int) -> str:
    return "after it" if step > 0 else "before it"


def line_words(program: Program, line: Line, like: str = "") -> str:
    """Return words for a line: `B of blocks.3` for a call, `mm` in blocks.0.up for an operator. ``like`` is a module
    with the numbers of the call, for starred ones."""
    module = complete(line.origin.module, like)
    if line.calls_function:
        return f"{program.action} of {module or f'`{line.op}`'}"
    return f"`{short_op(line.op)}`" + (f" in {module}" if module else "")


def short_op(op: str) -> str:
    """Return an operator's name without its library and overload."""
    return op.split(".")[1] if "." in op else op


def is_form(line: Line) -> bool:
    """Return whether a line only views, casts, moves or awaits a value."""
    row = facts(line.op) if not line.calls_function else None
    return row is not None and (
        line.op == WAIT or row.storage == "view" or "_to_copy" in line.op or line.op == "aten.t.default"
    )


def readers(function: Function, name: str) -> Iterator[Line]:
    """Yield the lines that read a value, in order, those behind views and casts of it included, and these left out."""
    names, lines = {name}, []
    for line in function.lines:
        if names.isdisjoint(line.uses):
            continue
        if is_form(line) and not _communicates(line):
            names.update(value.name for value in line.made)
        else:
            lines.append(line)
    yield from lines


def maker(function: Function, name: str) -> Line | str:
    """Return the line that makes a value, views and casts left out; or the name of the parameter that it is."""
    while (line := function.makers.get(name)) is not None and is_form(line) and not _communicates(line):
        name = line.uses[0]
    return name if line is None else line


def _communicates(line: Line) -> bool:
    return line.op in COLLECTIVES and COLLECTIVES[line.op].communicates
