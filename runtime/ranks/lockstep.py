"""Lockstep: the calls that all ranks make together, checked to be the same ones, and their errors, raised on all
ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar, cast, final

import torch
import torch.distributed as dist

from ...grammar.codes import CALLS_DIFFER, LEFT_STEP, WORLD_SIZE
from ...grammar.diagnostics import Code
from .communication import PeerLost
from .faults import RunError
from .gather import everywhere, exchange
from .processes import place
from .wire import sendable
from .work import RankState

sendable(RunError, ("code", "message", "help", "notes"))
sendable(Code)
_CallResult = TypeVar("_CallResult")
Row = Sequence[int | torch.Tensor]
"""The numbers that a rank tells the others; some may be int64 scalar tensors."""


class Passenger(Protocol):
    """A row of numbers that goes along with the next exchange, whatever it is for."""

    def row(self) -> Row:
        """Return this rank's row, which is as long as that of every other rank."""

    def judge(self, rows: Sequence[Sequence[int]]) -> None:
        """Take every rank's row, in rank order. It may communicate, and raises the same error on all ranks."""


RESTORE = "session.restore"
"""The call that makes ranks equal again, whatever each did before."""
_ALIKE = "all ranks must call the same methods in the same order: remove conditions such as `if rank == 0:`"
_EQUAL = (
    "all ranks must do the same updates at the same `lr`, and enter `session.averaged()` together; `session.restore`"
    " makes them equal again"
)
_TOGETHER, _HEAD = 32, 3
"""The count of numbers in each exchange, and in the head before a row: a hash of the call, a hash of what the rank did
before, and 1 for a fault."""


@final
class Lockstep:
    """One of ``world`` ranks, as it makes calls together with the others."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank, self.world, self.device = rank, world, device
        self.inside, self._done = "", ""
        """The block that this rank is in, and the steps that it has done, in words that must be the same on all
        ranks."""
        self.stepped(0)
        self.passenger: Passenger | None = None
        """The row that goes along with every exchange but that of a restored checkpoint, until it takes itself away."""
        self._left = ""
        """The name of collective work that an error ended on this rank; "" if there is none."""

    @classmethod
    def joined(cls, device: torch.device) -> Lockstep:
        """Return this process as one of its group; without a group it is alone."""
        return cls(*place(), device)

    def check(self) -> None:
        """Check that no error has left the others alone.

        Raises:
            RunError: one has; the others may be at any point, and would mismatch the next collective.
        """
        if self._left:
            message = f"{self._left} ended with an error on rank {self.rank}, and other ranks may still be in it"
            help_ = "end all processes; start again from the last checkpoint, by `session.restore` or `--resume`"
            raise RunError(LEFT_STEP, message, help_)

    def stepped(self, count: int, lr: float | None = None) -> int:
        """Note the number of steps that this rank has done, and the learning rate of the last; return the number."""
        rate = "" if lr is None else f", the last at lr {lr:.6g}"
        self._done = f"after {count} step{'s' * (count != 1)}{rate}"
        return count

    def agreed(self, call: str, make: Callable[[], _CallResult]) -> _CallResult:
        """Call ``make``, which does not communicate, on every rank, and return its result; if it fails on one rank, it
        fails on all.

        Raises:
            RunError: that of the first rank that failed, on all of them; or as ``meet`` does.
        """
        return self.exchanged(call, lambda: (make(), ()))[0]

    def meet(self, call: str, row: Row = ()) -> list[list[int]]:
        """Return every rank's row of numbers, in rank order, on every rank.

        Raises:
            RunError: on every rank: another rank is in another call.
        """
        return self.exchanged(call, lambda: (None, row))[1]

    def exchanged(self, call: str, make: Callable[[], tuple[_CallResult, Row]]) -> tuple[_CallResult, list[list[int]]]:
        """Call ``make`` on every rank as ``agreed`` does. It returns a result and a row of numbers; return the result
        of this rank, and the rows of all ranks. ``call`` is the public method, which must be the same on all ranks.

        Raises:
            RunError: that of the first rank that failed, on all of them; or as ``meet`` does.
        """
        self.check()
        fault: RunError | None = None
        result: _CallResult | None = None
        row: Row = ()
        try:
            result, row = make()
        except RunError as error:
            fault = error
        except BaseException:
            self._left = "what ranks make by themselves" if self.world > 1 else ""
            raise
        before = "" if call == RESTORE else " ".join(filter(None, (self._done, self.inside)))
        passenger = None if call == RESTORE else self.passenger
        along = () if passenger is None else passenger.row()
        asked, row = len(row), [*row, *along]
        head = [zlib.crc32(call.encode()), zlib.crc32(before.encode()), int(fault is not None)]
        rows = self._exchange(call, [*head, *row])
        if len({other[0] for other in rows}) > 1:
            raise _calls_differ(everywhere(f"`{call}`", self.world), _ALIKE)
        if len({other[1] for other in rows}) > 1:
            raise _calls_differ(everywhere(f"`{call}` {before}", self.world), _EQUAL)
        if any(other[2] for other in rows):
            raise _first_fault(everywhere(fault, self.world), self.rank)
        for begin in range(_TOGETHER - _HEAD, len(row), _TOGETHER):
            more = self._exchange(call, row[begin:])
            rows = [[*first, *others] for first, others in zip(rows, more, strict=True)]
        if passenger is not None:
            passenger.judge([other[_HEAD + asked : _HEAD + len(row)] for other in rows])
        return cast(_CallResult, result), [other[_HEAD : _HEAD + asked] for other in rows]

    def _exchange(self, call: str, row: Row) -> list[list[int]]:
        """Exchange the first part of rows: the same count of numbers for each call, so that different calls match.

        Raises:
            PeerLost: another rank ended, or took too long.
            RunError: this rank has ended the process group.
        """
        if not dist.is_initialized() and self.world > 1:
            message = f"`{call}` needs all {self.world} ranks, and this process has ended their process group"
            raise RunError(WORLD_SIZE, message, "call `destroy_process_group()` after the session's last call")
        try:
            return exchange([*row[:_TOGETHER], *[0] * (_TOGETHER - len(row))], self.world, self.device)
        except RuntimeError as error:
            lost = PeerLost(f"rank {self.rank} is in `{call}`, and another rank has ended, or takes too long", error)
            lost.add_note(f"look for the first error of another rank; if there is none, {_ALIKE}")
            raise lost from error

    @contextmanager
    def doing(self, what: str, state: RankState) -> Iterator[None]:
        """Enter work that all ranks do together. An error in it restores the buffers, and forbids further work
        together.

        Raises:
            RunError: as ``check`` does.
        """
        self.check()
        buffers = dict(state.buffers)
        try:
            yield
        except BaseException:
            state.buffers = buffers
            self._left = what if self.world > 1 else ""
            raise


def _first_fault(faults: Sequence[RunError | None], rank: int) -> RunError:
    """Return the fault of a rank, or that of the first rank that has one. Where some ranks have none, it says on which
    ranks it is."""
    fault = faults[rank] or next(filter(None, faults))
    if None not in faults:
        return fault
    alike = [other for other, each in enumerate(faults) if each is not None and str(each) == str(fault)]
    said = RunError(fault.code, fault.message, fault.help, (*fault.notes, f"so it is on {ranks_text(alike)}"))
    said.__cause__ = fault.__cause__
    return said


def _calls_differ(calls: Sequence[str], help_: str) -> RunError:
    """Return the error of ranks that are in different ``calls`` (one for each rank), or in one after different work."""
    ranks: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call, []).append(rank)
    first, *others = (
        f"{ranks_text(held)} {'is' if len(held) == 1 else 'are'} in {call}" for call, held in ranks.items()
    )
    return RunError(CALLS_DIFFER, ", and ".join([first, *others]), help_)


def ranks_text(numbers: Sequence[int]) -> str:
    """Return ranks in words.

    >>> ranks_text([0]), ranks_text([0, 2]), ranks_text([1, 2, 3])
    ('rank 0', 'ranks 0 and 2', 'ranks 1 to 3')
    """
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1 > 1:
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
