"""The checker of a step's timelines: complete, each action where it belongs and after what it needs, no deadlock.

It shares no code with the schedules. Of n stages on p roles, stage k is on role k % p. From one role to another
messages are received in the order in which they are sent, and a sender waits while ``CAPACITY`` of them are under way.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from ..program.actions import Action, ActionKind
from ..program.faults import Fault

CAPACITY = 1
_MEETS: Mapping[ActionKind, tuple[ActionKind, int]] = {
    "SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1), "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", 1),
}  # fmt: skip
"""The other side of a message, and how far its stage is."""


def check_timelines(
    timelines: Mapping[str, Sequence[Action]], stages: int, microbatches: int, *, counts: bool
) -> list[Fault]:
    """Faults of the timelines of a step's roles, which are given in the order of their coordinates.

    ``counts``: whether the loss is over a count of targets, so that every role has ``COUNT`` of every microbatch.
    """
    roles = len(timelines)
    if not roles or stages % roles or (stages > 1 and roles == 1):
        return [_fault("schedule", f"{stages} stages are not on {roles} roles, the same number on each")]
    faults = []
    for rank, (role, actions) in enumerate(timelines.items()):
        own = _own_actions(rank, roles, stages, microbatches, counts)
        found = Counter(actions)
        faults += [_fault(role, f"`{a}` is there {found[a]} times, not once") for a in own if found[a] != 1]
        faults += [_fault(role, f"`{a}` is not one of its actions in this step") for a in found if a not in own]
    if faults:
        return faults
    for role, actions in timelines.items():
        position = {action: index for index, action in enumerate(actions)}
        for action in actions:
            late = (need for need in _needs(action, actions, stages) if position[need] > position[action])
            faults += [_fault(role, f"`{action}` comes before `{need}`") for need in islice(late, 1)]
    return faults or _deadlock(timelines)


def _fault(where: str, message: str) -> Fault:
    return Fault("communication", where, message)


def _own_actions(rank: int, roles: int, stages: int, microbatches: int, counts: bool) -> dict[Action, None]:
    """What a role does in a step, each once."""
    made = [Action(rank, "SCALE"), Action(rank, "REDUCE"), Action(rank, "STEP")]
    for m in range(microbatches):
        if counts:
            made.append(Action(rank, "COUNT", m))
        for stage in range(rank, stages, roles):
            made += [Action(stage, "F", m), Action(stage, "B", m)]
            if stage > 0:
                made += [Action(stage, "RECV_F", m), Action(stage, "SEND_B", m)]
            if stage < stages - 1:
                made += [Action(stage, "SEND_F", m), Action(stage, "RECV_B", m)]
    return dict.fromkeys(made)


def _needs(action: Action, actions: Sequence[Action], stages: int) -> Iterator[Action]:
    """What a role has to do before one of its actions."""
    stage, m = action.stage, action.microbatch
    match action.kind:
        case "SCALE":
            yield from (other for other in actions if other.kind == "COUNT")
        case "F" if stage > 0:
            yield Action(stage, "RECV_F", m)
        case "B":
            yield Action(stage, "F", m)
            yield next(other for other in actions if other.kind == "SCALE")
            if stage < stages - 1:
                yield Action(stage, "RECV_B", m)
        case "SEND_F":
            yield Action(stage, "F", m)
        case "SEND_B":
            yield Action(stage, "B", m)
        case "REDUCE":
            yield from (other for other in actions if other.kind not in ("REDUCE", "STEP"))
        case "STEP":
            yield from (other for other in actions if other.kind != "STEP")


def _deadlock(timelines: Mapping[str, Sequence[Action]]) -> list[Fault]:
    """All roles run together until each is done or waits for another."""
    names = list(timelines)
    todo = {role: deque(actions) for role, actions in timelines.items()}
    wires: dict[tuple[str, str], deque[Action]] = defaultdict(deque)

    def wait(role: str) -> str:
        """Do the next action of a role, or say what it waits for."""
        action = todo[role][0]
        if action.kind in _MEETS:
            kind, far = _MEETS[action.kind]
            other = Action(action.stage + far, kind, action.microbatch)
            peer = names[other.stage % len(names)]
            if kind in ("RECV_F", "RECV_B"):
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
