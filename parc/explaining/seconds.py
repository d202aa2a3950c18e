"""Seconds of a step for explanations: what its messages, its modules and the lines of its plan take on a cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from parc.compiler.analysis.communication import PlacedMessage
from parc.compiler.clock.programs import MessageTime, ProgramClock
from parc.compiler.program.actions import Action
from parc.compiler.program.blocks import complete
from parc.compiler.program.program import Function
from parc.compiler.program.roles import stage_key
from parc.step_time import PricedStep, seconds_text


@dataclass(frozen=True, slots=True)
class LineSeconds:
    """The seconds of a step that lines of the plan, or modules, take: of work, and of waits for messages by axis."""

    work: float
    waits: Mapping[str, float]

    @property
    def all(self) -> float:
        """Both together."""
        return self.work + sum(self.waits.values())


class StepSeconds:
    """The seconds of the role of a step that waits least for others."""

    def __init__(self, step: PricedStep) -> None:
        self.step, self.time = step, step.time
        self.role = step.time.longest

    def of_lines(self, roots: set[int]) -> LineSeconds:
        """Return the seconds of lines of the plan, by their numbers; 0 is no line."""
        spent = self.time.roles[self.role]
        waits = defaultdict[str, float](float)
        for (axis, line), seconds in spent.exposed.items():
            if line in roots:
                waits[axis] += seconds
        return LineSeconds(sum(spent.lines.get(root, 0.0) for root in roots) - sum(waits.values()), waits)

    def message(self, role: str, together: Sequence[PlacedMessage], count: int) -> MessageTime:
        """Return the time of a message of a role on the links, each time, and for how long of a step, in which it
        travels ``count`` times, the role waits for it; of a send to another stage, for how long that one waits.
        ``together`` are the tensors in it."""
        first, program = together[0], together[0].program
        key, clock = next(item for item in self.time.clocks[role].items() if item[1].program is program)
        if first.message.op == "send":
            stage, kind = stage_key(key) or (0, key)
            return self.time.sends.get(Action(stage, kind), MessageTime())
        one = clock.of(first.function).messages.get(first.index, MessageTime())
        waited = one.waited * count
        if count > 1 and first.function is program.last:  # other microbatches run another function, with equal names
            name = first.function.lines[first.index].made[0].name
            at = next(at for at, line in enumerate(program.main.lines) if line.made and line.made[0].name == name)
            other = clock.of(program.main).messages.get(at, MessageTime())
            waited = one.waited + other.waited * (count - 1)
        names = {placed.function.lines[placed.index].made[0].name for placed in together}
        late = sum(self.time.late[role].get(key, 0.0) for key, name in clock.coming.items() if name in names)
        return MessageTime(one.seconds, waited + late)

    def of_modules(self, row_of: Callable[[str], str]) -> dict[str, LineSeconds]:
        """Return the seconds of modules by the row that ``row_of`` names for each."""
        role, clocks = self.step.build.roles[self.role], self.time.clocks[self.role]
        sums = defaultdict[tuple[str, str], float](float)
        for key, clock in clocks.items():
            times = sum(action.program_in(role.programs) == key for action in role.actions)
            for module, axis, seconds in _lines_below(clock, clock.program.main, ""):
                sums[module, axis] += seconds * times
        rows: dict[str, dict[str, float]] = {}
        for (module, axis), seconds in sums.items():
            row = rows.setdefault(row_of(module), {})
            row[axis] = row.get(axis, 0.0) + seconds
        return {row: LineSeconds(axes.pop("", 0.0), axes) for row, axes in rows.items()}


def sum_of(parts: Iterable[LineSeconds]) -> LineSeconds:
    """Return the seconds of several together."""
    work, waits = 0.0, defaultdict[str, float](float)
    for part in parts:
        work += part.work
        for axis, seconds in part.waits.items():
            waits[axis] += seconds
    return LineSeconds(work, waits)


def _lines_below(clock: ProgramClock, function: Function, like: str) -> Iterator[tuple[str, str, float]]:
    """Yield the module, the axis and the seconds of each line and of each wait of a function and of those that it
    calls; the axis of work is ""."""
    messages = clock.of(function).messages
    for at, (line, time) in enumerate(zip(function.lines, clock.line_times(function), strict=True)):
        module = complete(line.origin.module, like)
        if line.calls_function:
            yield from _lines_below(clock, clock.program.function(line.op), module)
            continue
        yield module, "", time.seconds
        if at in messages and messages[at].waited:
            yield module, clock.axis_of(line), messages[at].waited


def seconds_words(found: LineSeconds, whole: float) -> str:
    """Return words for seconds of a step that takes ``whole``."""
    share = f"{seconds_text(found.all)} of the {seconds_text(whole)} of a step ({found.all / whole:.1%})"
    waits = ", ".join(f"{seconds_text(seconds)} of waits over {axis}" for axis, seconds in
                      sorted(found.waits.items(), key=lambda item: -item[1]) if seconds > 0)  # fmt: skip
    return f"{share}: {seconds_text(found.work)} of work" + (f", {waits}" if waits else "")
