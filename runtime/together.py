"""Whether a rank is where the others are: what all do in step, and what an error in the middle of it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from ..grammar.codes_build import LEFT_STEP
from .faults import RunError
from .step import RankState


@final
class Together:
    """What one of ``world`` ranks does with the others."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._left = ""
        """What an error ended before it was done, where other ranks took part in it."""

    def check(self) -> None:
        """See that no error has left the others alone.

        Raises:
            RunError: one has; they may stand anywhere, and would take what comes now for something else.
        """
        if self._left:
            message = f"{self._left} ended with an error on rank {self.rank}, and other ranks may still be in it"
            help_ = "end all processes; start again from the last checkpoint, by `session.restore` or `--resume`"
            raise RunError(LEFT_STEP, message, help_)

    @contextmanager
    def doing(self, what: str, state: RankState) -> Iterator[None]:
        """Around what all ranks do: after an error buffers are as they were, and there is nothing more with others.

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
