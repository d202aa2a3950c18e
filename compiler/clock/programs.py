"""The time of a program on two queues: one computes its lines in order, the other carries messages, each group's in
their order, until a line awaits them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..analysis.lifetimes import aliases
from ..analysis.liveness import local_bytes
from ..layout.collectives import COLLECTIVES, MESSAGE, RINGS, payload_bytes
from ..layout.placement import TensorType
from ..program.actions import ACTIONS, REDUCE
from ..program.binding import Binding
from ..program.plain import on_their_way
from ..program.program import Function, Line, Program
from .lines import Habits, LineTime, LineTimes
from .links import Links

STEP_PARTS = ("products", "other", "exposed", "bubble", "optimizer")
"""The parts of a role's step."""
Exposed = tuple[str, int]
"""The axis of a message, and the line of the plan that causes it."""


@dataclass
class Spent:
    """The time that a program or a role spends: by part, waits by message, and all by line of the plan."""

    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    exposed: defaultdict[Exposed, float] = field(default_factory=lambda: defaultdict(float))
    lines: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, other: Spent, times: float = 1.0) -> None:
        """Add what another one spent, so many times."""
        for part, seconds in other.parts.items():
            self.parts[part] += seconds * times
        for message, seconds in other.exposed.items():
            self.exposed[message] += seconds * times
        for line, seconds in other.lines.items():
            self.lines[line] += seconds * times

    def compute(self, line: Line, time: LineTime) -> None:
        """Add a line that computes."""
        self.parts[time.part] += time.seconds
        self.lines[line.origin.plan] += time.seconds

    def wait(self, message: InFlight, seconds: float) -> None:
        """Add a wait for a message."""
        self.parts["exposed"] += seconds
        self.exposed[message.axis, message.line] += seconds
        self.lines[message.line] += seconds


@dataclass(frozen=True, slots=True)
class InFlight:
    """A message under way: when it arrives, from the start of the program on, its axis and its line of the plan."""

    arrives: float
    axis: str
    line: int


@dataclass(frozen=True, slots=True)
class StartedMessage:
    """A message that a line starts: its seconds, its axis, and the values that arrive with it."""

    seconds: float
    axis: str
    results: Sequence[str]


@dataclass
class ProgramTime:
    """The seconds of a run of a program, where they go, and the messages that it leaves under way by binding."""

    seconds: float
    spent: Spent
    left: Mapping[Binding, InFlight] = field(default_factory=dict)


class ProgramClock:
    """The clock of one program of a role. ``blocks`` has the times of blocks by their texts, which programs share."""

    def __init__(
        self, program: Program, links: Links, habits: Habits, blocks: dict[str, ProgramTime] | None = None
    ) -> None:
        self.program, self.links, self.habits = program, links, habits
        self._times = LineTimes(program, links.cluster, habits, aliases(program))
        self._lines: dict[str, Sequence[LineTime]] = {}
        self._functions: dict[str, ProgramTime] = {}
        self._blocks = {} if blocks is None else blocks
        self._coming = on_their_way(program)

    def run(self, function: Function | None = None, arriving: Mapping[Binding, InFlight] | None = None) -> ProgramTime:
        """Return the time of a main function, with messages under way that it awaits."""
        main = function or self.program.main
        coming = arriving or {}
        bound = {value.name: coming[value.binding] for value in main.parameters
                 if value.binding is not None and value.binding in coming}  # fmt: skip
        if bound:
            return self._walk(main, bound)
        return self._of(main)

    def _of(self, function: Function) -> ProgramTime:
        if function.name not in self._functions:
            if function in self.program.mains:
                time = self._walk(function, {})
            else:
                text = function.text(self.program.mesh, self.program.action)
                time = self._blocks[text] if text in self._blocks else self._walk(function, {})
                self._blocks[text] = time
            self._functions[function.name] = time
        return self._functions[function.name]

    def _lines_of(self, function: Function) -> Sequence[LineTime]:
        if function.name not in self._lines:
            self._lines[function.name] = self._times.of(function)
        return self._lines[function.name]

    def _walk(self, function: Function, arriving: dict[str, InFlight]) -> ProgramTime:
        """Play a function: ``now`` is the time of the queue that computes, ``free`` when each group's queue is."""
        now, spent, arriving = 0.0, Spent(), dict(arriving)
        free: dict[str, float] = {}
        sizes = self._messages(function)
        taken = self.links.cluster.device.taken_by_messages
        for line, time in zip(function.lines, self._lines_of(function), strict=True):
            for name in line.uses:
                if (message := arriving.pop(name, None)) is not None and message.arrives > now:
                    spent.wait(message, message.arrives - now)
                    now = message.arrives
            if line.calls_function:
                inner = self._of(self.program.function(line.op))
                spent.add(inner.spent)
                now += inner.seconds
                continue
            spent.compute(line, time)
            now += time.seconds
            if id(line) in sizes:
                sent = sizes[id(line)]
                begin = max(now, free.get(sent.axis, 0.0))
                free[sent.axis] = begin + sent.seconds
                message = InFlight(free[sent.axis], sent.axis, line.origin.plan)
                if taken:
                    spent.wait(message, taken * sent.seconds)
                    now += taken * sent.seconds
                arriving.update((name, message) for name in sent.results)
            elif line.op in RINGS:
                more, axis = self._ring(line, function, time)
                spent.wait(InFlight(0, axis, line.origin.plan), more)
                now += more
        main = function in self.program.mains
        coming = {name: key for key, name in self._coming.items()} if main and function is self.program.mains[0] else {}
        left = dict[Binding, InFlight]()
        for _, name in function.returns:
            message = arriving.pop(name, None)
            if message is None or message.arrives <= now:
                continue
            if name in coming:
                left[coming[name]] = InFlight(message.arrives - now, message.axis, message.line)
            else:
                spent.wait(message, message.arrives - now)
                now = message.arrives
        return ProgramTime(now, spent, left)

    def _sums_gradients(self, line: Line, type_: TensorType) -> bool:
        """Return whether a message sums gradients: of blocks' weights over ranks, once a step."""
        sums = line.op in ("parc.all_reduce", "parc.reduce_scatter", "parc.all_reduce_among")
        action = self.program.action
        return sums and len(type_.shape) > 0 and (action == REDUCE or ACTIONS[action].accumulates)

    def _messages(self, function: Function) -> dict[int, StartedMessage]:
        """Return the messages of a function by the line that starts them: the first of those that travel together."""
        sizes: dict[int, tuple[str, tuple[str, ...], float, int]] = {}
        results: dict[int, list[str]] = {}
        first: dict[object, int] = {}
        values, mesh = function.values(), self.program.mesh
        for line in function.lines:
            row = COLLECTIVES.get(line.op)
            if row is None or not row.communicates or line.op in RINGS:
                continue
            axes = row.axes(line.args[1:])
            if not axes:
                continue
            members = len(row.members(line.args[1:]) or ())
            ranks = members or math.prod(map(mesh.size, axes))
            type_ = values[line.uses[0]].type
            there, rows = type_.packed or (1, 1)
            sent = row.travelling([values[name].type for name in line.uses])
            size = sum(payload_bytes(line.op, t.local(mesh), t.dtype.itemsize, ranks) for t in sent) * there // rows
            if self.habits.half_gradients and function in self.program.mains and self._sums_gradients(line, type_):
                size //= type_.dtype.itemsize // 2
            number = dict(line.kwargs).get(MESSAGE)
            key = first.setdefault((line.op, number), id(line)) if number is not None else id(line)
            before = sizes[key][2] if key in sizes else 0.0
            results.setdefault(key, []).extend(value.name for value in line.made)
            sizes[key] = line.op.removeprefix("parc."), axes, before + row.sent(size, ranks), members
        return {
            key: StartedMessage(self.links.seconds(op, axes, size, members), ",".join(mesh.joined(axes)), results[key])
            for key, (op, axes, size, members) in sizes.items()
        }

    def _ring(self, line: Line, function: Function, time: LineTime) -> tuple[float, str]:
        """Return the time of a ring beyond its attention, and its axis: in each of its steps keys and values travel
        beside the attention of the part before."""
        values, mesh = function.values(), self.program.mesh
        axes = COLLECTIVES[line.op].axes(line.args[1:])
        ranks = math.prod(map(mesh.size, axes))
        sent = COLLECTIVES[line.op].travelling([values[name].type for name in line.uses])
        size = sum(local_bytes(type_, self.program) for type_ in sent)
        hop = self.links.send(size, self.links.neighbours(axes[0]))
        beside = time.seconds / ranks
        return max(0.0, hop - beside) * (ranks - 1), ",".join(mesh.joined(axes))
