"""The backend of a run: torch.distributed with one rank a process, gloo on CPUs and NCCL on GPUs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from ...compiler.layout.collectives import COLLECTIVES, SUMS
from ...compiler.layout.mesh import Mesh, Shape
from ...compiler.program.actions import ACTIONS, StageRanks, direction_of, step_kinds
from ...compiler.program.program import Program
from ..ranks.communication import Message, PeerLost, RingPart, Sending
from ..ranks.processes import HOLDERS, new_group
from ..ranks.waits import WAITS
from .moves import RUN, START

_MOST_TENSORS = 4096
"""The most tensors of one message: the distance between the tags of two messages."""
_Arrived = TypeVar("_Arrived")
GroupPlace = tuple[tuple[str, ...], tuple[int, ...] | None]
"""The axes of a group, and the coordinates that are in it, if it is not all of them."""


@final
class _Waiter:
    """A thread that waits for gloo's sends in their order, because gloo has no test for completion. It is a daemon: the
    process may end before it."""

    def __init__(self) -> None:
        self._waits: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="parc-sends", daemon=True)
        self._thread.start()

    def submit(self, wait: Callable[[], None]) -> Future[None]:
        """Return a future that is done once ``wait`` has returned."""
        future: Future[None] = Future()
        self._waits.put((wait, future))
        return future

    def close(self) -> None:
        """End the thread after the waits submitted so far: inside torch it must not see the interpreter's end."""
        self._waits.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (pair := self._waits.get()) is not None:
            wait, future = pair
            del pair
            try:
                wait()
                del wait  # it holds what was sent
                future.set_result(None)
            except BaseException as error:  # raised where the future is read
                future.set_exception(error)
            del future


class Distributed:
    """The backend of a run. Every process constructs it with the same ``programs``, because making a group is
    collective.

    With the ``axis`` of a pipeline, whose ``programs`` are those of all stages and ``stages`` has the place of each on
    the axis, ranks along it send each other messages. Gloo matches them by tags. NCCL matches them by order, and the
    sends of two ranks to each other would deadlock, so each channel (from one stage to a neighbour) has a group of its
    own, and with it a communicator and a stream.
    """

    def __init__(
        self,
        mesh: Mesh,
        programs: Iterable[Program],
        rank: int,
        device: torch.device,
        axis: str = "",
        stages: StageRanks = (),
    ) -> None:
        self.mesh, self.rank, self.device, self.stages = mesh, rank, device, stages
        programs = list(programs)
        self.coordinates = mesh.coordinates(rank)
        self._groups: dict[GroupPlace, Any] = {}
        self._tags: Counter[tuple[str, ...]] = Counter()
        places = _used_places(programs) | ({((axis,), None)} if axis else set())
        for axes, members in sorted({self._place(*place) for place in places}, key=str):
            for group in mesh.groups(axes):
                chosen = group if members is None else [group[place] for place in members]
                process_group = new_group(chosen)
                if rank in chosen:
                    self._groups[axes, members] = process_group
        self._kinds = [*dict.fromkeys(direction_of(row.kind) for row in step_kinds("work") if row.to)]
        self._channels: dict[tuple[int, str], Any] = {}
        self._what = ""
        """The description of the collective under way, for the message of ``PeerLost``."""
        self._waiter: _Waiter | None = None
        if axis:
            self._open_channels(axis)
        HOLDERS.add(self)

    def _open_channels(self, axis: str) -> None:
        """Make the groups of messages. NCCL creates a communicator at its first message, which all ranks send here in
        one order."""
        pairs = [(stage, kind) for kind in self._kinds for stage, place in enumerate(self.stages)
                 if 0 <= (to := stage + ACTIONS[kind].to) < len(self.stages) and self.stages[to] != place]  # fmt: skip
        if not self.ordered_messages:
            self._channels = dict.fromkeys(pairs, self._line_group(axis))
            self._waiter = _Waiter()
            return
        for stage, kind in pairs:
            self._channels[stage, kind] = self._line_group(axis)
            message = Message(axis, stage, kind, 0)
            at, token = self.coordinates[axis], torch.zeros(1, device=self.device)
            if at == self.stages[stage]:
                self.send(message, [[token]]).wait()
            elif at == self.stages[message.receiver]:
                self.receive(message, [((1,), token.dtype)])()

    def _line_group(self, axis: str) -> Any:
        groups = [(ranks, new_group(ranks)) for ranks in self.mesh.groups((axis,))]
        return next(group for ranks, group in groups if self.rank in ranks)

    def release(self) -> None:
        """Release the groups, so that they can end."""
        if self._waiter is not None:
            self._waiter.close()
        self._groups.clear()
        self._channels.clear()

    @property
    def native_reduce_scatter(self) -> bool:
        """True where torch's reduce-scatter sums, and gathers travel packed: with NCCL."""
        return self.device.type != "cpu"

    @property
    def ordered_messages(self) -> bool:
        """True where messages of a group are matched by their order, not by tags: with NCCL."""
        return self.device.type != "cpu"

    @property
    def ranks(self) -> Sequence[int]:
        """The rank of this process, alone."""
        return (self.rank,)

    def group(self, axes: tuple[str, ...], members: tuple[int, ...] | None = None) -> Any:
        """Return this rank's process group over some axes, or over the ``members`` of one axis."""
        return self._groups[self._place(axes, members)]

    def _place(self, axes: tuple[str, ...], members: tuple[int, ...] | None) -> GroupPlace:
        """Return the canonical key of a group: all coordinates of an axis are the axis itself."""
        everyone = members is not None and len(members) == self.mesh.size(axes[0])
        return axes, None if everyone else members

    def index(self, axes: tuple[str, ...]) -> int:
        """Return this rank's place in its group over some axes, the first axis major."""
        return self.mesh.place(self.coordinates, axes)

    def collective(
        self, op: str, args: Sequence[Any], pieces: Sequence[Tensor], spare: bool = False
    ) -> tuple[list[Tensor], Callable[[], object] | None]:
        """Run a collective with the other processes; sums and int8 collectives are only started."""
        (piece,) = pieces
        row = COLLECTIVES[op]
        axes, members = row.axes(args), row.members(args)
        self._what = f"rank {self.rank} waited for the other ranks of `{op}` over `{','.join(axes)}`"
        if op in RUN:
            return [RUN[op](self, piece, args, axes)], None
        if op not in SUMS:
            (results,), arrival = self.message(op, [args], [pieces])
            return results, arrival
        result = _to_sum(piece, spare)
        work = self.meet(dist.all_reduce, result, axes=axes, members=members, async_op=True)
        return [result], _wait_for([work], self._what)

    def message(
        self, op: str, args: Sequence[Sequence[Any]], pieces: Sequence[Sequence[Tensor]],
        spare: Sequence[bool] = (),
    ) -> tuple[list[list[Tensor]], Callable[[], object]]:  # fmt: skip
        """Start a message of several tensors. Its results are complete after the wait."""
        axes = COLLECTIVES[op].axes(args[0])
        self._what = f"rank {self.rank} waited for the other ranks of `{op}` over `{','.join(axes)}`"
        tensors = [of_ranks[0] for of_ranks in pieces]
        if op in SUMS:
            over = spare or [False] * len(tensors)
            tensors = [_to_sum(*pair) for pair in zip(tensors, over, strict=True)]
        results, wait = START[op](self, tensors, args, axes)
        what, waits = self._what, [wait]
        del wait  # only the list keeps the message's buffers alive, until the wait

        def arrival() -> None:
            if waits:
                with _naming(what):
                    waits.pop()()

        return [[result] for result in results], arrival

    def run_ring(self, op: str, axes: tuple[str, ...], parts: Sequence[RingPart]) -> list[list[Tensor]]:
        """Run this rank's part of a ring: the tensors that it yields are sent while it computes."""
        (part,) = parts
        group = next(ranks for ranks in self.mesh.groups(axes) if self.rank in ranks)
        place = group.index(self.rank)
        before, after = group[place - 1], group[(place + 1) % len(group)]
        what = f"rank {self.rank} waited for rank {before} before it in `{op}` over `{','.join(axes)}`"
        arrival: Any = None
        while True:
            try:
                sent = [tensor.contiguous() for tensor in part.send(arrival)]
            except StopIteration as end:
                return [end.value]
            arrived = [torch.empty_like(tensor) for tensor in sent]
            hops = [(dist.isend, tensor, after) for tensor in sent] + [(dist.irecv, into, before) for into in arrived]
            tags = [self.tag(axes) for _ in sent] * 2
            moves = [dist.P2POp(run, tensor, peer, self.group(axes), tag)
                     for tag, (run, tensor, peer) in zip(tags, hops, strict=True)]  # fmt: skip
            with _naming(what):
                works = dist.batch_isend_irecv(moves)
            arrival = _after_wait(_wait_for(works, what), arrived)

    def meet(
        self, run: Callable[..., Any], *args: Any, axes: tuple[str, ...], members: tuple[int, ...] | None = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Run one of torch's collectives with the other ranks of a group."""
        with _naming(self._what):
            return run(*args, group=self.group(axes, members), **options)

    def tag(self, axes: tuple[str, ...]) -> int:
        """Return the tag of a group's next point-to-point tensors: a count that is the same on all of its ranks."""
        self._tags[axes] += 1
        return self._tags[axes] % 2**31

    def send(self, message: Message, pieces: Sequence[Sequence[Tensor]]) -> Sending:
        """Start to send tensors."""
        tensors = [tensor.contiguous() for tensor in pieces[0]]
        peer = self._peer(message, message.receiver)
        works = [self._start(dist.isend, tensor, peer, message, at) for at, tensor in enumerate(tensors)]
        wait = _wait_for(
            works, f"rank {self.rank} waited until stage {message.receiver} (rank {peer}) had taken {message}"
        )
        if self._waiter is None:
            return Sending(tensors, lambda: all(work.is_completed() for work in works), wait)
        sent = self._waiter.submit(wait)
        return Sending(tensors, sent.done, sent.result)

    def receive(self, message: Message, like: Sequence[tuple[Shape, torch.dtype]]) -> Callable[[], list[list[Tensor]]]:
        """Start to receive into new tensors."""
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in like]
        peer = self._peer(message, message.stage)
        works = [self._start(dist.irecv, tensor, peer, message, at) for at, tensor in enumerate(tensors)]
        wait = _wait_for(works, f"rank {self.rank} waited for {message} of stage {message.stage} (rank {peer})")
        return _after_wait(wait, [tensors])

    def _start(self, run: Callable[..., Any], tensor: Tensor, peer: int, message: Message, at: int) -> Any:
        kind = direction_of(message.kind)
        channel = message.stage * len(self._kinds) + self._kinds.index(kind)
        tag = (message.microbatch * len(self.stages) * len(self._kinds) + channel) * _MOST_TENSORS + at
        try:
            return run(tensor, peer, group=self._channels[message.stage, kind], tag=tag % 2**31)
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank} could not reach rank {peer} for {message}", error) from error

    def _peer(self, message: Message, stage: int) -> int:
        """Return the rank of a stage that has this rank's place on all other axes."""
        return self.mesh.rank({**self.coordinates, message.axis: self.stages[stage]})


def _to_sum(tensor: Tensor, spare: bool) -> Tensor:
    """Return a contiguous tensor that a sum may be written over: the tensor itself, if it is ``spare``, or a copy."""
    return tensor if spare and tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)


def _wait_for(works: Sequence[Any], what: str) -> Callable[[], None]:
    """Return a function that waits for all of them; its error says ``what`` was waited for."""

    def wait() -> None:
        with _naming(what):
            for work in works:
                work.wait()

    return wait


def _after_wait(wait: Callable[[], None], arrived: _Arrived) -> Callable[[], _Arrived]:
    """Return a function that waits, and returns what has then arrived."""

    def take() -> _Arrived:
        wait()
        return arrived

    return take


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Count the block as a wait for other ranks, and name in its error what was waited for.

    Raises:
        PeerLost: the block raised a ``RuntimeError``.
    """
    try:
        with WAITS.ranks():
            yield
    except torch.OutOfMemoryError:  # this rank's own fault
        raise
    except RuntimeError as error:
        raise PeerLost(what, error) from error


def _used_places(programs: Iterable[Program]) -> set[GroupPlace]:
    places: set[GroupPlace] = set()
    for program in programs:
        for function in program.functions:
            for line in function.lines:
                row = COLLECTIVES.get(line.op)
                if row is not None and row.communicates and (axes := row.axes(line.args[1:])):
                    places.add((axes, row.members(line.args[1:])))
    return places
