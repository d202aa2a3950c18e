"""The backend of the simulator: all ranks in one process, where a collective reads the pieces of all ranks at once. The
roles of a pipeline run different programs, so each is a thread, which meets the others for messages and for collectives
over the pipeline axis.

It is the strictest of all backends, so that a simulation notices each misuse of a value in flight:

- What a collective returns is NaN, or wrong whole numbers, until it is awaited.
- What is sent is read as late as any backend may read it, at the await or when the receiver takes it. So a sender that
  writes over it before that sends something else. A sum reads its operands at once, because every backend makes it in a
  copy or in memory that the caller gives away.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from ...compiler.layout.collectives import COLLECTIVES, SUMS
from ...compiler.layout.mesh import Mesh, Shape
from ..ranks.communication import Arrival, Message, PeerLost, RingPart, Sending

_JobResult = TypeVar("_JobResult")


class Stuck(RuntimeError):
    """The error of a deadlock: every role waits for another."""


@dataclass(slots=True)
class _Joint:
    """A collective of several roles: the pieces so far, by role and rank, and the results once all are there."""

    op: str
    args: list[Any]
    pieces: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    results: dict[int, Tensor] | None = None


@final
class Meeting:
    """The meeting point of the roles in one process, where they wait for each other. A deadlock is an error at once.

    One role runs at a time, until it waits. So a message is taken when its sender can go on no further by itself."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._waits: dict[int, tuple[str, Callable[[], bool]]] = {}
        self._error: BaseException | None = None
        self.messages: dict[Message, list[list[Tensor]]] = {}
        self.joints: dict[tuple[tuple[int, ...], int], _Joint] = {}
        self.joined: dict[tuple[int, tuple[int, ...]], int] = {}

    def run(self, jobs: Sequence[Callable[[], _JobResult]]) -> list[_JobResult]:
        """Run every role's job in a thread of its own; an error in one ends the others and is raised."""
        self._running, self._waits, self._error = len(jobs), {}, None
        self.messages, self.joints, self.joined = {}, {}, {}
        results: dict[int, _JobResult] = {}

        def work(number: int) -> None:
            with self._changed:  # which only waits release
                try:
                    results[number] = jobs[number]()
                except BaseException as error:
                    self._error = self._error or error
                self._running -= 1
                self._changed.notify_all()

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return [results[number] for number in range(len(jobs))]

    def change(self, make: Callable[[], None]) -> None:
        """Make a change that others may wait for."""
        with self._changed:
            make()
            self._changed.notify_all()

    def wait(self, role: int, what: str, ready: Callable[[], bool]) -> None:
        """Wait until a condition holds.

        Raises:
            Stuck: all roles that still run wait; it names for what.
            PeerLost: another role failed.
        """
        with self._changed:
            self._waits[role] = what, ready
            while not ready():
                if self._error is not None:
                    raise PeerLost(f"role {role} waited for {what}", "another role failed")
                if len(self._waits) == self._running and not any(other() for _, other in self._waits.values()):
                    waits = "; ".join(f"role {at} waits for {name}" for at, (name, _) in sorted(self._waits.items()))
                    self._error = Stuck(f"no role can go on: {waits}")
                    self._changed.notify_all()
                    raise self._error
                self._changed.wait()
            del self._waits[role]


class InProcess:
    """The backend of the simulator: of all ranks, or of those of one role, which meets the others along its
    ``axis``."""

    def __init__(self, mesh: Mesh, role: int = 0, axis: str = "", meeting: Meeting | None = None) -> None:
        self.mesh, self.role, self.axis, self._meeting = mesh, role, axis, meeting
        self._ranks: Sequence[int] = range(mesh.world)
        if meeting is not None:
            self._ranks = [rank for rank in self._ranks if mesh.coordinates(rank)[axis] == role]

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks, or those of the role."""
        return self._ranks

    def collective(
        self, op: str, args: Sequence[Any], pieces: Sequence[Tensor], spare: bool = False
    ) -> tuple[list[Tensor], Arrival | None]:
        """Start a collective, and return tensors that have the results once they are awaited. Those of a sum lie in
        spare pieces, as in a run, so that a line that wrongly reads these later is noticed."""
        row, mine = COLLECTIVES[op], dict(zip(self._ranks, pieces, strict=True))
        joint = self._meeting is not None and self.axis in row.axes(args)
        by_rank = self._jointly(op, list(args), mine) if joint else self._results(op, args, mine)
        results = [by_rank[rank] for rank in self._ranks]
        over = [spare and op in SUMS and piece.is_contiguous() for piece in pieces]
        triples = [*zip(pieces, results, over, strict=True)]
        if not row.communicates or all(len(group) == 1 for group in row.groups(self.mesh, args)):
            return [piece.copy_(result) if into else result for piece, result, into in triples], None
        started = [_unarrived(result, piece if into else torch.empty_like(result)) for piece, result, into in triples]
        if op in SUMS or joint:
            return started, _arrival_of(started, lambda: results)
        return started, _arrival_of(started, lambda: [*self._results(op, args, mine).values()])

    def message(
        self, op: str, args: Sequence[Sequence[Any]], pieces: Sequence[Sequence[Tensor]],
        spare: Sequence[bool] = (),
    ) -> tuple[list[list[Tensor]], Arrival]:  # fmt: skip
        """Start a collective for every tensor of a message."""
        over = spare or [False] * len(pieces)
        started = [self.collective(op, *one) for one in zip(args, pieces, over, strict=True)]

        def arrival() -> None:
            for _, wait in started:
                if wait is not None:
                    wait()

        return [results for results, _ in started], arrival

    def run_ring(self, op: str, axes: tuple[str, ...], parts: Sequence[RingPart]) -> list[list[Tensor]]:
        """Run all parts of each ring in turns."""
        part_of, results = dict(zip(self._ranks, parts, strict=True)), dict[int, list[Tensor]]()
        for group in self.mesh.groups(axes):
            if group[0] in part_of:
                results.update(zip(group, _in_turns([part_of[rank] for rank in group]), strict=True))
        return [results[rank] for rank in self._ranks]

    def _results(self, op: str, args: Sequence[Any], pieces: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the results of a collective in the groups whose ranks are in ``pieces``. A rank in no group keeps its
        piece."""
        row, results = COLLECTIVES[op], dict(pieces)
        for group in row.groups(self.mesh, args):
            if group[0] not in pieces:
                continue
            group_results = row.group([pieces[rank] for rank in group], args)
            for index, (rank, piece) in enumerate(zip(group, group_results, strict=True)):
                # a rank may write over its result, so no two share one
                results[rank] = piece.clone() if any(piece is other for other in group_results[:index]) else piece
        return results

    def _jointly(self, op: str, args: list[Any], mine: dict[int, Tensor]) -> dict[int, Tensor]:
        """Put this role's pieces beside those of the others; the last role to come computes all results."""
        meeting = self._meeting
        assert meeting is not None
        members = tuple(COLLECTIVES[op].members(args) or range(self.mesh.size(self.axis)))
        number = meeting.joined[self.role, members] = meeting.joined.get((self.role, members), 0) + 1

        def join() -> None:
            joint = meeting.joints.setdefault((members, number), _Joint(op, args))
            if (joint.op, joint.args) != (op, args):
                raise ValueError(f"roles differ in what they do together: {joint.op}{joint.args} and {op}{args}")
            joint.pieces[self.role] = mine
            if len(joint.pieces) == len(members):
                pieces = {rank: piece for of_role in joint.pieces.values() for rank, piece in of_role.items()}
                joint.results = self._results(op, args, pieces)

        meeting.change(join)
        joint = meeting.joints[members, number]
        meeting.wait(self.role, f"{op} over `{self.axis}`", lambda: joint.results is not None)
        assert joint.results is not None
        return joint.results

    def send(self, message: Message, pieces: Sequence[Sequence[Tensor]]) -> Sending:
        """Put the tensors where the receiver finds them."""
        meeting = self._meeting
        assert meeting is not None
        sent = [[tensor.contiguous() for tensor in tensors] for tensors in pieces]
        meeting.change(lambda: meeting.messages.__setitem__(message, sent))

        def taken() -> bool:
            return message not in meeting.messages

        what = f"stage {message.receiver} to take {message}"
        return Sending([*chain(*sent)], taken, lambda: meeting.wait(self.role, what, taken))

    def receive(self, message: Message, like: Sequence[tuple[Shape, torch.dtype]]) -> Callable[[], list[list[Tensor]]]:
        """Return a function that copies the message's tensors; it raises ``ValueError`` where they are not of these
        shapes."""
        meeting = self._meeting
        assert meeting is not None

        def take() -> list[list[Tensor]]:
            meeting.wait(self.role, f"{message} of stage {message.stage}", lambda: message in meeting.messages)
            pieces = [[tensor.clone() for tensor in tensors] for tensors in meeting.messages[message]]
            meeting.change(lambda: meeting.messages.__delitem__(message))
            if any([(tuple(tensor.shape), tensor.dtype) for tensor in tensors] != list(like) for tensors in pieces):
                raise ValueError(f"{message} does not have the shapes that stage {message.receiver} receives")
            return pieces

        return take


def _unarrived(result: Tensor, into: Tensor) -> Tensor:
    """Fill a tensor for a ``result`` that has not arrived: with NaN, or where there is none with other numbers."""
    if result.is_floating_point() or result.is_complex():
        return into.fill_(float("nan"))
    return torch.bitwise_not(result, out=into)


def _arrival_of(started: Sequence[Tensor], results: Callable[[], Sequence[Tensor]]) -> Arrival:
    """Return the function that fills tensors with their results when it is called first: several values may be awaited
    by one, and be written over since."""
    waits = [results]

    def arrival() -> None:
        if waits:
            for into, result in zip(started, waits.pop()(), strict=True):
                into.copy_(result)

    return arrival


@final
class _Hop:
    """The tensors that a part of a ring sends to the next one, which may be written over once either has waited."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._lying, self._taken = [tensor.contiguous() for tensor in tensors], list[Tensor]()

    def take(self) -> list[Tensor]:
        """Return copies of the tensors as they are at the first call."""
        self._taken = self._taken or [tensor.clone() for tensor in self._lying]
        return self._taken


def _in_turns(parts: Sequence[RingPart]) -> list[list[Tensor]]:
    """Run the parts of one ring in turns, each up to its next hop.

    Raises:
        ValueError: they make different numbers of hops.
    """
    arrivals: list[Any] = [None] * len(parts)
    results: dict[int, list[Tensor]] = {}
    while True:
        sent: list[_Hop] = []
        for place, part in enumerate(parts):
            try:
                sent.append(_Hop(part.send(arrivals[place])))
            except StopIteration as end:
                results[place] = end.value
        if len(results) == len(parts):
            return [results[place] for place in range(len(parts))]
        if results:
            raise ValueError(f"ranks {sorted(results)} of a ring make fewer hops than others")
        arrivals = [_hop_arrival(hop, sent[place - 1]) for place, hop in enumerate(sent)]


def _hop_arrival(own: _Hop, before: _Hop) -> Callable[[], list[Tensor]]:
    """Return the function by which a part of a ring waits until it has sent and received."""

    def arrival() -> list[Tensor]:
        own.take()
        return before.take()

    return arrival
