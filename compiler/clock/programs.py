"""The time of a program on two queues: one computes its lines in order, the other carries messages, each group's in
their order, until a line awaits them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..analysis.communication import bytes_put_in
from ..analysis.lifetimes import Aliases, aliases
from ..layout.collectives import COLLECTIVES, MESSAGE, RINGS
from ..layout.placement import TensorType
from ..layout.sweep import greatest, none
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


MessageKey = int | Binding
"""A message of a function: the number of the line that starts it, or the binding of a value that comes under way."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A message under way: when it arrives, from the start of the program on, its axis and its line of the plan."""

    arrives: float
    axis: str
    line: int
    key: MessageKey = -1


@dataclass(frozen=True, slots=True)
class StartedMessage:
    """A message that a line starts: its seconds, its axis, and the values that arrive with it."""

    seconds: float
    axis: str
    results: Sequence[str]


@dataclass
class MessageTime:
    """The seconds of a message on the links, and for how many of these a function waits for it."""

    seconds: float = 0.0
    waited: float = 0.0


@dataclass
class ProgramTime:
    """The seconds of a run of a program, where they go, and the messages that it leaves under way by binding.
    ``messages`` are those of the function itself, without those of functions that it calls."""

    seconds: float
    spent: Spent
    left: Mapping[Binding, InFlight] = field(default_factory=dict)
    messages: Mapping[MessageKey, MessageTime] = field(default_factory=dict)


class ProgramClock:
    """The clock of one program of a role. ``blocks`` has the times of blocks by their texts, which programs share, and
    ``like`` the times of lines, which do not depend on links."""

    def __init__(
        self, program: Program, links: Links, habits: Habits, blocks: dict[str, ProgramTime] | None = None,
        like: ProgramClock | None = None, views: Mapping[str, Aliases] | None = None,
    ) -> None:  # fmt: skip
        self.program, self.links, self.habits = program, links, habits
        times = None if like is None else like._times
        self._times: LineTimes = times or LineTimes(program, links.cluster, habits, views or aliases(program))
        self._lines: dict[str, Sequence[LineTime]] = {} if like is None else like._lines
        self._functions: dict[str, ProgramTime] = {}
        self._blocks = {} if blocks is None else blocks
        self.coming = on_their_way(program)

    def run(self, function: Function | None = None, arriving: Mapping[Binding, InFlight] | None = None) -> ProgramTime:
        """Return the time of a main function, with messages under way that it awaits."""
        main = function or self.program.main
        if not arriving:
            return self.of(main)
        bound = {value.name: arriving[value.binding] for value in main.parameters
                 if value.binding is not None and value.binding in arriving}  # fmt: skip
        return self._walk(main, bound)

    def of(self, function: Function) -> ProgramTime:
        """Return the time of a run of a function, of a main one with nothing under way."""
        if function.name not in self._functions:
            if function in self.program.mains:
                time = self._walk(function, {})
            else:
                text = function.text(self.program.mesh, self.program.action)
                time = self._blocks[text] if text in self._blocks else self._walk(function, {})
                self._blocks[text] = time
            self._functions[function.name] = time
        return self._functions[function.name]

    def line_times(self, function: Function) -> Sequence[LineTime]:
        """Return the time of each line of a function, without those of functions that it calls."""
        if function.name not in self._lines:
            self._lines[function.name] = self._times.of(function)
        return self._lines[function.name]

    def _walk(self, function: Function, coming: Mapping[str, InFlight]) -> ProgramTime:
        """Play a function: ``now`` is the time of the queue that computes, ``free`` when each group's queue is."""
        now, spent, arriving = 0.0, Spent(), dict(coming)
        free: dict[str, float] = {}
        started = self._messages(function)
        times = defaultdict[MessageKey, MessageTime](MessageTime)
        taken = self.links.cluster.device.taken_by_messages

        def wait(message: InFlight, seconds: float) -> float:
            if none(seconds):
                return 0.0
            spent.wait(message, seconds)
            times[message.key].waited += seconds
            return seconds

        for at, (line, time) in enumerate(zip(function.lines, self.line_times(function), strict=True)):
            for name in line.uses:
                if (message := arriving.pop(name, None)) is not None:
                    now += wait(message, greatest(message.arrives - now, 0.0))
            if line.calls_function:
                inner = self.of(self.program.function(line.op))
                spent.add(inner.spent)
                now += inner.seconds
                continue
            spent.compute(line, time)
            now += time.seconds
            if (sent := started.get(at)) is not None:
                free[sent.axis] = greatest(now, free.get(sent.axis, 0.0)) + sent.seconds
                message = InFlight(free[sent.axis], sent.axis, line.origin.plan, at)
                times[at].seconds = sent.seconds
                if taken:
                    now += wait(message, taken * sent.seconds)
                arriving.update((name, message) for name in sent.results)
            elif line.op in RINGS:
                travels, more, axis = self._ring(line, function, time)
                times[at].seconds = travels
                now += wait(InFlight(0, axis, line.origin.plan, at), more)
        bindings = {name: key for key, name in self.coming.items()} if function is self.program.mains[0] else {}
        left = dict[Binding, InFlight]()
        for _, name in function.returns:
            message = arriving.pop(name, None)
            if message is None:
                continue
            late = greatest(message.arrives - now, 0.0)
            if none(late):
                continue
            if name in bindings:
                left[bindings[name]] = InFlight(late, message.axis, message.line, bindings[name])
            else:
                now += wait(message, late)
        return ProgramTime(now, spent, left, times)

    def axis_of(self, line: Line) -> str:
        """Return the axes of a message's line, as texts name them."""
        return ",".join(self.program.mesh.joined(COLLECTIVES[line.op].axes(line.args[1:])))

    def _sums_gradients(self, line: Line, type_: TensorType) -> bool:
        """Return whether a message sums gradients: of blocks' weights over ranks, once a step."""
        sums = line.op in ("parc.all_reduce", "parc.reduce_scatter", "parc.all_reduce_among")
        action = self.program.action
        return sums and len(type_.shape) > 0 and (action == REDUCE or ACTIONS[action].accumulates)

    def _messages(self, function: Function) -> dict[int, StartedMessage]:
        """Return the messages of a function by the number of the line that starts them: the first of those that travel
        together."""
        sizes: dict[int, tuple[str, tuple[str, ...], int, int]] = {}
        results: dict[int, list[str]] = {}
        first: dict[object, int] = {}
        values, mesh = function.values(), self.program.mesh
        for at, line in enumerate(function.lines):
            row = COLLECTIVES.get(line.op)
            if row is None or not row.communicates or line.op in RINGS:
                continue
            axes = row.axes(line.args[1:])
            if not axes:
                continue
            members = len(row.members(line.args[1:]) or ())
            ranks = members or math.prod(map(mesh.size, axes))
            type_ = values[line.uses[0]].type
            size = bytes_put_in(line, values, mesh, ranks)
            if self.habits.half_gradients and function in self.program.mains and self._sums_gradients(line, type_):
                size //= type_.dtype.itemsize // 2
            number = dict(line.kwargs).get(MESSAGE)
            key = first.setdefault((line.op, number), at) if number is not None else at
            before = sizes[key][2] if key in sizes else 0
            results.setdefault(key, []).extend(value.name for value in line.made)
            sizes[key] = line.op.removeprefix("parc."), axes, before + size, members
        return {
            key: StartedMessage(self.links.seconds(op, axes, size, members), ",".join(mesh.joined(axes)), results[key])
            for key, (op, axes, size, members) in sizes.items()
        }

    def _ring(self, line: Line, function: Function, time: LineTime) -> tuple[float, float, str]:
        """Return the time of a ring's hops, that beyond its attention, and its axis: in each of its steps keys and
        values travel beside the attention of the part before."""
        mesh = self.program.mesh
        axes = COLLECTIVES[line.op].axes(line.args[1:])
        ranks = math.prod(map(mesh.size, axes))
        hop = self.links.hop(axes[0], bytes_put_in(line, function.values(), mesh, ranks))
        more = greatest(0.0, hop - time.seconds / ranks)
        return hop * (ranks - 1), more * (ranks - 1), ",".join(mesh.joined(axes))
