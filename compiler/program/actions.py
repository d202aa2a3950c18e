"""Actions: the pieces of a step in the order in which a role does them, with their text form ``0F2``."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

ActionKind = Literal["COUNT", "SCALE", "F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE", "STEP"]
ACTION_KINDS: tuple[ActionKind, ...] = get_args(ActionKind)
WORK: tuple[ActionKind, ActionKind] = ("F", "B")
ONCE: tuple[ActionKind, ...] = ("SCALE", "REDUCE", "STEP")
"""What a role does once a step; every other action is of one microbatch."""
AHEAD = 2
"""Receives are started so many actions before the one that waits for them, so that messages travel meanwhile."""


@dataclass(frozen=True, slots=True)
class Action:
    """``stage``, what is done, and the microbatch where it is of one; prints as ``0F2``, ``1RECV_F2``, ``0REDUCE``.

    ``SEND_F`` hands what a stage's ``F`` made to the stage after it, whose side is ``RECV_F``; ``SEND_B`` hands
    gradients to the stage before it, whose side is ``RECV_B``. What a role does once has the number of its first stage.
    """

    stage: int
    kind: ActionKind
    microbatch: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.kind in ONCE else self.microbatch}"

    def program_in(self, programs: Collection[str]) -> str:
        """The key of its program among a role's: ``2F`` where there are stages."""
        return self.kind if self.kind in programs else f"{self.stage}{self.kind}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``.

        Raises:
            ValueError: not an action.
        """
        match = re.fullmatch(r"(\d+)([A-Z_]+)(\d*)", text)
        kind = next((kind for kind in ACTION_KINDS if match is not None and kind == match[2]), None)
        if match is None or kind is None or bool(match[3]) == (kind in ONCE):
            raise ValueError(f"`{text}` is not an action such as `0F2`")
        return cls(int(match[1]), kind, int(match[3] or 0))


def accumulation(microbatches: int, *, counts: bool) -> tuple[Action, ...]:
    """One stage, its microbatches one after the other: gradient accumulation.

    >>> " ".join(map(str, accumulation(2, counts=True)))
    '0COUNT0 0COUNT1 0SCALE 0F0 0B0 0F1 0B1 0REDUCE 0STEP'
    """
    count = [Action(0, "COUNT", index) for index in range(microbatches)] if counts else []
    work = [Action(0, kind, index) for index in range(microbatches) for kind in WORK]
    return (*count, Action(0, "SCALE"), *work, Action(0, "REDUCE"), Action(0, "STEP"))


def schedule_text(timelines: Mapping[str, Sequence[Action]]) -> str:
    """``schedule.txt``: a line a role."""
    return "".join(f"{role}: {' '.join(map(str, actions))}\n" for role, actions in timelines.items())


def parse_schedule(text: str) -> dict[str, tuple[Action, ...]]:
    """The inverse of ``schedule_text``.

    Raises:
        ValueError: a line that is not ``role: actions``.
    """
    timelines = {}
    for number, line in enumerate(text.splitlines(), 1):
        role, found, actions = line.partition(": ")
        if not found:
            raise ValueError(f"line {number} of the schedule is not `role: actions`")
        timelines[role] = tuple(Action.parse(word) for word in actions.split())
    return timelines
