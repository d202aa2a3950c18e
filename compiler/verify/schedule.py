"""The checker of a step's timelines: they are complete, each action comes at its place and after those it needs, and
nothing deadlocks.

It shares no code with the schedules. What kinds of actions there are, and what each reads and returns, it takes from
their table; where stages lie, from whoever has their programs. From one role to another messages are received in the
order in which they are sent, and a sender waits while ``CAPACITY`` of them are under way.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

from ..program.actions import ACTIONS, Action, ActionRow, Purpose, StageRanks, receive_kind, send_kind
from ..program.program import Fault

CAPACITY = 1
_LATE = ("after", "end")
"""The places of a step that come when all before them is done."""


def check_timelines(
    timelines: Mapping[str, Sequence[Action]], ranks: StageRanks, microbatches: int, *, also: Collection[str] = (),
    purpose: Purpose = "training",
) -> list[Fault]:  # fmt: skip
    """Return the faults of the timelines of a step's roles, given in the order of their coordinates. Stage k lies on
    ``ranks[k]``.

    ``also``: the optional kinds that the step has, as ``COUNT`` where the loss is over a count of targets. A step has
    only the kinds that serve its ``purpose``.
    """
    roles = len(timelines)
    own = [tuple(stage for stage, rank in enumerate(ranks) if rank == role) for role in range(roles)]
    even = roles and all(len(stages) * roles == len(ranks) > 0 for stages in own)
    if not even or (len(ranks) > 1 and roles == 1):
        return [_fault("schedule", f"{len(ranks)} stages are not on {roles} roles, the same number on each")]
    rows = [row for row in ACTIONS.values() if (not row.optional or row.kind in also)
            and row.serves(purpose)]  # fmt: skip
    faults = []
    for (role, actions), stages in zip(timelines.items(), own, strict=True):
        expected = dict.fromkeys(_own_actions(stages, rows, len(ranks), microbatches))
        counts = Counter(actions)
        faults += [_fault(role, f"`{a}` is there {counts[a]} times, not once") for a in expected if counts[a] != 1]
        faults += [_fault(role, f"`{a}` is not one of its actions in this step") for a in counts if a not in expected]
    if faults:
        return faults
    for role, actions in timelines.items():
        needs = _Needs(rows, actions, len(ranks))
        position = {action: index for index, action in enumerate(actions)}
        for action in actions:
            late = (need for need in needs.of(action) if position.get(need, -1) > position[action])
            faults += [_fault(role, f"`{action}` comes before `{need}`") for need in islice(late, 1)]
    return faults or _deadlock(timelines, ranks)


def _fault(where: str, message: str) -> Fault:
    return Fault("communication", where, message)


def _own_actions(stages: Sequence[int], rows: Sequence[ActionRow], count: int, microbatches: int) -> Iterator[Action]:
    """Yield each action that a role has to do in a step once. A result is sent only where the next stage is on another
    role."""
    for row in rows:
        for m in range(microbatches if row.each else 1):
            for stage in stages if row.works else stages[:1]:
                yield Action(stage, row.kind, m)
                for kind, other in ((send_kind(row.kind), stage + row.to), (receive_kind(row.kind), stage - row.to)):
                    if row.to and 0 <= other < count and other not in stages:
                        yield Action(stage, kind, m)


class _Needs:
    """The earlier actions of the same role that an action needs, derived from what kinds of actions read and return."""

    def __init__(self, rows: Sequence[ActionRow], actions: Sequence[Action], stages: int) -> None:
        self.rows, self.stages = {row.kind: row for row in rows}, stages
        self.done: dict[str, list[Action]] = defaultdict(list)
        """A role's actions by kind."""
        for action in actions:
            self.done[action.kind].append(action)
        self.late = [row.kind for place in _LATE for row in rows if row.place == place]
        self.sources = {
            row.kind: sorted((other for other in rows if other is not row and {*row.reads} & {*other.returns}),
                             key=lambda other: not other.works)
            for row in rows
        }  # fmt: skip

    def of(self, action: Action) -> Iterator[Action]:
        """Yield the actions that an action needs, with those of the role's own stages whose results no message
        brings."""
        stage, m, message = action.stage, action.microbatch, action.message
        if message is not None:
            if message.sends:
                yield Action(stage, message.work, m)
            return
        row = self.rows[action.kind]
        if row.kind in self.late:
            then = self.late[self.late.index(row.kind) :]
            yield from (other for kind, earlier in self.done.items() if kind not in then for other in earlier)
            return
        for source in self.sources[row.kind]:
            yield from [Action(stage, source.kind, m)] if row.works and source.works else self.done[source.kind]
        if row.works and row.to and 0 <= stage - row.to < self.stages:
            yield Action(stage, receive_kind(row.kind), m)
            yield Action(stage - row.to, row.kind, m)


def _deadlock(timelines: Mapping[str, Sequence[Action]], ranks: StageRanks) -> list[Fault]:
    """Run all roles together until each is done or waits for another; return a fault if some wait."""
    names = list(timelines)
    todo = {role: deque(actions) for role, actions in timelines.items()}
    wires: dict[tuple[str, str], deque[Action]] = defaultdict(deque)

    def wait(role: str) -> str:
        """Do the next action of a role, or return what it waits for."""
        action = todo[role][0]
        message = action.message
        if message is not None:
            kind = receive_kind(message.work) if message.sends else send_kind(message.work)
            other = Action(action.stage + message.to, kind, action.microbatch)
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
    return [_fault(", ".join(names), f"no role can go on: {'; '.join(stuck)}")] if stuck else []
