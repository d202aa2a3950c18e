"""One voice for the ranks of a host: a line that all of them print appears once, one that differs with its rank."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self, final

VOICES = "PARC_VOICES"
"""The environment variable with the folder in which the ranks of a host leave what they print, where they are, and why
they failed, if ``parc run`` started them."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The environment variable with the file in which a rank leaves its failure; torchrun sets it, and so does parc."""
_END_SAID = "end_said"
"""A file beside the folders of a host's ranks under torchrun: one of them has said why the run ends."""
_FIRST_LOG = "said"
"""The name of the copy of the first rank's lines."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BACK = "\r"
_GRACE_S = 1.0
"""The seconds that the first rank has to print a line that another has printed."""
_RECENT_S = 60.0
"""The seconds after which a line that no rank prints again is forgotten."""
_MOST_LINES = 10_000
"""The most lines that are remembered."""
_FIRST = ""
"""The key of a host's first rank in the counts of a line."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals on which a run saves and ends; SIGHUP is none under ``nohup``, which ignores it."""
    kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if kept else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def says_the_end() -> bool:
    """Return whether this rank, which torchrun started, is the one of its host that says why the run ends: the first
    that asks. Torchrun stops the others as soon as one has ended, so that none can be named beforehand. Where it keeps
    no files of failures, as in a run that was started by hand, it is the first rank."""
    path = os.environ.get(ERROR_FILE)
    if not path or "TORCHELASTIC_RUN_ID" not in os.environ:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        (Path(path).parent.parent / _END_SAID).touch(exist_ok=False)  # beside the folders of the host's ranks
    except FileExistsError:
        return False
    except OSError:  # the disk is full, say: better twice than never
        return True
    return True


@contextmanager
def speaking() -> Iterator[None]:
    """Enter a block in which this process prints as one of a run. A rank's output goes to a file that the launcher
    reads, if there is one; the first rank of a host prints on, and its lines are copied there. Output that nobody takes
    is no error: see ``unheard``."""
    # A process that is started without a stream has None there.
    before, folder, local = (sys.stdout, sys.stderr), os.environ.get(VOICES), os.environ.get("LOCAL_RANK")
    file = None
    if folder is not None and local is not None:
        name = _FIRST_LOG if local == "0" else f"rank{os.environ['RANK']}.log"
        try:
            file = open(Path(folder, name), "a", encoding="utf-8")  # noqa: SIM115 open until the process ends
        except FileNotFoundError:  # the launcher has ended, and its folder is gone
            os._exit(128 + signal.SIGHUP)
    if file is not None and local != "0":
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            if stream is not None:
                stream.flush()
            os.dup2(file.fileno(), number)
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)  # the lines of both in their order
    else:
        sys.stdout, sys.stderr = (stream and _Heard(stream, file) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


_unheard = 0


def unheard() -> int:
    """Return SIGPIPE once nobody reads the pipe that this process prints to, else 0. A terminal that was closed is no
    reason to end: it sends SIGHUP to those that are to end with it."""
    return _unheard


@final
class _Heard:
    """A stream whose complete lines are copied to a file, if there is one, as a terminal would show them in the end.
    What it cannot write is lost."""

    def __init__(self, stream: IO[str], copy: IO[str] | None) -> None:
        self._stream, self._copy, self._line = stream, copy, ""

    def write(self, text: str) -> int:
        """Write text, and copy the lines that it ends."""
        *lines, line = (self._line + text).split("\n")
        self._line = line.rpartition(_BACK)[2]  # a progress bar overwrites its line
        if lines and self._copy is not None:
            with suppress(OSError):  # the disk is full, say; other ranks' lines are then shown beside this one's
                self._copy.write("".join(f"{line.rpartition(_BACK)[2]}\n" for line in lines))
                self._copy.flush()
        with self._lost():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what waits."""
        with self._lost():
            self._stream.flush()

    @contextmanager
    def _lost(self) -> Iterator[None]:
        """Enter a block that writes. Where nobody will ever read, all later output goes nowhere, also that of C."""
        global _unheard
        try:
            yield
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):
                _unheard = int(signal.SIGPIPE) if error.errno == errno.EPIPE else _unheard
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@dataclass(slots=True)
class _Line:
    """A line that ranks printed lately: how often each did, and when the last of them did."""

    at: float
    times: Counter[str] = field(default_factory=Counter)


@final
class Voices:
    """A reader, beside the launcher, of what the ranks of a host print, of which all but the first print to files in
    ``folder``. With ``logs`` their lines go to a file each in that folder instead of the terminal, as long as it takes
    them.

    A rank's line is shown unless the first rank prints it as often as this rank does: what one prints once more than
    the first, or a while after it, is a line of its own.

    A context: it reads until it is left.
    """

    def __init__(self, folder: Path, logs: Path | None = None) -> None:
        self._folder, self._logs = folder, logs
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="parc-voices", daemon=True)
        self._places: dict[Path, int] = {}
        self._spoken: dict[str, _Line] = {}
        """The recent lines, as a terminal shows them in the end, ordered by the time when they were last printed."""
        self._waiting: dict[tuple[str, int], tuple[float, list[str]]] = {}
        """The lines that other ranks printed more often than the first, by line and count: the time when that was read,
        and these ranks."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        over = False
        while not over:
            over = self._over.wait(0.2)
            for line in self._lines(self._folder / _FIRST_LOG, over):
                self._count(_FIRST, line)
            for place in sorted(self._folder.glob("rank*.log")):
                for line in self._lines(place, over):
                    self._take(place.stem.removeprefix("rank"), line)
            self._show(time.monotonic() - (0 if over else _GRACE_S), over)
            self._forget(time.monotonic() - _RECENT_S)

    def _lines(self, place: Path, over: bool) -> Iterator[str]:
        """Yield the lines that were added to a file since the last call; an incomplete one only when all is over."""
        try:
            with open(place, "rb") as file:
                file.seek(self._places.get(place, 0))
                text = file.read()
        except FileNotFoundError:
            return
        whole = text if over else text[: text.rfind(b"\n") + 1]
        self._places[place] = self._places.get(place, 0) + len(whole)
        yield from whole.decode(errors="replace").removesuffix("\n").split("\n") if whole else ()

    def _count(self, rank: str, line: str) -> int:
        """Note that a rank printed a line. Return how often it did so recently."""
        plain = _shown_text(line)
        spoken = self._spoken.pop(plain, None) or _Line(0.0)
        self._spoken[plain] = spoken
        spoken.at = time.monotonic()
        spoken.times[rank] += 1
        return spoken.times[rank]

    def _said_by_first(self, line: str) -> int:
        """Return how often the first rank printed a line recently."""
        spoken = self._spoken.get(_shown_text(line))
        return 0 if spoken is None else spoken.times[_FIRST]

    def _forget(self, before: float) -> None:
        """Forget the lines that no rank printed since the time ``before``, and the oldest of too many."""
        for line, spoken in list(self._spoken.items()):
            if spoken.at >= before and len(self._spoken) <= _MOST_LINES:
                break
            del self._spoken[line]

    def _take(self, rank: str, line: str) -> None:
        times = self._count(rank, line)
        if self._logged(rank, line) or not line.strip() or times <= self._said_by_first(line):
            return
        self._waiting.setdefault((line, times), (time.monotonic(), []))[1].append(rank)

    def _logged(self, rank: str, line: str) -> bool:
        """Write a line to the rank's file. Return False if there are no such files, so that the line is shown."""
        if self._logs is None:
            return False
        try:
            with open(self._logs / f"rank{rank}.log", "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            self._print(f"`{self._logs}` cannot be written: {reason}; from here on lines of ranks are shown instead")
            self._logs = None
        return self._logs is not None

    def _show(self, before: float, over: bool) -> None:
        """Show the lines that were read before a time and that the first rank has still not printed."""
        for (line, times), (read, ranks) in list(self._waiting.items()):
            if times <= self._said_by_first(line):
                del self._waiting[line, times]
            elif read <= before or over:
                del self._waiting[line, times]
                self._print(f"[{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}] {line}")

    @staticmethod
    def _print(text: str) -> None:
        clear = "\r\x1b[2K" if sys.stderr.isatty() else ""  # a bar may be there
        print(f"{clear}{text}", file=sys.stderr, flush=True)


def _shown_text(line: str) -> str:
    """Return a line as a terminal shows it in the end, without colours."""
    return _CONTROL.sub("", line).rpartition(_BACK)[2].rstrip()
