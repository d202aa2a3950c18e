"""Planted bugs of schedules: an action is missing, there twice, another's, or before one that it waits for."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from parc.compiler.program.actions import Action

Timelines = Mapping[str, Sequence[Action]]
"""The actions of each role."""

_ONCE = ("UNSHARD", "SCALE", "LOSS", "REDUCE", "RESCALE", "STEP")
_IN_TURN = (
    ("COUNT", "SCALE"), ("F", "LOSS"), ("UNSHARD", "F"), ("REDUCE", "RESCALE"),
    *(pair for kind in "BIW" for pair in (("SCALE", kind), (kind, "REDUCE"), ("UNSHARD", kind))),
)  # fmt: skip
_OF_ONE_MICROBATCH = (
    ("RECV_F", "F"), ("F", "SEND_F"), ("I", "W"),
    *(pair for kind in "BI" for pair in (
        ("SEND_F", f"RECV_{kind}"), ("F", kind), ("RECV_B", kind), ("RECV_I", kind), (kind, f"SEND_{kind}"))),
)  # fmt: skip
_OTHER_PHASES = {
    "B": ("I", "W"), "I": ("B", "W"), "W": ("B", "I"),
    **{f"{way}_{kind}": (f"{way}_{other}",) for way in ("SEND", "RECV") for kind, other in ("BI", "IB")},
}  # fmt: skip
"""The kinds that an action of a backward may be taken for."""


def must_follow(first: Action, then: Action) -> bool:
    """Return whether an action precedes another of its role in every schedule; for two messages of one stage and kind,
    in every schedule that leaves the other side as it is."""
    if first.ahead != then.ahead:  # of two steps
        return first.ahead and then.kind in ("LOSS", "REDUCE", "STEP")
    same, kinds = (first.stage, first.microbatch) == (then.stage, then.microbatch), (first.kind, then.kind)
    messages = first.message is not None and then.message is not None and first.stage == then.stage
    messages = messages and first.kind.replace("I", "B") == then.kind.replace("I", "B")
    return then.kind == "STEP" or kinds in _IN_TURN or (same and kinds in _OF_ONE_MICROBATCH) or messages


def wrong_at(timelines: Timelines, role: str, at: int, draw: random.Random) -> Iterator[tuple[str, Timelines]]:
    """Yield timelines that are wrong in one action of a role, each with a description."""
    actions, every = tuple(timelines[role]), [action for known in timelines.values() for action in known]
    action, before, behind = actions[at], actions[:at], actions[at + 1 :]

    def put(*changed: Action) -> Timelines:
        return {**timelines, role: changed}

    yield "drop", put(*before, *behind)
    again = draw.randrange(len(actions) + 1)
    yield "twice", put(*actions[:again], action, *actions[again:])
    for other in [name for name in timelines if name != role]:
        place = draw.randrange(len(timelines[other]) + 1)
        moved = (*timelines[other][:place], action, *timelines[other][place:])
        yield "another role", {**put(*before, *behind), other: moved}
    stage = draw.choice([n for n in range(max(known.stage for known in every) + 3) if n != action.stage])
    yield "another stage", put(*before, replace(action, stage=stage), *behind)
    if action.kind not in _ONCE:
        most = max(known.microbatch for known in every)
        index = draw.choice([n for n in range(most + 3) if n != action.microbatch])
        yield "another microbatch", put(*before, replace(action, microbatch=index), *behind)
    for kind in _OTHER_PHASES.get(action.kind, ()):
        yield "another phase", put(*before, replace(action, kind=kind), *behind)
    for then, late in enumerate(behind, at + 1):
        if must_follow(action, late):
            yield "swap", put(*before, late, *actions[at + 1 : then], action, *actions[then + 1 :])
            yield "late", put(*before, *actions[at + 1 : then + 1], action, *actions[then + 1 :])
