"""The time that a process waits within steps: for data, and for what other ranks send."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final


@final
class Waits(threading.local):
    """The seconds that this thread waited so far, ``for_data`` and ``for_ranks``. A thread that sends in the background
    has its own, which nobody counts.

    Work on a GPU is only started by the process, so there a wait for ranks is none of the process's.
    """

    def __init__(self) -> None:
        self.for_data = self.for_ranks = 0.0

    @contextmanager
    def data(self) -> Iterator[None]:
        """Count the time of a block as a wait for data."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.for_data += time.perf_counter() - begin

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """Count the time of a block as a wait for other ranks, and for what they send."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.for_ranks += time.perf_counter() - begin


WAITS = Waits()
"""The waits of the calling thread."""


@final
class Lap:
    """The time of one step, and the waits in it, from ``begin`` to ``end``."""

    def __init__(self) -> None:
        self._begun = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), WAITS.for_data, WAITS.for_ranks

    def begin(self) -> None:
        """Begin the step."""
        self._begun = self._now()

    def end(self) -> tuple[float, ...]:
        """Return the seconds since it began, and those of waits for data and for other ranks."""
        return tuple(after - before for before, after in zip(self._begun, self._now(), strict=True))
