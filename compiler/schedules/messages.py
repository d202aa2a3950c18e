"""The messages between the ranks of a schedule, sent and received at such places that no rank waits forever."""

from __future__ import annotations

from collections.abc import Sequence

from ..program.actions import ACTIONS, Action, receive_kind, send_kind, stage_ranks


class Endless(ValueError):
    """The error of ranks that wait for each other."""


def add_messages(work: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Return the timelines of work with their messages. A result is sent as soon as it is made. It is received just
    before it is read, or before the next message from the same rank. A result for a stage of the same rank needs no
    message.

    So from one rank to another messages go in one order and one at a time is under way. The lists are written in the
    order of a step whose stages take equal times, each action after all that it needs: no rank waits for ever.

    Raises:
        Endless: the order of work never ends; the message says who waits for what.
        ValueError: a stage has work on two ranks.
    """
    walk, now = _Walk(work), 0
    while True:
        for rank, (end, action) in list(walk.running.items()):
            if end == now:
                del walk.running[rank]
                walk.finish(action)
        for rank, todo in enumerate(walk.todo):
            if rank not in walk.running and todo and walk.lack(todo[-1]) is None:
                walk.running[rank] = now + ACTIONS[todo[-1].kind].slots, todo[-1]
                walk.begin(todo.pop())
        if not walk.running:
            break
        now = min(end for end, _ in walk.running.values())
    if waits := walk.waits():
        raise Endless(f"the order of work never ends: {', '.join(waits)}")
    return walk.made


class _Walk:
    """A walk through all ranks' work in time, with the progress of each rank."""

    def __init__(self, work: Sequence[Sequence[Action]]) -> None:
        self.rank_of = stage_ranks(work)
        self.stages = range(len(self.rank_of))
        self.todo = [list(reversed(actions)) for actions in work]
        self.running: dict[int, tuple[int, Action]] = {}
        """The work that each rank is doing, and the time at which it ends."""
        self.made: list[list[Action]] = [[] for _ in work]
        self.there: list[set[Action]] = [set() for _ in work]
        """The work whose results each rank has."""
        self.wires: dict[tuple[int, int], Action] = {}
        """The work whose result is under way, by sender and receiver."""
        self.follows = {kind: [other for other in row.follows if ACTIONS[other].works] for kind, row in ACTIONS.items()}

    def sources(self, action: Action) -> list[Action]:
        """Return the work whose results an action reads: that of the neighbour's stage, and that of its own."""
        stage, kind, m = action.stage, action.kind, action.microbatch
        to = ACTIONS[kind].to
        before = [Action(stage - to, kind, m)] if to and stage - to in self.stages else []
        return [*before, *(Action(stage, other, m) for other in self.follows[kind])]

    def wire(self, action: Action) -> tuple[int, int]:
        """Return the ranks between which the result of some work goes: from, to."""
        return self.rank_of[action.stage], self.rank_of[action.stage + ACTIONS[action.kind].to]

    def is_sent(self, action: Action) -> bool:
        """Return whether the result of some work goes to another rank."""
        to = ACTIONS[action.kind].to
        return to != 0 and action.stage + to in self.stages and len({*self.wire(action)}) > 1

    def lack(self, action: Action) -> Action | None:
        """Return the work that an action waits for."""
        there = self.there[self.rank_of[action.stage]]
        sources = (source for source in self.sources(action) if source not in there)
        return next((s for s in sources if not self.is_sent(s) or self.wires.get(self.wire(s)) != s), None)

    def waits(self) -> list[str]:
        """Return the reasons why ranks that are not done cannot go on: a wrong order within one rank, or else who waits
        for whom."""
        stuck = [(rank, todo[-1], self.lack(todo[-1])) for rank, todo in enumerate(self.todo) if todo]
        own = [f"rank {rank} has `{action}` before `{source}`" for rank, action, _ in stuck
               for source in self.sources(action) if source in self.todo[rank]]  # fmt: skip
        return own or [f"rank {rank} waits with `{action}` for `{lack}` of rank {self.rank_of[lack.stage]}"
                       for rank, action, lack in stuck if lack is not None]  # fmt: skip

    def begin(self, action: Action) -> None:
        rank = self.rank_of[action.stage]
        for source in self.sources(action):
            if source not in self.there[rank]:
                self.receive(self.wire(source))
        self.made[rank].append(action)

    def finish(self, action: Action) -> None:
        rank = self.rank_of[action.stage]
        self.there[rank].add(action)
        if self.is_sent(action):
            self.receive(self.wire(action))
            self.wires[self.wire(action)] = action
            self.made[rank].append(Action(action.stage, send_kind(action.kind), action.microbatch))

    def receive(self, wire: tuple[int, int]) -> None:
        """Take a message that is under way, if there is one."""
        came = self.wires.pop(wire, None)
        if came is not None:
            to = came.stage + ACTIONS[came.kind].to
            self.there[wire[1]].add(came)
            self.made[wire[1]].append(Action(to, receive_kind(came.kind), came.microbatch))
