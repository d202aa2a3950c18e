"""The schedule: every role's timeline does each piece of work once, after what it needs, and no role waits for ever."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from .text import Refused

BEFORE, AFTER = ("COUNT", "SCALE", "UNSHARD"), ("LOSS", "REDUCE", "LOADS", "RESCALE", "STEP")
WORK = ("F", "B", "I", "W")
"""The kinds of actions ahead of the work of a step, of the work, and behind it, in their order."""
_EACH = ("COUNT", *WORK)
"""The kinds that are done for every microbatch."""
_BACK = ("B", "I")
"""The work whose results go to the stage before: a whole backward, or the first of its two phases, I and W."""
_ACTION = re.compile(r"(\d{1,6})([A-Z_]+?)(\d{0,6})(\+?)")


class Action(NamedTuple):
    """An action of a stage, and its microbatch: ``0F2``, ``1RECV_F2``, ``0REDUCE``. One of the next step, which a role
    does before it ends this one, has a ``+``: ``0F2+``."""

    stage: int
    kind: str
    microbatch: int = 0
    ahead: bool = False

    def __str__(self) -> str:
        work = self.kind in _EACH or self.kind.startswith(("SEND_", "RECV_"))
        return f"{self.stage}{self.kind}{self.microbatch if work else ''}{'+' * self.ahead}"


Roles = Mapping[str, Sequence[Action]]


def of_one_step(actions: Sequence[Action]) -> list[Action]:
    """Return what a role does of one step, in order: what it does beside the step before comes first."""
    ahead = [action._replace(ahead=False) for action in actions if action.ahead]
    return ahead + [action for action in actions if not action.ahead]


def read_schedule(text: str) -> dict[str, list[Action]]:
    """Read ``schedule.txt``: a line for each role.

    Raises:
        Refused: a line is not ``role: actions``.
    """
    roles: dict[str, list[Action]] = {}
    for at, line in enumerate(text.splitlines(), 1):
        role, colon, actions = line.partition(": ")
        if not colon or role in roles:
            raise Refused(f"schedule.txt:{at}: is not `role: actions`")
        roles[role] = []
        for word in actions.split(" "):
            if (match := _ACTION.fullmatch(word)) is None:
                raise Refused(f"schedule.txt:{at}: `{word[:40]}` is no action")
            roles[role].append(Action(int(match[1]), match[2], int(match[3] or 0), bool(match[4])))
    return roles


def stages_of(roles: Roles) -> dict[int, str]:
    """Return the role of each stage: the one that does its forward.

    Raises:
        Refused: two roles do, or none.
    """
    stages: dict[int, str] = {}
    for role, actions in roles.items():
        for action in actions:
            if action.kind == "F" and stages.setdefault(action.stage, role) != role:
                raise Refused(
                    f"schedule.txt: {role} and {stages[action.stage]} both do the forward of stage {action.stage}"
                )
    if not stages or sorted(stages) != list(range(len(stages))):
        raise Refused("schedule.txt: the stages that do a forward are not numbered from 0 on")
    return stages


def check_schedule(roles: Roles, microbatches: int, kinds: Mapping[str, set[str]]) -> None:
    """Refuse timelines that leave out a piece of work, do one twice or too early, or stand still, in one step or where
    a role does actions of the next one beside it. ``kinds`` has the kinds of programs that each role runs.

    Raises:
        Refused: with the role and the action.
    """
    overlapping, roles = roles, {role: of_one_step(actions) for role, actions in roles.items()}
    stages = stages_of(roles)
    split = {(a.stage, a.microbatch) for actions in roles.values() for a in actions if a.kind in ("I", "W")}
    for role, actions in roles.items():
        expected = set(_expected(role, stages, microbatches, kinds[role], split))
        ahead = [action for action in expected if action.kind in BEFORE]
        done: set[Action] = set()
        for action in actions:
            if action in done or action not in expected:
                raise Refused(
                    f"schedule.txt: {role} does `{action}` {'twice' if action in done else 'that no role does'}"
                )
            for needed in _needs(action, expected, ahead, stages):
                if needed not in done:
                    raise Refused(f"schedule.txt: {role} does `{action}` before `{needed}`")
            done.add(action)
        if missing := sorted(expected - done):
            raise Refused(f"schedule.txt: {role} does not do `{missing[0]}`")
    _run(roles, stages)
    _check_overlap(overlapping, stages)


def _check_overlap(roles: Roles, stages: Mapping[int, str]) -> None:
    """Refuse actions of the next step behind what ends this one, which would read other weights, and last backwards
    that are not of their own step. What is ahead, the rest, and both together come to an end.

    Raises:
        Refused: with the role and the action.
    """
    if not any(action.ahead for actions in roles.values() for action in actions):
        return
    for role, actions in roles.items():
        kinds = [action.kind for action in actions]
        ends = min(map(kinds.index, {*AFTER}.intersection(kinds)), default=len(kinds))
        if late := [action for action in actions[ends:] if action.ahead]:
            raise Refused(f"schedule.txt: {role} does `{late[0]}` of the next step behind `{actions[ends]}`")
        for stage in (stage for stage, owner in stages.items() if owner == role):
            if not any(a.stage == stage and a.kind in ("B", "W") and not a.ahead for a in actions):
                raise Refused(f"schedule.txt: {role} does no backward of stage {stage} in the step that it ends")
    for ahead in (True, False):
        _run({role: [a for a in actions if a.ahead == ahead] for role, actions in roles.items()}, stages)
    _run(roles, stages)


def _expected(
    role: str, stages: Mapping[int, str], microbatches: int, kinds: set[str], split: Collection[tuple[int, int]]
) -> Iterator[Action]:
    """Yield all that a role does in a step. What one stage makes for another is sent where that is on another role. The
    backward of a stage and microbatch is ``split`` into I and W, or it is B."""
    here = [stage for stage, owner in stages.items() if owner == role]
    for kind in (*BEFORE, *AFTER, *sorted(kinds.difference(BEFORE, WORK, AFTER))):
        if kind in kinds:
            yield from (Action(min(here), kind, at) for at in range(microbatches if kind in _EACH else 1))
    for stage in here:
        for at in range(microbatches):
            if "F" in kinds:
                yield from _with_messages(stage, "F", "F", at, 1, role, stages)
            if kinds.intersection(("B", "I", "W")):
                own, other = ("I" if (each, at) in split else "B" for each in (stage, stage + 1))
                yield from _with_messages(stage, own, other, at, -1, role, stages)
                if own == "I":
                    yield Action(stage, "W", at)


def _with_messages(
    stage: int, kind: str, received: str, at: int, way: int, role: str, stages: Mapping[int, str]
) -> Iterator[Action]:
    """Yield work, the message with its results, and the one with the results of the work before it, ``received``."""
    yield Action(stage, kind, at)
    if stages.get(stage + way, role) != role:
        yield Action(stage, f"SEND_{kind}", at)
    if stages.get(stage - way, role) != role:
        yield Action(stage, f"RECV_{received}", at)


def _needs(action: Action, expected: set[Action], ahead: list[Action], stages: Mapping[int, str]) -> Iterator[Action]:
    """Yield what a role does before an action, among all that it does; ``ahead`` is what comes before all work."""
    stage, kind, at, _ = action
    before: list[Action] = []
    if kind == "W":
        before = [*ahead, Action(stage, "I", at)]
    elif kind in WORK:
        way, kinds = (1, ("F",)) if kind == "F" else (-1, _BACK)
        before = [*ahead, *(Action(stage, f"RECV_{each}", at) for each in kinds)]
        before += [Action(stage - way, each, at) for each in kinds]
        before += [Action(stage, "F", at)] if kind in _BACK else []
    elif kind.startswith("SEND_"):
        before = [Action(stage, kind[5:], at)]
    elif kind in BEFORE:
        before = [each for each in ahead if each.kind in BEFORE[: BEFORE.index(kind)]]
    elif kind in AFTER:
        earlier = (*WORK, *AFTER[: AFTER.index(kind)])
        before = [each for each in expected if each.kind in earlier or each.kind.startswith(("SEND_", "RECV_"))]
    yield from (each for each in before if each in expected)


def _run(roles: Roles, stages: Mapping[int, str]) -> None:
    """Run all roles together. A message between two roles waits until the one before it is received.

    Raises:
        Refused: no role can go on.
    """
    todo = {role: deque(actions) for role, actions in roles.items()}
    wires: dict[tuple[str, str], Action | None] = defaultdict(lambda: None)

    def moves(role: str, action: Action) -> bool:
        way, _, work = action.kind.partition("_")
        if way not in ("SEND", "RECV"):
            return True
        to = 1 if (work == "F") == (way == "SEND") else -1
        peer = stages[action.stage + to]
        if way == "SEND":
            if wires[role, peer] is not None:
                return False
            wires[role, peer] = action._replace(stage=action.stage + to, kind=f"RECV_{work}")
            return True
        if wires[peer, role] != action:
            return False
        wires[peer, role] = None
        return True

    moved = True
    while moved:
        moved = False
        for role, actions in todo.items():
            while actions and moves(role, actions[0]):
                actions.popleft()
                moved = True
    if stuck := [f"{role} at `{actions[0]}`" for role, actions in todo.items() if actions]:
        raise Refused(f"schedule.txt: no role can go on: {', '.join(stuck)}")
