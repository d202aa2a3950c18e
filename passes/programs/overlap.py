"""Overlap: the place where each message of weights or gradients starts, and the place where it is awaited.

A collective of a main function becomes a start and an await, with other work between: what a unit (one call of a
block) reads is gathered while the units before it run, and what backward has of its gradients is summed while the next
unit runs. Tensors of one start travel in one message: lines that follow one another with the same number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...compiler.analysis.liveness import local_bytes
from ...compiler.layout.collectives import MESSAGE
from ...compiler.program.actions import ACTIONS
from ...compiler.program.blocks import working
from ...compiler.program.program import Function, Line, Program, needed
from ...compiler.program.rewriter import FreshNames, started
from ...compiler.program.roles import Programs
from .early import wait_late

_APART = ("parc.all_gather", "parc.reduce_scatter", "parc.all_gather_int8", "parc.reduce_scatter_int8")
_SUM = "parc.all_reduce"


@dataclass(frozen=True, slots=True)
class OverlapChoices:
    """The most bytes of a message (one tensor may be larger), and the number of units by which a gather runs ahead."""

    bucket: int
    ahead: int


@dataclass(slots=True)
class _Unit:
    """A call of a main function: the conversions before it, and those of its results behind it."""

    before: list[Line] = field(default_factory=list)
    call: Line | None = None
    counts: bool = True
    """False for a call without a product of what is left of a block around smaller units: nothing hides beside it."""
    behind: list[Line] = field(default_factory=list)


def overlapped(programs: Programs, choices: OverlapChoices) -> Programs:
    """Return the programs of a role with a start and an await for each gather and each sum of gradients of their main
    functions."""
    return wait_late({key: _overlapped(program, choices) for key, program in programs.items()})


def _overlapped(program: Program, choices: OverlapChoices) -> Program:
    apart = frozenset((*_APART, _SUM) if ACTIONS[program.action].works else _APART)
    mains = (
        replace(main, lines=tuple(_Overlap(program, main, choices, apart).lines()))
        if any(line.op in apart for line in main.lines) else main
        for main in program.mains
    )  # fmt: skip
    return replace(program, functions=(*program.blocks, *mains))


class _Overlap:
    def __init__(self, program: Program, main: Function, choices: OverlapChoices, apart: Collection[str]) -> None:
        self.program, self.main, self.choices, self.apart = program, main, choices, apart
        self.values = main.values()
        self.names = FreshNames.beside(main)
        self.message = 0

    def lines(self) -> Iterator[Line]:
        """Yield the lines in their new order."""
        units = _units(self.main, working(self.program))
        before = [self._steps(unit.before) for unit in units]
        waiting: list[Line] = []
        for at, unit in enumerate(units):
            distance = 0
            for near, steps in zip(units[at:], before[at:], strict=True):
                while len(steps) > 1 and distance <= self.choices.ahead * (len(steps) - 1):
                    yield from self._numbered(steps.pop(0))
                distance += near.counts
            (rest,) = before[at]
            calls = [unit.call] if unit.call is not None else []
            read = {name for line in (*rest, *calls) for name in line.uses}
            if any(value.name in read for line in waiting for value in line.made):
                yield from waiting
                waiting = []
            yield from rest
            yield from calls
            due, again = self._started(waiting, now=True) if unit.counts else ([], waiting)
            yield from self._numbered(due)
            sent, waiting = self._started(unit.behind)
            yield from self._numbered(sent)
            waiting = again + waiting
        while waiting:
            due, waiting = self._started(waiting, now=True)
            yield from self._numbered(due)

    def _steps(self, lines: Sequence[Line]) -> list[list[Line]]:
        """Return lines as steps: the starts of messages, with what goes before them; the awaits of these, with the
        starts of messages that carry on, as in two levels; and so on, and the rest."""
        steps, rest = list[list[Line]](), list(lines)
        while any(map(self._apart, rest)):
            first, rest = self._started(rest)
            steps.append(first)
        return [*steps, rest]

    def _started(self, lines: Sequence[Line], now: bool = False) -> tuple[list[Line], list[Line]]:
        """Return the lines up to the starts of the first messages, and the others: awaits of these, what reads them,
        and, unless they are due ``now``, what no message needs."""
        first: list[Line] = []
        later: list[Line] = []
        late: set[str] = set()
        _, sent = needed(lines, (name for line in lines if self._apart(line) for name in line.uses))
        for line in lines:
            feeds = any(value.name in sent for value in line.made)
            if late.intersection(line.uses) or not (self._apart(line) or feeds or now):
                later.append(line)
                late.update(value.name for value in line.made)
            elif self._apart(line):
                start, wait = started(line, self.names)
                first.append(start)
                later.append(wait)
                late.add(line.made[0].name)
            else:
                first.append(line)
        return first, later

    def _apart(self, line: Line) -> bool:
        return line.op in self.apart

    def _numbered(self, lines: Sequence[Line]) -> Iterator[Line]:
        """Yield lines with the numbers of their messages: tensors that travel alike, up to a bucket's bytes, behind the
        casts that make them."""
        yield from (line for line in lines if not self._apart(line))
        groups: dict[tuple[object, ...], list[list[Line]]] = {}
        sizes: dict[int, int] = {}
        for line in (line for line in lines if self._apart(line)):
            source = line.uses[0]
            size = max(
                local_bytes(self.values[source].type, self.program), local_bytes(line.made[0].type, self.program)
            )
            key = line.op, line.args[1], line.made[0].type.dtype
            found = groups.setdefault(key, [[]])
            if found[-1] and sizes[id(found[-1])] + size > self.choices.bucket:
                found.append([])
            found[-1].append(line)
            sizes[id(found[-1])] = sizes.get(id(found[-1]), 0) + size
        for group in (group for found in groups.values() for group in found):
            self.message += 1
            yield from (replace(line, kwargs=((MESSAGE, self.message),)) for line in group)


def _units(main: Function, works: Collection[str]) -> list[_Unit]:
    """Return a main function as units in order. A line that reads results of calls, or what these become, belongs to
    the call ahead of it; any other belongs to the call that comes next."""
    units, made = [_Unit()], set[str]()
    around = {outer for line in main.lines if line.calls_function for outer in _around(line.origin.module)}
    for line in main.lines:
        if line.calls_function:
            if units[-1].call is not None:
                units.append(_Unit())
            units[-1].call, units[-1].counts = line, line.op in works or line.origin.module not in around
            made.update(value.name for value in line.made)
        elif units[-1].call is not None and made.intersection(line.uses):
            units[-1].behind.append(line)
            made.update(value.name for value in line.made)
        else:
            if units[-1].call is not None:
                units.append(_Unit())
            units[-1].before.append(line)
    return units


def _around(module: str) -> Iterator[str]:
    """Yield the modules around a module."""
    while module := module.rpartition(".")[0]:
        yield module
