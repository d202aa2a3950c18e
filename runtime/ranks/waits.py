"""Times of a run: the waits of a process for data and for other ranks, and traces of all actions."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch

from ...compiler.build.output_files import FileKind, check_file, write_whole
from ...compiler.torch_private import profiling


@final
class Waits(threading.local):
    """The seconds that this thread has waited, ``for_data`` and ``for_ranks``. Threads that send in the background are
    not counted, and neither are a GPU's waits for other ranks, since the process only launches them.
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


def clock() -> tuple[float, float, float]:
    """Return the time, and this thread's waits for data and for other ranks so far, all in seconds."""
    return time.perf_counter(), WAITS.for_data, WAITS.for_ranks


# ---- traces: spans of actions on every rank, as a file for Perfetto or chrome://tracing

TracedSpan = tuple[str, str, int, int, int]
"""A span: name, category (``work``, or ``wait`` for a message), step from 0, begin and end in nanoseconds of this
process."""

_MOST_SPANS = 200_000  # more than a viewer can show


@dataclass(slots=True)
class Recorder:
    """The record of one rank's last spans. On a GPU each span ends when its work has, so a traced run overlaps less."""

    device: torch.device
    spans: deque[TracedSpan] = field(default_factory=lambda: deque(maxlen=_MOST_SPANS))

    @contextmanager
    def span(self, name: str, category: str, step: int) -> Iterator[None]:
        """Record the time of a block."""
        begin = time.perf_counter_ns()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.spans.append((name, category, step, begin, time.perf_counter_ns()))


@contextmanager
def recorded(recorder: Recorder | None, name: str, category: str, step: int) -> Iterator[None]:
    """Record the time of a block with the recorder, if there is one, and in torch's profiler, if it runs."""
    with ExitStack() as stack:
        if profiling():
            stack.enter_context(torch.profiler.record_function(f"action {name}"))
        if recorder is not None:
            stack.enter_context(recorder.span(name, category, step))
        yield


def clock_offset(exchange: Callable[[Sequence[int]], list[list[int]]], rank: int, rounds: int = 8) -> int:
    """Return the nanoseconds by which this process's clock is ahead of rank 0's. ``exchange`` returns every rank's row
    of numbers.

    Processes of one host read one clock. Across hosts an exchange returns only after every rank has read its clock,
    which bounds the offset from both sides; the error is at most the round trip.
    """
    hosts = exchange([zlib.crc32(socket.gethostname().encode())])
    low, high = -(2**62), 2**62
    for _ in range(rounds):
        mine = time.perf_counter_ns()
        begun = exchange([mine])
        after = time.perf_counter_ns()
        ended = exchange([after])
        low, high = max(low, mine - ended[0][0]), min(high, after - begun[0][0])
    return 0 if hosts[rank] == hosts[0] else (low + high) // 2


_MARK = '{"otherData": {"by": "parc"'
_TRACE = FileKind("a trace of parc's", re.compile(re.escape(_MARK.encode())))


def check_trace(path: Path) -> None:
    """Check that a trace can be written.

    Raises:
        OSError: it cannot, or there is another file, which is left as it is.
    """
    check_file(path, _TRACE)
    path.parent.mkdir(parents=True, exist_ok=True)
    open(path, "ab").close()


def write_trace(path: Path, build: str, ranks: Sequence[tuple[str, int, Iterable[TracedSpan]]]) -> None:
    """Write every rank's spans as Chrome trace events, with the hash of the ``build``; each rank comes with its name
    and its clock's offset.

    Raises:
        OSError: the file cannot be written, or is there and is no trace of parc's.
    """
    check_file(path, _TRACE)
    start = min((span[3] - offset for _, offset, spans in ranks for span in spans), default=0)
    events: list[dict[str, Any]] = []
    for rank, (label, offset, spans) in enumerate(ranks):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": label}})
        events += [
            {
                "name": name, "cat": category, "ph": "X", "pid": rank, "tid": 0,
                "ts": (begin - offset - start) / 1000, "dur": (end - begin) / 1000, "args": {"step": step + 1},
            }
            for name, category, step, begin, end in spans
        ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"otherData": {"by": "parc", "build": build}, "displayTimeUnit": "ms"}  # begins with the mark
    write_whole(path, json.dumps({**about, "traceEvents": events}))
