"""Checks of communication: between stages and roles, of messages on their way, and of the roles' timelines.

Stages: neighbours agree on what they send and receive, and roles on the sums among them. All else is proved of the
whole step to which the roles' programs are joined (``join_roles``), where nothing is sent.

Timelines share no code with the schedules: the kinds of actions, and what each reads and returns, are in the table of
actions; which stages a role has follows from its programs. Messages between two roles are received in the order of
sending, and a sender waits while ``CAPACITY`` of them are under way.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from ..layout.collectives import COLLECTIVES, MESSAGE, WAIT
from ..layout.mesh import Mesh
from ..program.actions import (
    ACTIONS,
    BACKWARD,
    FORWARD,
    REDUCE,
    Action,
    ActionRow,
    Purpose,
    StageRanks,
    kinds_to,
    one_step,
    phases_of,
    receive_kind,
    send_kind,
    step_kinds,
)
from ..program.binding import Binding
from ..program.plain import SplitFault, on_their_way, whole_steps
from ..program.program import Fault, Function, Program
from ..program.roles import JoinFault, Programs, StageWork, neighbours, ranks_of, stage_key, work_programs

AMONG = "parc.all_reduce_among"


def check_stages(roles: Mapping[str, Programs], mesh: Mesh, axis: str) -> list[Fault]:
    """Return the faults of stages. A stage's work lies on one role, and roles have equally many stages. A stage gets
    what its neighbour sends, with the same types and in the same order, whether this runs B or I. B, or I and W in its
    place, read the values that F of their own stage saved.
    Roles meet in the same sums, in one order. The certificate proves what these sums are of."""
    faults = [*_place_faults(roles, mesh, axis)]
    try:
        work, places = work_programs(roles), Counter(ranks_of(roles))
        whole = work_programs(whole_steps(roles))
    except (JoinFault, SplitFault) as fault:
        return [*faults, Fault("types", "step", str(fault))]
    if len({places[rank] for rank in range(len(roles))}) > 1:
        faults.append(Fault("types", "step", f"{len(work)} stages do not lie on the roles, the same number on each"))
    for sender, receiver in neighbours(roles):
        faults += _message_faults(sender, receiver)
    ends = [(program, side) for stage, programs in work.items() for kind, program in programs.items()
            for side, to in (("sent", ACTIONS[kind].to), ("received", -ACTIONS[kind].to))
            if not to or stage + to not in work]  # fmt: skip
    for program, side in ends:
        keys = [*program.main.bindings, *(key for key, _ in program.main.returns)]
        faults += [Fault("types", f"{program.role}.{program.action} {key}", "goes beyond the ends of the pipeline")
                   for key in keys if key.kind == side]  # fmt: skip
    for programs in whole.values():
        forward, backward = programs[FORWARD], programs[BACKWARD]
        for name in sorted(forward.main.returned("saved").keys() ^ backward.main.bound("saved").keys()):
            where = f"{forward.role} {Binding('saved', name)}"
            faults.append(Fault("types", where, "is saved or read in this stage, not both"))
    faults += _buffer_faults(work)
    faults += _meeting_faults(roles, axis)
    everyone = tuple(range(mesh.size(axis)))
    return faults or [*_order_faults(roles, axis), *_metric_faults(roles, everyone)]


def _buffer_faults(work: Mapping[int, StageWork]) -> Iterator[Fault]:
    """Find buffers that one stage updates and another one reads."""
    for stage, programs in work.items():
        updated = {key for key, _ in programs[FORWARD].main.returns if key.kind == "buffer"}
        for other in (program for at in work if at != stage for program in work[at].values()):
            for key in sorted(updated.intersection(other.main.bindings)):
                yield Fault("types", f"{other.role}.{other.action} {key}", f"is updated in stage {stage}")


def _meeting_faults(roles: Mapping[str, Programs], axis: str) -> Iterator[Fault]:
    """Find collectives between roles in programs that roles do not run at the same time: only those that all roles run
    after the work may sum among roles."""
    for programs in roles.values():
        for key, program in programs.items():
            for function in program.functions:
                for line in function.lines:
                    row = COLLECTIVES.get(line.op)
                    axes = {program.mesh.owner(one) for one in row.axes(line.args[1:])} if row is not None else set()
                    may = line.op == AMONG and axes == {axis} and key in _common_programs(programs)
                    if (axis in axes or line.op == AMONG) and not may:
                        yield Fault("communication", f"{program.role}.{key}", f"has `{line.op}` over `{axis}`")


def _common_programs(programs: Programs) -> list[str]:
    """Return the kinds of the programs that all roles run after their work, in one order."""
    return [row.kind for row in step_kinds("after") if row.program == "role" and row.kind in programs]


def _place_faults(roles: Mapping[str, Programs], mesh: Mesh, axis: str) -> Iterator[Fault]:
    """Find roles that are not those of the axis, and programs of another role, mesh or action than their key says."""
    ranks = mesh.size(axis)
    if list(roles) != [f"{axis}{rank}" for rank in range(ranks)]:
        yield Fault("types", "step", f"its roles are {', '.join(roles)}, not those of the {ranks} ranks of `{axis}`")
    for name, programs in roles.items():
        for key, program in programs.items():
            stage, kind = stage_key(key) or (0, key)
            expected = name if kind in ACTIONS and ACTIONS[kind].program == "role" else f"stage{stage}"
            if program.role != expected or program.mesh != mesh or program.action != kind:
                yield Fault("types", f"{name} {key}", f"says that it is {program.action} of {program.role}")


def _message_faults(sender: Program, receiver: Program) -> Iterator[Fault]:
    """Find values that one stage sends and its neighbour does not receive so, and keys of random streams among them."""
    values = sender.main.values()
    keys = {v.name for line in sender.main.lines if line.op == "parc.stream_key.default" for v in line.made}
    for key, name in sender.main.returns:
        if key.kind == "sent" and name in keys:
            yield Fault("communication", f"{sender.role} {key}", "is a random stream's key, which lies on the CPU")
    sent = [(key.name, name, values[name].type) for key, name in sender.main.returns if key.kind == "sent"]
    received = [(value.binding.name, value.name, value.type) for value in receiver.main.parameters
                if value.binding is not None and value.binding.kind == "received"]  # fmt: skip
    if sent == received and all(key == name for key, name, _ in sent):
        return
    names, others = ([row[0] for row in rows] for rows in (sent, received))
    where = f"{sender.role}.{sender.action} to {receiver.role}.{receiver.action}"
    if names != others:
        yield Fault("communication", where, f"sends {_listed(names)}, where {_listed(others)} is received")
    else:
        row = next(a for a, b in zip(sent, received, strict=True) if a != b or a[0] != a[1])
        yield Fault("communication", where, f"`{row[0]}` has another type or name where it is received")


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def _summed_among(main: Function, name: str, everyone: tuple[int, ...]) -> str:
    """Return the operand of the sum over all roles that a value is, "" if it is none."""
    line = main.makers.get(name)
    return line.uses[0] if line is not None and line.op == AMONG and tuple(line.args[2]) == everyone else ""


def _metric_faults(roles: Mapping[str, Programs], everyone: tuple[int, ...]) -> Iterator[Fault]:
    """Find metrics that are not one sum over all roles, in each of them."""
    for programs in roles.values():
        for kind in _common_programs(programs):
            main = programs[kind].main
            for label, name in main.returned("metric").items():
                if not _summed_among(main, name, everyone):
                    yield Fault("types", f"{programs[kind].role}.{kind} {label}", "is not summed once over all roles")


def _order_faults(roles: Mapping[str, Programs], axis: str) -> Iterator[Fault]:
    """Find two roles that do not meet in the same sums in the same order."""
    meetings = [
        [(line.args[2], str(line.results[0] and line.results[0].type)) for kind in _common_programs(programs)
         for line in programs[kind].main.lines if line.op == AMONG]
        for programs in roles.values()
    ]  # fmt: skip
    for second in range(len(meetings)):
        for first in range(second):
            ours, theirs = ([m for m in meetings[rank] if {first, second} <= set(m[0])] for rank in (first, second))
            if ours != theirs:
                where = f"{axis}{first}, {axis}{second}"
                yield Fault("communication", where, "meet in other sums, or in another order")


# ---- messages: buckets of collectives that are under way while other lines run


def check_messages(programs: Programs, microbatches: int) -> Iterator[Fault]:
    """Find messages of a role that are not numbered in order or not contiguous, values that are read before their
    collective is awaited, and waits without a collective. Only two kinds of values may be awaited elsewhere: gradients
    that the last backward returns, sums over all microbatches, in REDUCE; and weights that UNSHARD returns, in every F
    that reads them, which other programs that read them follow."""
    coming = {key for program in programs.values() for key in on_their_way(program)}
    yield from _weight_problems(programs, {key for key in coming if key.kind == "weight"})
    for program in programs.values():
        for function in program.functions:
            where = f"{program.role}.{program.action} {function.name}"
            started = coming if program.action in (FORWARD, REDUCE) else ()
            unfinished = on_their_way(program) if function is program.mains[0] else ()
            for name, problem in (*_order_problems(function), *_wait_problems(function, started, unfinished)):
                yield Fault("communication", f"{where}: {name}", problem)
        if (last := program.last) is not None:
            before = last.bound("gradient").keys()
            usual = dict(program.main.returns)
            summed = {key.name for key, name in last.returns if key.kind == "gradient" and name != usual.get(key)}
            for name in sorted(before if microbatches == 1 else summed - before):
                where = f"{program.role}.{program.action} {last.name}: {name}"
                yield Fault("types", where, f"is not summed over {microbatches} microbatches")


def _weight_problems(programs: Programs, coming: set[Binding]) -> Iterator[Fault]:
    """Find weights ``coming`` from UNSHARD that a program reads though no forward before it does, and those that none
    reads. Every F awaits those that it reads; B of a stage comes after its F, and some programs after all forwards."""
    forwards = {key: coming & {*program.main.bindings} for key, program in programs.items()
                if program.action == FORWARD}  # fmt: skip
    there = set[Binding]().union(*forwards.values())
    for key, program in programs.items():
        stage = key.removesuffix(program.action)
        known = {"work": forwards.get(f"{stage}{FORWARD}"), "after": there}.get(ACTIONS[program.action].place)
        for weight in sorted(coming.intersection(program.main.bindings).difference(known or ())):
            yield Fault("communication", f"{program.role}.{program.action} {weight}", "is read on its way")
    for weight in sorted(coming - there):
        yield Fault("communication", f"UNSHARD {weight}", "is never awaited")


def _order_problems(function: Function) -> Iterator[tuple[str, str]]:
    """Find lines that are not in a message with the lines before them, or in the next one."""
    last, open_message = 0, None
    for line in function.lines:
        number = dict(line.kwargs).get(MESSAGE) if line.op in COLLECTIVES else None
        if number is None:
            open_message = None
            continue
        message = line.op, line.args[1], line.made[0].type.dtype
        if number == last and open_message != message:
            yield line.made[0].name, f"does not travel like the rest of message {number}"
        elif number not in (last, last + 1) or not COLLECTIVES[line.op].communicates:
            yield line.made[0].name, f"is in message {number} behind message {last}"
        last, open_message = number, message


def _wait_problems(
    function: Function, started: Collection[Binding], unfinished: Collection[Binding]
) -> Iterator[tuple[str, str]]:
    """Find wrong waits in a function. The parameters bound to ``started`` are under way when it begins, and results
    bound to ``unfinished`` may be when it ends."""
    coming = {line.made[0].name for line in function.lines if MESSAGE in dict(line.kwargs)}
    coming.update(value.name for value in function.parameters if value.binding in started)
    awaited: set[str] = set()
    for line in function.lines:
        for name in line.uses:
            if line.op == WAIT and (name not in coming or name in awaited):
                yield name, "is awaited, but is not on its way"
            elif line.op != WAIT and name in coming:
                yield name, f"is read by `{line.op}` on its way"
            awaited.update([name] if line.op == WAIT else [])
    elsewhere = {name for key, name in function.returns if key in unfinished} - awaited
    returned = {name for _, name in function.returns} - elsewhere
    for name in sorted((coming - awaited - elsewhere) | (coming & returned)):
        yield name, "is never awaited"


# ---- timelines


CAPACITY = 1
_LATE = ("after", "end")
"""The places of a step that come when all before them is done."""


def check_timelines(
    timelines: Mapping[str, Sequence[Action]], ranks: StageRanks, microbatches: int, *, also: Collection[str] = (),
    purpose: Purpose = "training",
) -> list[Fault]:  # fmt: skip
    """Return the faults of the timelines of a step's roles, which are in the order of their coordinates. Stage k lies
    on ``ranks[k]``.

    ``also``: the optional kinds that the step has, as ``COUNT`` where the loss is over a count of targets. A step has
    only the kinds that serve its ``purpose``. Where some actions are of the next step, those of a single step are
    checked, then the order in which two steps overlap.
    """
    overlapping, timelines = timelines, {role: one_step(actions) for role, actions in timelines.items()}
    roles = len(timelines)
    stages_of_roles = [tuple(stage for stage, rank in enumerate(ranks) if rank == role) for role in range(roles)]
    even = roles and all(len(stages) * roles == len(ranks) > 0 for stages in stages_of_roles)
    if not even or (len(ranks) > 1 and roles == 1):
        return [_timeline_fault("schedule", f"{len(ranks)} stages are not on {roles} roles, the same number on each")]
    rows = [row for row in ACTIONS.values() if (not row.optional or row.kind in also)
            and row.serves(purpose)]  # fmt: skip
    faults, listed = [], {action for actions in timelines.values() for action in actions}
    for (role, actions), stages in zip(timelines.items(), stages_of_roles, strict=True):
        expected = dict.fromkeys(_role_actions(stages, rows, len(ranks), microbatches, listed))
        counts = Counter(actions)
        messages = [f"`{a}` is there {counts[a]} times, not once" for a in expected if counts[a] != 1]
        messages += [f"`{a}` is not one of its actions in this step" for a in counts if a not in expected]
        faults += [_timeline_fault(role, message) for message in messages]
    if faults:
        return faults
    for role, actions in timelines.items():
        needs = _Needs(rows, actions, len(ranks))
        position = {action: index for index, action in enumerate(actions)}
        for action in actions:
            late = (need for need in needs.of(action) if position.get(need, -1) > position[action])
            faults += [_timeline_fault(role, f"`{action}` comes before `{need}`") for need in islice(late, 1)]
    return faults or _deadlock(timelines, ranks) or [*_overlap_faults(overlapping, ranks)]


def _overlap_faults(timelines: Mapping[str, Sequence[Action]], ranks: StageRanks) -> Iterator[Fault]:
    """Find actions of the next step behind what ends this one: they would read weights of another update. Find last
    backwards that are not of their own step, and orders in which what is ahead, what is left of a step, or both
    together never end."""
    ends = {row.kind for place in _LATE for row in step_kinds(place)}
    ahead, rest = ({role: [a for a in actions if a.ahead == of_next] for role, actions in timelines.items()}
                   for of_next in (True, False))  # fmt: skip
    if not any(ahead.values()):
        return
    for role, actions in timelines.items():
        first = next((at for at, action in enumerate(actions) if action.kind in ends), len(actions))
        for action in islice((action for action in actions[first:] if action.ahead), 1):
            yield _timeline_fault(
                role, f"`{action}` of the next step comes behind `{actions[first]}`, which ends this one"
            )
        left = {action.stage for action in rest[role] if action.accumulates}
        for stage in sorted({action.stage for action in actions if action.works} - left):
            yield _timeline_fault(role, f"no backward of stage {stage} is of the step that it ends")
    for part in (timelines, ahead, rest):
        yield from _deadlock(part, ranks)


def check_work(actions: Sequence[Action], programs: Programs) -> Iterator[Fault]:
    """Find work of a role that has no program, and programs with a function for a stage's last microbatch that are not
    the last of its work whose gradients are added up: no action runs that function."""
    keys = {action: action.program_in(programs) for action in one_step(actions) if action.works}
    for key in dict.fromkeys(keys.values()):
        if key not in programs:
            yield _timeline_fault(key, "is done, but has no program")
    lasts = {action.stage: keys[action] for action in one_step(actions) if action.accumulates}
    for key, program in programs.items():
        if program.last is not None and key not in lasts.values():
            where = f"{program.role}.{program.action} {program.last.name}"
            yield _timeline_fault(where, "is not the last work of the stage whose gradients are added up")


def _timeline_fault(where: str, message: str) -> Fault:
    return Fault("communication", where, message)


def _role_actions(
    stages: Sequence[int], rows: Sequence[ActionRow], count: int, microbatches: int, listed: Collection[Action]
) -> Iterator[Action]:
    """Yield each action that a role with these ``stages`` does once in a step. A result is sent only where the next
    stage is on another role. For each microbatch the phases of a kind of work may stand for it: they do if one of them
    is ``listed``."""

    def does(stage: int, row: ActionRow, m: int) -> bool:
        whole = row.instead_of or row.kind
        split = any(Action(stage, phase, m) in listed for phase in phases_of(whole))
        return split == bool(row.instead_of)

    for row in rows:
        for m in range(microbatches if row.each else 1):
            for stage in stages if row.works else stages[:1]:
                if does(stage, row, m):
                    yield Action(stage, row.kind, m)
                for kind, maker, other in ((send_kind(row.kind), stage, stage + row.to),
                                           (receive_kind(row.kind), stage - row.to, stage - row.to)):  # fmt: skip
                    if row.to and 0 <= other < count and other not in stages and does(maker, row, m):
                        yield Action(stage, kind, m)


class _Needs:
    """The earlier actions of the same role that an action needs, by what kinds of actions read and return."""

    def __init__(self, rows: Sequence[ActionRow], actions: Sequence[Action], stages: int) -> None:
        self.rows, self.stages = {row.kind: row for row in rows}, stages
        self.by_kind: dict[str, list[Action]] = defaultdict(list)
        for action in actions:
            self.by_kind[action.kind].append(action)
        self.late = [row.kind for place in _LATE for row in rows if row.place == place]
        self.sources = {
            row.kind: sorted((other for other in rows if other is not row and {*row.reads} & {*other.returns}),
                             key=lambda other: not other.works)
            for row in rows
        }  # fmt: skip

    def of(self, action: Action) -> Iterator[Action]:
        """Yield the actions that an action needs: where the stage before is on the same role, its work instead of a
        message."""
        stage, m, message = action.stage, action.microbatch, action.message
        if message is not None:
            if message.sends:
                yield Action(stage, message.work, m)
            return
        row = self.rows[action.kind]
        if row.kind in self.late:
            later = self.late[self.late.index(row.kind) :]
            yield from (other for kind, actions in self.by_kind.items() if kind not in later for other in actions)
            return
        for source in self.sources[row.kind]:
            yield from [Action(stage, source.kind, m)] if row.works and source.works else self.by_kind[source.kind]
        if row.works and row.to and 0 <= stage - row.to < self.stages:
            for kind in kinds_to(row.to):
                yield Action(stage, receive_kind(kind), m)
                yield Action(stage - row.to, kind, m)


def _deadlock(timelines: Mapping[str, Sequence[Action]], ranks: StageRanks) -> list[Fault]:
    """Run all roles together until each is done or waits for another; return a fault if some still wait."""
    names = list(timelines)
    todo = {role: deque(actions) for role, actions in timelines.items()}
    wires: dict[tuple[str, str], deque[Action]] = defaultdict(deque)

    def wait(role: str) -> str:
        """Do the next action of a role, or return what it waits for."""
        action = todo[role][0]
        message = action.message
        if message is not None:
            kind = receive_kind(message.work) if message.sends else send_kind(message.work)
            other = replace(action, stage=action.stage + message.to, kind=kind)
            peer = names[ranks[other.stage]]
            if message.sends:
                wire = wires[role, peer]
                if len(wire) == CAPACITY:
                    return f"until {peer} receives `{wire[0]}`"
                wire.append(other)
            else:
                wire = wires[peer, role]
                if not wire or wire[0] != action:
                    return f"and `{wire[0]}` is before it" if wire else f"for `{other}` of {peer}"
                wire.popleft()
        todo[role].popleft()
        return ""

    moved = True
    while moved:
        moved = False
        for role in names:
            while todo[role] and not wait(role):
                moved = True
    stuck = [f"{role} waits at `{todo[role][0]}` {wait(role)}" for role in names if todo[role]]
    return [_timeline_fault(", ".join(names), f"no role can go on: {'; '.join(stuck)}")] if stuck else []
