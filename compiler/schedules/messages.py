"""The messages between the ranks of a schedule, placed such that no rank deadlocks."""

from __future__ import annotations

from collections.abc import Sequence

from ..program.actions import ACTIONS, Action, kinds_to, receive_kind, send_kind, stage_ranks


class Endless(ValueError):
    """The error of an order of work that deadlocks. ``way`` says what to change."""

    def __init__(self, message: str, way: str) -> None:
        super().__init__(message)
        self.way = way


def add_messages(work: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Return the timelines of work with their messages. A result is sent as soon as it is computed. It is received just
    before it is read, or before the next message from the same rank. A result for a stage of the same rank needs no
    message.

    So messages from one rank to another are in one order, and one at a time is in flight. Timelines are written in the
    order of a step whose stages take equal times, each action after all that it needs, so that no rank deadlocks. Some
    work may be of the next step, and what work needs may have been done beside the step before.

    Raises:
        Endless: the order of work deadlocks; the message says who waits for what.
        ValueError: a stage has work on two ranks.
    """
    clock, now = _Clock(work), 0
    while True:
        for rank, (end, action) in list(clock.running.items()):
            if end == now:
                del clock.running[rank]
                clock.finish(action)
        for rank, todo in enumerate(clock.todo):
            if rank not in clock.running and todo and clock.lack(todo[-1]) is None:
                clock.running[rank] = now + ACTIONS[todo[-1].kind].slots, todo[-1]
                clock.begin(todo.pop())
        if not clock.running:
            break
        now = min(end for end, _ in clock.running.values())
    for wire in [*clock.wires]:  # what the next step reads
        clock.receive(wire)
    clock.raise_waits()
    return clock.timelines


class _Clock:
    """A clock on which all ranks do their work, with the progress of each rank."""

    def __init__(self, work: Sequence[Sequence[Action]]) -> None:
        self.rank_of = stage_ranks(work)
        self.stages = range(len(self.rank_of))
        self.every = {action for actions in work for action in actions}
        self.todo = [list(reversed(actions)) for actions in work]
        self.running: dict[int, tuple[int, Action]] = {}
        """The work that each rank is doing, and the time at which it ends."""
        self.timelines: list[list[Action]] = [[] for _ in work]
        self.received: list[set[Action]] = [set() for _ in work]
        """The work whose results each rank holds."""
        self.wires: dict[tuple[int, int], Action] = {}
        """The work whose result is in flight, by sender and receiver."""
        self.before = {
            kind: [
                *((row.to, other) for other in (kinds_to(row.to) if row.to else ())),
                *((0, other) for other in row.follows if ACTIONS[other].works),
            ]
            for kind, row in ACTIONS.items()
        }
        """The work whose results each kind reads: how many stages back, and its kind."""
        self._sources: dict[Action, list[Action]] = {}

    def sources(self, action: Action) -> list[Action]:
        """Return the work whose results an action reads, of the neighbouring stage and of its own stage."""
        if action not in self._sources:
            sources = (Action(action.stage - to, kind, action.microbatch, action.ahead)
                       for to, kind in self.before[action.kind])  # fmt: skip
            self._sources[action] = [source for source in sources if source in self.every]
        return self._sources[action]

    def wire(self, action: Action) -> tuple[int, int]:
        """Return the ranks between which the result of some work goes: from, to."""
        return self.rank_of[action.stage], self.rank_of[action.stage + ACTIONS[action.kind].to]

    def is_sent(self, action: Action) -> bool:
        """Return whether the result of some work goes to another rank."""
        to = ACTIONS[action.kind].to
        if to == 0 or action.stage + to not in self.stages:
            return False
        sender, receiver = self.wire(action)
        return sender != receiver

    def lack(self, action: Action) -> Action | None:
        """Return the work that an action waits for, None if it can run."""
        received = self.received[self.rank_of[action.stage]]
        sources = (source for source in self.sources(action) if source not in received)
        return next((s for s in sources if not self.is_sent(s) or self.wires.get(self.wire(s)) != s), None)

    def raise_waits(self) -> None:
        """Raise the error of ranks that are not done and cannot go on: a wrong order within one rank, or else who waits
        for whom.

        Raises:
            Endless: there are such ranks.
        """
        stuck = [(rank, todo[-1], self.lack(todo[-1])) for rank, todo in enumerate(self.todo) if todo]
        misordered = [(rank, action, source) for rank, action, _ in stuck
                      for source in self.sources(action) if source in self.todo[rank]]  # fmt: skip
        if misordered:
            texts = [f"rank {rank} has `{action}` before `{source}`" for rank, action, source in misordered]
            way = ", ".join(f"`{source}` before `{action}`" for _, action, source in misordered)
            raise Endless(f"the order of work deadlocks: {', '.join(texts)}, which it needs", f"put {way}")
        waits = [f"rank {rank} waits with `{action}` for `{lack}` of rank {self.rank_of[lack.stage]}"
                 for rank, action, lack in stuck if lack is not None]  # fmt: skip
        if waits:
            way = "put work that other ranks wait for before work that waits for them"
            raise Endless(f"the order of work deadlocks: {', '.join(waits)}", way)

    def begin(self, action: Action) -> None:
        rank = self.rank_of[action.stage]
        for source in self.sources(action):
            if source not in self.received[rank]:
                self.receive(self.wire(source))
        self.timelines[rank].append(action)

    def finish(self, action: Action) -> None:
        rank = self.rank_of[action.stage]
        self.received[rank].add(action)
        if self.is_sent(action):
            self.receive(self.wire(action))
            self.wires[self.wire(action)] = action
            self.timelines[rank].append(_message(action, 0, send_kind(action.kind)))

    def receive(self, wire: tuple[int, int]) -> None:
        """Receive the message that is in flight on a wire, if there is one."""
        sent = self.wires.pop(wire, None)
        if sent is not None:
            self.received[wire[1]].add(sent)
            self.timelines[wire[1]].append(_message(sent, ACTIONS[sent.kind].to, receive_kind(sent.kind)))


def _message(work: Action, to: int, kind: str) -> Action:
    """Return a side of the message that carries the result of some work, so many stages on."""
    return Action(work.stage + to, kind, work.microbatch, work.ahead)
