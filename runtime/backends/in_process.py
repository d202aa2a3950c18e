"""The backend of the simulator: all ranks in one process, where a collective reads the pieces of all ranks at once. The
roles of a pipeline run different programs, so each is a thread, which meets the others for messages and for collectives
over the pipeline axis."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from ...compiler.layout.collectives import COLLECTIVES, SUMS
from ...compiler.layout.mesh import Mesh, Shape
from ..ranks.communication import Message, PeerLost, RingPart, Sending, wait_for_nothing

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
    """The meeting point of the roles in one process, where they wait for each other. A deadlock is an error at once."""

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
            failure: BaseException | None = None
            try:
                results[number] = jobs[number]()
            except BaseException as error:
                failure = error
            with self._changed:
                self._error = self._error or failure
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
    ) -> tuple[list[Tensor], None]:
        """Return the results of every group from its pieces in axis order. A sum is written over spare pieces, as in a
        run, so that a line that wrongly reads them later is noticed."""
        row = COLLECTIVES[op]
        mine = dict(zip(self._ranks, pieces, strict=True))
        if self._meeting is not None and self.axis in row.axes(args):
            by_rank = self._jointly(self._meeting, op, list(args), mine)
        else:
            by_rank = self._results(op, args, mine)
        results = [by_rank[rank] for rank in self._ranks]
        if spare and op in SUMS:
            results = [
                piece.copy_(result) if piece.is_contiguous() else result
                for piece, result in zip(pieces, results, strict=True)
            ]
        return results, None

    def message(
        self, op: str, args: Sequence[Sequence[Any]], pieces: Sequence[Sequence[Tensor]],
        spare: Sequence[bool] = (),
    ) -> tuple[list[list[Tensor]], None]:  # fmt: skip
        """Return the results of every tensor of a message."""
        over = spare or [False] * len(pieces)
        return [self.collective(op, *one)[0] for one in zip(args, pieces, over, strict=True)], None

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

    def _jointly(self, meeting: Meeting, op: str, args: list[Any], mine: dict[int, Tensor]) -> dict[int, Tensor]:
        """Put this role's pieces beside those of the others; the last role to come computes all results."""
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
        """Put copies where the receiver finds them: the sender may write over its own tensors."""
        meeting = self._meeting
        assert meeting is not None
        copies = [[tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors] for tensors in pieces]
        meeting.change(lambda: meeting.messages.__setitem__(message, copies))
        return Sending((), lambda: True, wait_for_nothing)

    def receive(self, message: Message, like: Sequence[tuple[Shape, torch.dtype]]) -> Callable[[], list[list[Tensor]]]:
        """Return a function that takes the message's tensors; it raises ``ValueError`` where they are not of these
        shapes."""
        meeting = self._meeting
        assert meeting is not None

        def take() -> list[list[Tensor]]:
            meeting.wait(self.role, f"{message} of stage {message.stage}", lambda: message in meeting.messages)
            pieces = meeting.messages.pop(message)
            if any([(tuple(tensor.shape), tensor.dtype) for tensor in tensors] != list(like) for tensors in pieces):
                raise ValueError(f"{message} does not have the shapes that stage {message.receiver} receives")
            return pieces

        return take


def _in_turns(parts: Sequence[RingPart]) -> list[list[Tensor]]:
    """Run the parts of one ring in turns, each up to its next hop.

    Raises:
        ValueError: they make different numbers of hops.
    """
    arrivals: list[Any] = [None] * len(parts)
    results: dict[int, list[Tensor]] = {}
    while True:
        sent: list[list[Tensor]] = []
        for place, part in enumerate(parts):
            try:
                sent.append([tensor.clone() for tensor in part.send(arrivals[place])])
            except StopIteration as end:
                results[place] = end.value
        if len(results) == len(parts):
            return [results[place] for place in range(len(parts))]
        if results:
            raise ValueError(f"ranks {sorted(results)} of a ring make fewer hops than others")
        arrivals = [partial(list, sent[place - 1]) for place in range(len(parts))]
