"""A step played on a clock: the start and the end of each role's actions, and the idle time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..program.actions import ACTIONS, BACKWARD, FORWARD, Action, send_kind


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """An action with its start and its end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of every role in the order of its actions, of a simulated step or of a measured one.

    The step starts at 0; times are in the unit of what they were made of.
    """

    spans: Mapping[str, Sequence[TimeSpan]]

    @property
    def makespan(self) -> float:
        """The time at which the last role is done."""
        return max((span.end for spans in self.spans.values() for span in spans), default=0)

    def busy(self, role: str) -> float:
        """Return the time that a role works."""
        return sum(span.end - span.start for span in self.spans[role] if span.action.works)

    def idle(self, role: str) -> float:
        """Return the time that a role does not work."""
        return self.makespan - self.busy(role)

    def idle_share(self, role: str) -> float:
        """Return the fraction of the time that a role does not work: 1 - its work / the makespan."""
        return self.idle(role) / self.makespan if self.makespan else 0.0


def peak_live(actions: Sequence[Action]) -> int:
    """Return the most microbatches for which a role holds, at one time, the values that backward needs. Each stage of
    the role counts by itself.

    >>> peak_live([Action.parse(word) for word in "0F0 0F1 0B0 0F2 0B1 0B2".split()])
    2
    """
    return max(accumulate(((action.kind == FORWARD) - (action.kind == BACKWARD) for action in actions), initial=0))


Times = float | Sequence[float] | Callable[[Action], float]
"""The time of actions of a kind: one for all, one for each stage, or a function of the action."""


def simulate(
    timelines: Mapping[str, Sequence[Action]],
    forward: Times = 1,
    backward: Times = 2,
    *,
    work: Times | None = None,
    after: Times = 0,
    latency: float = 0,
) -> Timeline:
    """Play timelines whose ``F`` and ``B`` take these times, and other work its slots; with ``work``, that is the time
    of every kind of work. ``after`` each ``SEND_B``, while the message is under way, further work follows. Everything
    else takes no time. The makespan is the longest path through the work of all roles and their messages.

    A message is there ``latency`` after it was sent. Senders do not wait, as in a run, which posts receives early.

    Raises:
        ValueError: an order that never ends, or a message that is never sent.
    """
    late = send_kind(BACKWARD)
    times: dict[str, Times] = {row.kind: row.slots for row in ACTIONS.values() if row.works}
    times |= {FORWARD: forward, BACKWARD: backward} if work is None else dict.fromkeys(times, work)
    times[late] = after
    spans: dict[str, list[TimeSpan]] = {role: [] for role in timelines}
    sent: dict[Action, float] = {}
    moved = True
    while moved:
        moved = False
        for role, actions in timelines.items():
            done = spans[role]
            for action in actions[len(done) :]:
                start = done[-1].end if done else 0
                row = action.message
                if row is not None and not row.sends:
                    message = Action(action.stage + row.to, send_kind(row.work), action.microbatch)
                    if message not in sent:
                        break
                    start = max(start, sent[message] + latency)
                end = start + _taken(times.get(action.kind, 0), action)
                sent[action] = start if action.kind == late else end
                done.append(TimeSpan(action, start, end))
                moved = True
    stuck = [
        f"{role} at `{timelines[role][len(done)]}`" for role, done in spans.items() if len(done) < len(timelines[role])
    ]
    if stuck:
        raise ValueError(f"the order never ends: {', '.join(stuck)}")
    return Timeline(spans)


def _taken(times: Times, action: Action) -> float:
    if callable(times):
        return times(action)
    return times[action.stage] if isinstance(times, Sequence) else times
