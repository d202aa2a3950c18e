"""The messages between the ranks of a schedule: where each is sent and received, so that no rank waits for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..program.actions import Action, ActionKind

_TO: Mapping[ActionKind, int] = {"F": 1, "B": -1}
"""From a stage to the one that reads its results."""
_SEND: Mapping[ActionKind, ActionKind] = {"F": "SEND_F", "B": "SEND_B"}
_RECV: Mapping[ActionKind, ActionKind] = {"F": "RECV_F", "B": "RECV_B"}
_TIME: Mapping[ActionKind, int] = {"F": 1, "B": 2}


class Endless(ValueError):
    """Ranks that wait for each other."""


def add_messages(work: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """The timelines of ``F`` and ``B`` with what goes between ranks: a result is sent as soon as it is made, and
    received just before it is read, or before the next one comes from the same rank.

    So from one rank to another messages go in one order and one at a time is under way. The lists are written in the
    order of a step whose stages take equal times, each action after all that it needs: no rank waits for ever.

    Raises:
        Endless: the order of work never ends; the message says who waits for what.
    """
    walk, now = _Walk(work), 0
    while True:
        for rank, (end, action) in list(walk.running.items()):
            if end == now:
                del walk.running[rank]
                walk.finish(action)
        for rank, todo in enumerate(walk.todo):
            if rank not in walk.running and todo and walk.lack(todo[-1]) is None:
                walk.running[rank] = now + _TIME[todo[-1].kind], todo[-1]
                walk.begin(todo.pop())
        if not walk.running:
            break
        now = min(end for end, _ in walk.running.values())
    if waits := walk.waits():
        raise Endless(f"the order of work never ends: {', '.join(waits)}")
    return walk.made


class _Walk:
    """How far each rank has come."""

    def __init__(self, work: Sequence[Sequence[Action]]) -> None:
        self.ranks = len(work)
        self.stages = range(1 + max(action.stage for actions in work for action in actions))
        self.todo = [list(reversed(actions)) for actions in work]
        self.running: dict[int, tuple[int, Action]] = {}
        """What each rank does, and when it ends."""
        self.made: list[list[Action]] = [[] for _ in work]
        self.there: list[set[Action]] = [set() for _ in work]
        """Work of which each rank has the results."""
        self.wires: dict[tuple[int, int], Action] = {}
        """By sender and receiver: the work whose result is under way."""

    def sources(self, action: Action) -> list[Action]:
        """The work whose results an action reads."""
        stage, kind, m = action.stage, action.kind, action.microbatch
        before = [Action(stage - _TO[kind], kind, m)] if stage - _TO[kind] in self.stages else []
        return [*before, Action(stage, "F", m)] if kind == "B" else before

    def wire(self, action: Action) -> tuple[int, int]:
        """The ranks that the result of some work goes from and to."""
        return action.stage % self.ranks, (action.stage + _TO[action.kind]) % self.ranks

    def lack(self, action: Action) -> Action | None:
        """The work that an action waits for."""
        there = self.there[action.stage % self.ranks]
        sources = [source for source in self.sources(action) if source not in there]
        return next((source for source in sources if self.wires.get(self.wire(source)) != source), None)

    def waits(self) -> list[str]:
        """Why ranks that are not done cannot go on: one that is wrong by itself, or else who waits for whom."""
        found = [(rank, todo[-1], self.lack(todo[-1])) for rank, todo in enumerate(self.todo) if todo]
        own = [f"rank {rank} has `{action}` before `{action.stage}F{action.microbatch}`" for rank, action, _ in found
               if action.kind == "B" and Action(action.stage, "F", action.microbatch) in self.todo[rank]]  # fmt: skip
        return own or [f"rank {rank} waits with `{action}` for `{lack}` of rank {lack.stage % self.ranks}"
                       for rank, action, lack in found if lack is not None]  # fmt: skip

    def begin(self, action: Action) -> None:
        rank = action.stage % self.ranks
        for source in self.sources(action):
            if source not in self.there[rank]:
                self.receive(self.wire(source))
        self.made[rank].append(action)

    def finish(self, action: Action) -> None:
        rank = action.stage % self.ranks
        self.there[rank].add(action)
        if action.stage + _TO[action.kind] in self.stages:
            self.receive(self.wire(action))
            self.wires[self.wire(action)] = action
            self.made[rank].append(Action(action.stage, _SEND[action.kind], action.microbatch))

    def receive(self, wire: tuple[int, int]) -> None:
        """Take what is under way, if there is anything."""
        came = self.wires.pop(wire, None)
        if came is not None:
            self.there[wire[1]].add(came)
            self.made[wire[1]].append(Action(came.stage + _TO[came.kind], _RECV[came.kind], came.microbatch))
