"""The watch of a rank over its launcher: a rank ends when its launcher has, however that ended. Imports no torch, so
that it holds from the start of a process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn, final

from ...grammar.scratch import remove_if_left, watched_line
from ..ranks.parents import wait_for_end, wake_with_parent
from .voices import VOICES

_SAVING_S = 7.0
"""The seconds in which a rank that trains must come to the end of its step, where it saves."""


@final
class Lifeline:
    """A rank's watch over its launcher. When that ends, this process ends at once, or, if it trains, within some
    seconds, unless it has then begun to save."""

    def __init__(self) -> None:
        self._gone = self._trains = False
        self._line = -1
        self._saving = threading.Lock()

    @property
    def signal(self) -> int:
        """SIGHUP if the launcher has ended, else 0."""
        return int(signal.SIGHUP) if self._gone else 0

    def watch(self) -> None:
        """Begin, in a process that was launched."""
        if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
            return
        wake_with_parent()
        wait: Callable[[], object] = partial(wait_for_end, os.getppid())  # torchrun holds no line
        if VOICES in os.environ:
            self._line = watched_line(Path(os.environ[VOICES]))
            if self._line < 0:
                self._end()
            os.register_at_fork(after_in_child=self._let_go)
            wait = partial(os.read, self._line, 1)
        threading.Thread(target=self._watch, args=(wait,), name="parc-lifeline", daemon=True).start()

    def _watch(self, wait: Callable[[], object]) -> None:
        wait()
        self._gone = True
        time.sleep(_SAVING_S if self._trains else 0)
        with self._saving:
            self._end()

    def _end(self) -> NoReturn:
        self._gone = True
        self.remove_traces()
        os._exit(128 + signal.SIGHUP)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Enter a block that looks at ``signal`` between two steps, saves then, and ends."""
        self._trains = True
        try:
            yield
        finally:
            self._trains = False

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Enter a block that this watch lets come to its end."""
        with self._saving:
            yield

    def remove_traces(self) -> None:
        """Remove the folder of the run's processes, if the launcher that would do so is gone, and all ranks that watch
        it: one that still joins them would wait there for the folder, with Python's lock."""
        if self._gone and VOICES in os.environ:
            self._let_go()
            remove_if_left(Path(os.environ[VOICES]))

    def _let_go(self) -> None:
        line, self._line = self._line, -1
        if line >= 0:
            os.close(line)


LIFELINE = Lifeline()
"""The watch of this process."""
