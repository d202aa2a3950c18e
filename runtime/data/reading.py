"""The reading of batches' rows: in place, ahead in a thread, or ahead in worker processes of torch's loader."""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, final

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .datasets import IterableSource
from .samples import DataError, SampleSource, raised_at, read_rows

_Read = TypeVar("_Read")
_PREFETCHED = 2  # batches that a worker has ready
_FORK = (
    "fork" if "fork" in multiprocessing.get_all_start_methods() else None
)  # a plan's callables need not be picklable


@dataclass(frozen=True, slots=True)
class Failed:
    """An error of a worker in words: not every exception can be pickled."""

    message: str
    help: str
    place: str


@final
class _Batches(Dataset[dict[str, Tensor] | Failed]):
    """The rows of a batch, by the number of its first sample."""

    def __init__(self, source: SampleSource, rows: Sequence[int]) -> None:
        self._source, self._rows = source, rows

    def __getitem__(self, first: int) -> dict[str, Tensor] | Failed:
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
        self._loaders: list[Iterator[dict[str, Tensor] | Failed]] = []
        """The loader that reads now, if one does."""
        # The list is held from outside too: a loader that is collected in a cycle has lost the queue by which it tells
        # its workers to end, and waits five seconds for each of them.
        weakref.finalize(self, self._loaders.clear).atexit = False

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
        try:
            rows = next(self._loaders[0])
        except RuntimeError as error:  # of DataLoader, for a worker that was killed
            message = f"a worker process that reads data ended: {str(error).splitlines()[0]}"
            rows = Failed(message, "read without `workers` to see why; often the memory is too small", "")
        if isinstance(rows, Failed):
            self._next = -1
            self._loaders.clear()
            raise DataError(rows.message, rows.help, place=rows.place)
        self._next = first + self._batch if first + self._batch < self._end else -1
        return rows

    def _start(self, first: int, end: int | None) -> None:
        self._end = 1 << 62 if end is None else max(end, first + 1)
        firsts = range(first, self._end, self._batch)
        loader = DataLoader(
            _Batches(self._source.source, self._rows), batch_size=None, sampler=firsts, num_workers=self._workers,
            prefetch_factor=_PREFETCHED, multiprocessing_context=_FORK,
        )  # fmt: skip
        with warnings.catch_warnings(), _signals_kept():
            # Python 3.12 warns of a fork beside threads, as torch's loader does it
            warnings.simplefilter("ignore", DeprecationWarning)
            self._loaders[:] = [iter(loader)]


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Enter a block in which torch's loader starts workers, without the handler that it then sets: that would raise the
    end of a worker wherever the process is, in the middle of a message to other ranks. The next read finds it too."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)


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


@atexit.register
def _end_reading() -> None:
    """Give readers a moment to end: a thread that runs in torch when the interpreter ends crashes it."""
    for closed in _READERS.values():
        closed.set()
    until = time.monotonic() + _END_S
    for thread in list(_READERS):
        thread.join(max(0.0, until - time.monotonic()))
