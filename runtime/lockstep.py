"""The lockstep of ranks: what all ranks do together, and the state that an error in the middle of it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast, final

import torch

from ..grammar.codes_build import LEFT_STEP
from .faults import RunError
from .state.gather import everywhere, exchange
from .work import RankState

_Made = TypeVar("_Made")


@final
class Together:
    """One of ``world`` ranks, in all that it does together with the others."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank, self.world, self.device = rank, world, device
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

    def agreed(self, make: Callable[[], _Made]) -> _Made:
        """Call ``make`` on every rank, without the others, and return its result; where it fails on one rank, it fails
        on all.

        Raises:
            RunError: the first rank's that failed, on all of them.
        """
        return self.exchanged(lambda: (make(), ()), 0)[0]

    def exchanged(
        self, make: Callable[[], tuple[_Made, Sequence[int | torch.Tensor]]], width: int
    ) -> tuple[_Made, list[list[int]]]:
        """Call ``make`` on every rank as ``agreed`` does. It returns its result and a row of ``width`` numbers; return
        the result of this rank, and the rows of all ranks.

        Raises:
            RunError: the first rank's that failed, on all of them.
        """
        self.check()
        fault: RunError | None = None
        made: _Made | None = None
        row: Sequence[int | torch.Tensor] = [0] * width
        try:
            made, row = make()
        except RunError as error:
            fault = error
        except BaseException:
            self._left = "what ranks make by themselves" if self.world > 1 else ""
            raise
        rows = exchange([int(fault is not None), *row], self.world, self.device)
        if any(row[0] for row in rows):
            faults = everywhere(fault, self.world)
            raise fault or next(filter(None, faults))
        return cast(_Made, made), [row[1:] for row in rows]

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
