"""The time of a step: the actions of all roles on one timeline, with the messages between stages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..analysis.liveness import local_bytes
from ..layout.collectives import COLLECTIVES
from ..program.actions import ACTIONS, Action, one_step, send_kind
from ..program.binding import Binding
from ..program.plain import in_reduce
from ..program.program import Program
from ..program.roles import Role
from ..schedules.timeline import Timeline, TimeSpan
from .lines import Habits
from .links import Links
from .programs import STEP_PARTS, InFlight, MessageTime, ProgramClock, ProgramTime, Spent

_SETTLED = 3
"""The steps after which ranks that do not wait for each other between steps begin each as late as in the one before."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a step: its seconds, where those of each role go, when each action runs, and what messages take."""

    seconds: float
    roles: Mapping[str, Spent]
    timeline: Timeline
    clocks: Mapping[str, Mapping[str, ProgramClock]]
    """The clocks of each role's programs, by the programs' names."""
    late: Mapping[str, Mapping[Binding, float]]
    """The waits of each role for values that another of its programs left under way, by binding."""
    sends: Mapping[Action, MessageTime]
    """The time of each message between stages, and the waits of its receivers in the step, by the sender's work without
    its microbatch."""

    @property
    def longest(self) -> str:
        """The role that waits least for others."""
        return min(self.roles, key=lambda name: self.roles[name].parts["bubble"])

    def parts(self, role: str) -> dict[str, float]:
        """Return the seconds of a role by part, which sum to those of the step."""
        return {part: self.roles[role].parts[part] for part in STEP_PARTS}


@dataclass
class _RoleClock:
    """A role on the timeline: its programs' clocks, how far it is, and what it has spent."""

    role: Role
    programs: Mapping[str, Program]
    clocks: Mapping[str, ProgramClock]
    update: float
    at: int
    """Its coordinate on the pipeline's axis."""
    now: float = 0.0
    begun: float = 0.0
    """The time at which its step begins."""
    done: list[TimeSpan] = field(default_factory=list)
    spent: Spent = field(default_factory=Spent)
    arriving: dict[Binding, InFlight] = field(default_factory=dict)
    runs: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """The runs of each main function with nothing under way, by program and whether it is that of the last
    microbatch."""
    late: defaultdict[Binding, float] = field(default_factory=lambda: defaultdict(float))
    """The waits for values that another program left under way."""

    def __post_init__(self) -> None:
        self.last = {action.stage: action for action in one_step(self.role.actions) if action.accumulates}

    def begin(self, origin: float) -> None:
        """Begin a step, whose times are from an origin on."""
        self.now = self.begun = self.now - origin
        self.done, self.spent, self.runs, self.late = [], Spent(), Counter(), defaultdict(float)

    def end(self, action: Action, until: float) -> None:
        """Note that an action ends."""
        self.done.append(TimeSpan(action, self.now, until))
        self.now = until


class StepClock:
    """The clock of a build's roles. ``updates`` are the seconds of each role's update of its parameters, and
    ``stage_line`` the line of the plan that makes stages. ``like`` is a step of the same roles on other links."""

    def __init__(
        self, roles: Mapping[str, Role], links: Links, habits: Habits, updates: Mapping[str, float],
        stage_line: int = 0, like: StepTime | None = None,
    ) -> None:  # fmt: skip
        self.links, self.habits, self.stage_line = links, habits, stage_line
        clocks: dict[int, ProgramClock] = {}
        blocks: dict[str, ProgramTime] = {}
        self._roles: dict[str, _RoleClock] = {}
        for at, (name, role) in enumerate(roles.items()):
            programs = role.programs if habits.overlap else in_reduce(role.programs)
            for key, program in programs.items():
                if id(program) not in clocks:
                    before = None if like is None else like.clocks[name][key]
                    clocks[id(program)] = ProgramClock(program, links, habits, blocks, before)
            of_role = {key: clocks[id(program)] for key, program in programs.items()}
            self._roles[name] = _RoleClock(role, programs, of_role, updates[name], at)
        self._axis = next(iter(roles.values())).axis
        self._at = {stage: clock.at for clock in self._roles.values() for stage in clock.role.stages}
        """The coordinate of each stage."""
        self._sent: dict[Action, tuple[float, float]] = {}
        """The arrival of each message between stages, and its time on the way."""
        self._sends: dict[Action, MessageTime] = {}
        self._wire: dict[tuple[int, str], float] = {}
        """The time at which the way from a stage to its neighbour is free."""
        self._joint = self._joint_kinds()
        self._reached: dict[str, dict[str, float]] = {}

    def _joint_kinds(self) -> Mapping[str, frozenset[str]]:
        """Return the kinds of actions whose programs meet those of other roles, each with the roles that have it."""
        kinds: dict[str, set[str]] = {}
        for name, clock in self._roles.items() if self.habits.barrier else ():
            for program in clock.programs.values():
                lines = (line for function in program.functions for line in function.lines if line.op in COLLECTIVES)
                if self._axis and any(self._axis in COLLECTIVES[line.op].axes(line.args[1:]) for line in lines):
                    kinds.setdefault(program.action, set()).add(name)
        return {kind: frozenset(names) for kind, names in kinds.items() if not ACTIONS[kind].works}

    def run(self) -> StepTime:
        """Return the time of a step; without a barrier that of one among many.

        Raises:
            ValueError: an order that deadlocks.
        """
        for _ in range(1 if self.habits.barrier else _SETTLED):
            self._play()
        seconds = max(clock.now - clock.begun for clock in self._roles.values())
        for clock in self._roles.values():
            clock.spent.parts["bubble"] += seconds - (clock.now - clock.begun)
            for (key, last), times in clock.runs.items():
                program = clock.programs[key]
                self._spend(clock, program, clock.clocks[key].run(program.mains[0] if last else program.main), times)
        spans = {name: tuple(clock.done) for name, clock in self._roles.items()}
        roles = self._roles.items()
        return StepTime(
            seconds, {name: clock.spent for name, clock in roles}, Timeline(spans),
            {name: clock.clocks for name, clock in roles}, {name: clock.late for name, clock in roles}, self._sends,
        )  # fmt: skip

    def _play(self) -> None:
        """Play a step. Each role begins when it has ended the one before, and times are from the first begin on."""
        origin = min(clock.now for clock in self._roles.values())
        for clock in self._roles.values():
            clock.begin(origin)
        self._wire = {wire: free - origin for wire, free in self._wire.items()}
        self._sent, self._sends, self._reached = {}, {}, {}
        moved = True
        while moved:
            moved = False
            for name, clock in self._roles.items():
                while len(clock.done) < len(clock.role.actions):
                    if not self._do(name, clock, clock.role.actions[len(clock.done)]):
                        break
                    moved = True
        if stuck := [name for name, clock in self._roles.items() if len(clock.done) < len(clock.role.actions)]:
            raise ValueError(f"the order of actions deadlocks: {', '.join(stuck)}")

    def _do(self, name: str, clock: _RoleClock, action: Action) -> bool:
        """Do an action, if what it waits for has happened."""
        row = action.message
        if row is not None:
            if row.sends:
                self._send(clock, action)
                return True
            return self._receive(clock, action)
        if action.kind in self._joint and name in self._joint[action.kind]:
            reached = self._reached.setdefault(f"{action.kind}{action.microbatch}", {})
            reached.setdefault(name, clock.now)
            if len(reached) < len(self._joint[action.kind]):
                return False
            begin = max(reached.values())
            clock.spent.parts["bubble"] += begin - clock.now
            clock.now = begin
        self._work(clock, action)
        return True

    def _work(self, clock: _RoleClock, action: Action) -> None:
        key = action.program_in(clock.programs)
        if key not in clock.clocks:  # the update, which has no program
            clock.spent.parts["optimizer"] += clock.update
            clock.end(action, clock.now + clock.update)
            return
        program, timer = clock.programs[key], clock.clocks[key]
        last = clock.last.get(action.stage) == action and program.last is not None
        main = program.mains[0] if last else program.main
        read = [value.binding for value in main.parameters if value.binding in clock.arriving] if clock.arriving else ()
        if read:
            arriving = {key: clock.arriving.pop(key) for key in read if key is not None}
            time = timer.run(
                main, {key: replace(one, arrives=one.arrives - clock.now) for key, one in arriving.items()}
            )
            self._spend(clock, program, time)
            for binding in arriving:
                clock.late[binding] += time.messages[binding].waited if binding in time.messages else 0.0
        else:
            time = timer.run(main)
            clock.runs[key, last] += 1
        for binding, message in time.left.items():
            clock.arriving[binding] = replace(message, arrives=message.arrives + clock.now + time.seconds)
        clock.end(action, clock.now + time.seconds)

    def _spend(self, clock: _RoleClock, program: Program, time: ProgramTime, times: float = 1) -> None:
        """Add what runs of a program spend. Arithmetic behind a step's work is part of the update."""
        spent = time.spent
        if ACTIONS[program.action].place == "after":
            spent = Spent(spent.parts.copy(), spent.exposed, spent.lines)
            spent.parts["optimizer"] += spent.parts.pop("products", 0.0) + spent.parts.pop("other", 0.0)
        clock.spent.add(spent, times)

    def _send(self, clock: _RoleClock, action: Action) -> None:
        row = action.message
        assert row is not None
        wire = action.stage, row.work
        seconds = self._seconds(clock, action)
        begin = max(clock.now, self._wire.get(wire, 0.0))
        self._wire[wire] = begin + seconds
        self._sent[action] = begin + seconds, seconds
        end = clock.now
        taken = seconds if self.habits.blocking_sends else self.links.cluster.device.taken_by_messages * seconds
        if taken:
            clock.spent.wait(InFlight(0, self._axis, self.stage_line), taken)
            end += taken
        clock.end(action, end)

    def _seconds(self, clock: _RoleClock, action: Action) -> float:
        """Return the time of a message between stages on its way."""
        row = action.message
        assert row is not None
        key = Action(action.stage, row.work)
        if key not in self._sends:
            program = clock.programs[key.program_in(clock.programs)]
            values = program.main.values()
            size = sum(local_bytes(values[name].type, program) for name in program.main.returned("sent").values())
            stage = action.stage + ACTIONS[key.kind].to
            self._sends[key] = MessageTime(self.links.to_stage(self._axis, clock.at, self._at[stage], size))
        return self._sends[key].seconds

    def _receive(self, clock: _RoleClock, action: Action) -> bool:
        row = action.message
        assert row is not None
        message = replace(action, stage=action.stage + row.to, kind=send_kind(row.work))
        if message not in self._sent:
            return False
        arrives, seconds = self._sent[message]
        if (waits := arrives - clock.now) > 0:
            on_the_way = min(waits, seconds)
            clock.spent.wait(InFlight(0, self._axis, self.stage_line), on_the_way)
            self._sends[Action(message.stage, row.work)].waited += on_the_way
            clock.spent.parts["bubble"] += waits - on_the_way
        clock.end(action, max(clock.now, arrives))
        return True
