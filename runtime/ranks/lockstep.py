"""The lockstep of ranks: what all ranks do together, and the state that an error in the middle of it leaves."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast, final

import torch

from ...grammar.codes_build import LEFT_STEP
from ...grammar.codes_run import CALLS_DIFFER
from .communication import PeerLost
from .faults import RunError
from .gather import everywhere, exchange
from .work import RankState

_Made = TypeVar("_Made")
Row = Sequence[int | torch.Tensor]
"""The numbers that a rank tells the others; some may be int64 tensors without dims."""
RESTORE = "session.restore"
"""The call after which ranks are equal, whatever each did before."""
_ALIKE = "all ranks must call the same methods in the same order: remove conditions such as `if rank == 0:`"
_EQUAL = (
    "all ranks must do the same updates at the same `lr`, and enter `session.averaged()` together; `session.restore`"
    " makes them equal again"
)
_TOGETHER, _HEAD = 32, 3
"""The count of numbers that ranks exchange at a time, and of those before a row: hashes of its call and of what it did
before, and 1 for a fault."""


@final
class Together:
    """One of ``world`` ranks, in all that it does together with the others."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank, self.world, self.device = rank, world, device
        self.inside, self._done = "", ""
        """The block that this rank is in, and the steps that it has done, in words: those of all ranks are the same."""
        self.stepped(0)
        self._left = ""
        """The name of work that an error ended on this rank, and in which other ranks took part; "" if there is
        none."""

    def check(self) -> None:
        """Check that no error has left the others alone.

        Raises:
            RunError: one has; they may stand anywhere, and would take what comes now for something else.
        """
        if self._left:
            message = f"{self._left} ended with an error on rank {self.rank}, and other ranks may still be in it"
            help_ = "end all processes; start again from the last checkpoint, by `session.restore` or `--resume`"
            raise RunError(LEFT_STEP, message, help_)

    def stepped(self, count: int, lr: float | None = None) -> int:
        """Note that this rank has done so many steps, the last at a learning rate, if it is known; return their
        number."""
        rate = "" if lr is None else f", the last at lr {lr:.6g}"
        self._done = f"after {count} step{'s' * (count != 1)}{rate}"
        return count

    def agreed(self, call: str, make: Callable[[], _Made]) -> _Made:
        """Call ``make`` on every rank, without the others, and return its result; where it fails on one rank, it fails
        on all.

        Raises:
            RunError: the first rank's that failed, on all of them; or as ``meet`` does.
        """
        return self.exchanged(call, lambda: (make(), ()))[0]

    def meet(self, call: str, row: Row = ()) -> list[list[int]]:
        """Return every rank's row of numbers, in rank order, on every rank.

        Raises:
            RunError: on every rank: another rank is in another call.
        """
        return self.exchanged(call, lambda: (None, row))[1]

    def exchanged(self, call: str, make: Callable[[], tuple[_Made, Row]]) -> tuple[_Made, list[list[int]]]:
        """Call ``make`` on every rank as ``agreed`` does. It returns its result and a row of numbers; return the result
        of this rank, and the rows of all ranks. ``call`` is what a person called, and all ranks are in the same.

        Raises:
            RunError: the first rank's that failed, on all of them; or as ``meet`` does.
        """
        self.check()
        fault: RunError | None = None
        made: _Made | None = None
        row: Row = ()
        try:
            made, row = make()
        except RunError as error:
            fault = error
        except BaseException:
            self._left = "what ranks make by themselves" if self.world > 1 else ""
            raise
        before = "" if call == RESTORE else " ".join(filter(None, (self._done, self.inside)))
        head = [zlib.crc32(call.encode()), zlib.crc32(before.encode()), int(fault is not None)]
        rows = self._exchange(call, [*head, *row])
        if len({other[0] for other in rows}) > 1:
            raise _apart(everywhere(f"`{call}`", self.world), _ALIKE)
        if len({other[1] for other in rows}) > 1:
            raise _apart(everywhere(f"`{call}` {before}", self.world), _EQUAL)
        if any(other[2] for other in rows):
            faults = everywhere(fault, self.world)
            raise fault or next(filter(None, faults))
        for begin in range(_TOGETHER - _HEAD, len(row), _TOGETHER):
            more = self._exchange(call, row[begin:])
            rows = [[*first, *others] for first, others in zip(rows, more, strict=True)]
        return cast(_Made, made), [other[_HEAD : _HEAD + len(row)] for other in rows]

    def _exchange(self, call: str, row: Row) -> list[list[int]]:
        """Exchange a first part of rows: as many numbers whatever the call is, so that different ones meet.

        Raises:
            PeerLost: another rank ended, or took too long.
        """
        try:
            return exchange([*row[:_TOGETHER], *[0] * (_TOGETHER - len(row))], self.world, self.device)
        except RuntimeError as error:
            lost = PeerLost(f"rank {self.rank} is in `{call}`, and another rank has ended, or takes too long", error)
            lost.add_note(f"look for the first error of another rank; if there is none, {_ALIKE}")
            raise lost from error

    @contextmanager
    def doing(self, what: str, state: RankState) -> Iterator[None]:
        """Enter work that all ranks do together. After an error in it, the buffers are as before, and nothing more can
        be done together.

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


def _apart(calls: Sequence[str], help_: str) -> RunError:
    """Return the error of ranks that are in different calls, or in one after different work, given each rank's."""
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
