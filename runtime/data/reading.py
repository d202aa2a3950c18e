"""The reading of batches' rows: in place, ahead in a thread, or ahead in worker processes of torch's loader."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.process import BaseProcess
from typing import IO, TypeVar, final

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..ranks.faults import stack_frames
from ..ranks.parents import end_with_parent
from ..ranks.processes import data_limit_s
from .datasets import IterableSource
from .samples import ASKED, DataError, SampleSource, raised_at, read_rows

_Read = TypeVar("_Read")
_PREFETCHED = 2  # batches that a worker has ready
_LOOK_S = 1.0
"""The seconds between two looks whether the workers live."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An error of a worker in words: not every exception can be pickled."""

    message: str
    help: str
    place: str


_Rows = dict[str, Tensor] | Failed
"""The rows of a batch, or why they were not read."""


@final
class _Batches(Dataset[_Rows]):
    """The rows of a batch, by the number of its first sample."""

    def __init__(self, source: SampleSource, rows: Sequence[int]) -> None:
        self._source, self._rows = source, rows

    def __getitem__(self, first: int) -> _Rows:
        try:
            return read_rows(self._source, first, self._rows)
        except DataError as error:
            return Failed(str(error), error.help, raised_at(error))
        except Exception as error:  # DataLoader would replace it by one of its own, whose text is a traceback
            return Failed(f"{type(error).__name__}: {error}", "read without `workers` to see where it is raised", "")


@final
class Closing:
    """A source that gives no sample once ``closed`` is set.

    Raises:
        CancelledError: it is set.
    """

    def __init__(self, source: SampleSource, closed: threading.Event) -> None:
        self.source, self._closed, self.count = source, closed, source.count

    def __call__(self, number: int) -> Mapping[str, Tensor]:
        """Return sample ``number``."""
        if self._closed.is_set():
            raise CancelledError
        return self.source(number)


@final
class RowReader:
    """A reader of the ``rows`` that one rank needs of batches of ``batch`` samples. With ``workers`` so many processes
    read ahead, a few batches each."""

    def __init__(self, source: Closing, rows: Sequence[int], batch: int, workers: int) -> None:
        self._source, self._rows, self._batch = source, rows, batch
        # An iterable is read from its start: a second worker would read all samples of the first one too.
        self._workers = min(workers, 1) if isinstance(source.source, IterableSource) else workers
        self._next = self._end = -1
        self._loading: list[tuple[Crew, Iterator[_Rows]]] = []
        """The loader that reads now, and its workers, if one does."""
        # The list is held from outside too: a loader that is collected in a cycle has lost the queue by which it tells
        # its workers to end, and waits five seconds for each of them.
        weakref.finalize(self, _end_loading, self._loading).atexit = False

    @property
    def count(self) -> int | None:
        """The number of samples of an epoch, None where there is no end, or none that is known."""
        return self._source.count

    def rows(self, first: int, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return other rows of the batch whose first sample is ``first``, read here and now.

        Raises:
            DataError: they cannot be read.
        """
        return read_rows(self._source, first, rows)

    def __call__(self, first: int, end: int | None = None) -> dict[str, Tensor]:
        """Return the rows of the batch whose first sample is ``first``. Workers read no batch from sample ``end`` on.

        Raises:
            DataError: they cannot be read, or a worker ended.
        """
        if not self._workers:
            return read_rows(self._source, first, self._rows)
        if first != self._next:
            self._start(first, end)
        rows = self._next_rows()
        if isinstance(rows, Failed):
            self._next = -1
            _end_loading(self._loading)
            raise DataError(rows.message, rows.help, place=rows.place)
        self._next = first + self._batch if first + self._batch < self._end else -1
        return rows

    def _next_rows(self) -> _Rows:
        """Return what the workers read next, or which of them died, or takes too long."""
        limit = data_limit_s()
        until = time.monotonic() + limit
        crew, batches = self._loading[0]
        while True:
            try:
                return next(batches)
            except RuntimeError as error:  # of DataLoader
                if "timed out" not in str(error):
                    return crew.dead(str(error))
                if time.monotonic() >= until:
                    return crew.slow(limit)

    def late(self, limit: float) -> Failed:
        """Return the fault of a call in another thread that has not ended for ``limit`` seconds. Its workers end, and
        with them the call."""
        if not self._workers:
            return Failed(_too_slow("the data", limit), _SLOW_HELP, _reading_at())
        crew, _ = self._loading[0]
        fault = crew.slow(limit)
        crew.end()
        return fault

    def _start(self, first: int, end: int | None) -> None:
        self._end = 1 << 62 if end is None else max(end, first + 1)
        firsts = range(first, self._end, self._batch)
        _end_loading(self._loading)
        crew = Crew(self._workers)
        loader = DataLoader(
            _Batches(self._source.source, self._rows), batch_size=None, sampler=firsts, num_workers=self._workers,
            prefetch_factor=_PREFETCHED, multiprocessing_context=_Forks(), worker_init_fn=crew.join,
            timeout=_LOOK_S,
        )  # fmt: skip
        self._loading[:] = [(crew, _starter(os.getpid()).submit(crew.start, loader).result())]


def _end_loading(loading: list[tuple[Crew, Iterator[_Rows]]]) -> None:
    """End a loader, and its workers before: it would wait five seconds for one that hangs or is stopped."""
    for crew, _ in loading:
        crew.end()
    loading.clear()


@final
class _Worker(ForkProcess):
    """A worker process, which ends when its rank has, whatever the dataset or torch does there from the first line."""

    def run(self) -> None:
        """Be the worker."""
        rank = multiprocessing.parent_process()
        assert rank is not None and rank.pid is not None
        end_with_parent(rank.pid)
        super().run()


@final
class _Forks(ForkContext):
    """The start of workers by a fork: a plan's callables need not be picklable."""

    Process = _Worker


@cache
def _starter(process: int) -> ThreadPoolExecutor:
    """Return the thread that starts all workers of a process. It lives as long as the process, as they end with it. In
    no other thread but the main one torch's loader sets a handler of SIGCHLD, which would raise the end of a worker
    wherever the process is, in the middle of a message to other ranks; the next read finds it too."""
    return ThreadPoolExecutor(1, "parc-workers")


_SLOW_HELP = "make the dataset faster, or let ranks wait longer with `--timeout S`"


def _too_slow(what: str, limit: float) -> str:
    """Return the message of data that does not come for ``limit`` seconds."""
    return f"{what} was not read within {limit:.0f} s"


@final
class Crew:
    """The worker processes of a loader. Each leaves in a file which process it is and what it asks the dataset for,
    and, on a signal, where it is: so it can be told why no batch comes."""

    def __init__(self, workers: int) -> None:
        self._rank, self._processes = os.getpid(), set[BaseProcess]()
        with ExitStack() as files:
            self._files = [files.enter_context(_file_of_memory()) for _ in range(workers)]
            weakref.finalize(self, files.pop_all().close)

    def start(self, loader: DataLoader[_Rows]) -> Iterator[_Rows]:
        """Start the workers of a loader. Return what they read."""
        before = set(multiprocessing.active_children())
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork beside threads, as torch's loader does it
            warnings.simplefilter("ignore", DeprecationWarning)
            batches = iter(loader)
        self._processes = set(multiprocessing.active_children()) - before
        return batches

    def join(self, number: int) -> None:
        """Be one of the workers, by its number."""
        file = self._files[number]
        file.seek(_NOTE)
        faulthandler.register(signal.SIGUSR1, file)
        faulthandler.enable(file)
        self._note(file, "", "")
        ASKED[:] = [partial(self._note, file)]

    @staticmethod
    def _note(file: IO[bytes], what: str, code: str) -> None:
        os.pwrite(file.fileno(), f"{os.getpid()}\n{what}\n{code}".encode()[:_NOTE].ljust(_NOTE), 0)

    def _noted(self) -> dict[int, tuple[str, str, str]]:
        """Return of each worker, by its process, what it asked for last, where the code of that is, and where the
        worker wrote that it is: "" where it waits for work."""
        noted = {}
        for file in self._files:
            data = os.pread(file.fileno(), _NOTE + _STACK, 0).decode("utf-8", "replace")
            process, *asked = data[:_NOTE].strip(" \0").split("\n")
            if not asked:  # it has not begun
                continue
            what, code = asked
            # other threads of the worker are no matter, and beyond torch's own loop are the rank's frames
            threads = _THREAD.split(data[_NOTE:])
            reading = next((stack for stack in threads if _LOOP in stack), "").partition(_LOOP)[0]
            _, frames = stack_frames(reading)
            at = f"{frames[0][0]}:{frames[0][1]} in {frames[0][2]}" if frames else ""
            noted[int(process)] = what, code, at
        return noted

    def dead(self, error: str) -> Failed:
        """Return the fault of a worker that has ended; if none has, that of a loader with this error."""
        all_ended = [process for process in self._processes if process.exitcode is not None]
        ended = max(all_ended, key=lambda process: process.exitcode != 0, default=None)
        if ended is None:
            message = f"the workers' data did not arrive: {error.splitlines()[0]}"
            return Failed(message, "read without `workers` to see why", "")
        exit_code = ended.exitcode or 0
        how = f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with code {exit_code}"
        what, code, at = self._noted().get(ended.pid or 0, ("", "", ""))
        hint = "; often the memory is too small" if exit_code == -signal.SIGKILL else ""
        message = f"{what or 'the data'} was not read: its worker process {how}"
        return Failed(message, f"read without `workers` to see why{hint}", (at or code) and f"it was at {at or code}")

    def slow(self, limit: float) -> Failed:
        """Return the fault of workers from which nothing came for ``limit`` seconds."""
        asked = self._noted()
        for process in self._processes:
            if process.pid and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
                os.kill(process.pid, signal.SIGCONT)  # a worker that was stopped (SIGSTOP) answers too
        time.sleep(min(_LOOK_S, limit / 10))
        noted = self._noted()
        hanging = max(noted, key=lambda number: bool(noted[number][2]), default=0)
        at = noted.get(hanging, ("", "", ""))[2]
        what, code, _ = asked.get(hanging, ("", "", ""))
        return Failed(_too_slow(what or "the data", limit), _SLOW_HELP, (at or code) and f"it is at {at or code}")

    def end(self) -> None:
        """End all workers at once. A process that was forked from their rank ends none."""
        for process in self._processes if os.getpid() == self._rank else ():
            process.kill()


def _file_of_memory() -> IO[bytes]:
    """Return a file without a name, which needs no room on a disk where the system has such."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("parc-worker"), "w+b")
    return tempfile.TemporaryFile()


_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_LOOP = "/_utils/worker.py"
_NOTE, _STACK = 1024, 1 << 16
"""The bytes of a worker's note, and the most bytes of its stack, which stands behind it."""


_READERS: dict[threading.Thread, threading.Event] = {}
_END_S = 1.0


def in_thread(read: Callable[[], _Read], closed: threading.Event) -> Future[_Read]:
    """Read in a daemon thread: a person's callable may block forever, and must not keep the process. ``closed`` is set
    when the process ends."""
    future: Future[_Read] = Future()

    def run() -> None:
        try:
            future.set_result(read())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    thread = threading.Thread(target=run, name="parc-data", daemon=True)
    _READERS[thread] = closed
    thread.start()
    for other in [other for other in _READERS if not other.is_alive()]:
        del _READERS[other]
    return future


def _reading_at() -> str:
    """Return where in a person's file a thread reads, "" where none does."""
    frames = sys._current_frames()
    for thread in _READERS:
        if thread.is_alive() and (frame := frames.get(thread.ident or 0)):
            stack = traceback.extract_stack(frame)
            text = "\n".join(f'File "{at.filename}", line {at.lineno} in {at.name}' for at in reversed(stack))
            if of_person := stack_frames(text)[1]:
                file, line, function = of_person[0]
                return f"it is at {file}:{line} in {function}"
    return ""


@atexit.register
def _end_reading() -> None:
    """Give readers a moment to end: a thread that runs in torch when the interpreter ends crashes it."""
    for closed in _READERS.values():
        closed.set()
    until = time.monotonic() + _END_S
    for thread in list(_READERS):
        thread.join(max(0.0, until - time.monotonic()))
