"""The line from a launcher to its ranks: a rank ends when its launcher has, however that ended. Imports no torch, so
that it holds from the start of a process."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn, final

from ..ranks.parents import wait_for_end, wake_with_parent
from .voices import VOICES

_LINE = "launcher"
"""The name of a pipe in the folder of a run's processes, which only the launcher holds open for writing."""
_SAVING_S = 7.0
"""The seconds in which a rank that trains must come to the end of its step, where it saves."""


@contextmanager
def line_held(folder: Path) -> Iterator[None]:
    """Hold the line of all ranks that are started in the block. It breaks when the block, or this process, ends: the
    kernel closes a pipe even of a process that was killed."""
    os.mkfifo(folder / _LINE)
    reader = os.open(folder / _LINE, os.O_RDONLY | os.O_NONBLOCK)  # a pipe opens for writing only where one reads
    writer = os.open(folder / _LINE, os.O_WRONLY)
    os.close(reader)
    try:
        yield
    finally:
        os.close(writer)


@final
class Lifeline:
    """A rank's watch over its launcher. When that ends, this process ends at once, or, if it trains, within some
    seconds, unless it has then begun to save."""

    def __init__(self) -> None:
        self._gone = self._trains = False
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
            line = _opened(Path(os.environ[VOICES], _LINE))
            if line < 0:
                self._end()
            wait = partial(os.read, line, 1)
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
        """Remove the folder of the run's processes, if the launcher that would do so is gone."""
        if self._gone and VOICES in os.environ:
            shutil.rmtree(os.environ[VOICES], ignore_errors=True)


LIFELINE = Lifeline()
"""The watch of this process."""


def _opened(line: Path) -> int:
    """Return the open pipe, from which a read returns when no process holds it open for writing any longer; -1 if none
    does now."""
    try:
        reader = os.open(line, os.O_RDONLY | os.O_NONBLOCK)
        os.read(reader, 1)
    except BlockingIOError:
        os.set_blocking(reader, True)
        return reader
    except FileNotFoundError:  # the launcher has ended, and removed it
        pass
    return -1
