"""Failed ranks, as their launcher sees them: each leaves a small file that says when and why it failed, and the
launcher asks a rank for which others waited too long where it hangs."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self, final

import torch.distributed as dist

from ...compiler.build.output_files import write_whole
from ...grammar.diagnostics import render
from ..ranks.communication import PeerLost
from ..ranks.faults import RunError, stack_frames
from ..ranks.wire import ForeignMessage
from .voices import ERROR_FILE, VOICES

_BEGAN, _STOPPED = "began", "stopped"
"""Files in the folder of a run's processes: a rank has begun to train; a rank has said that a signal stopped it."""
_LOST = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "connection was closed",
    "NCCL communicator",
)  # fmt: skip
"""Texts in torch's errors about a rank that is gone."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a rank; ``rank`` is None where no rank is to blame. It ``follows`` another where that rank failed
    first or, if ``late``, did not come in time; ``waited`` names the wait in which it ended. An ``expected`` one is a
    person's mistake, with a message of its own. A rank that was ``killed`` left no word."""

    rank: int | None
    time_s: float
    exit_code: int
    message: str
    follows: bool = False
    late: bool = False
    expected: bool = False
    waited: str = ""
    killed: bool = False

    def text(self) -> str:
        """Return the failure in words."""
        if self.rank is None or self.expected:
            return self.message
        return f"rank {self.rank} failed: {self.message}"


def failure_of(rank: int, error: BaseException) -> Failure:
    """Return the failure of a rank that ended with an error."""
    if isinstance(error, RunError):
        return Failure(rank, time.time(), error.exit_code, render(error.diagnostic()), expected=True)
    text = "".join(traceback.format_exception_only(error)).rstrip()
    waited = error.what if isinstance(error, PeerLost) else ""
    if waited:
        text = str(error)
    lost = isinstance(error, (dist.DistError, RuntimeError))
    if lost and any(word in text.lower() for word in ("timed out", "timeout")):
        message = f"it waited too long for another rank\n{text}"
        return Failure(rank, time.time(), 4, message, follows=True, late=True, waited=waited)
    follows = bool(waited) or (lost and any(word in text for word in _LOST))
    if not follows and not isinstance(error, ForeignMessage):
        text = "".join(traceback.format_exception(error)).rstrip()
    return Failure(rank, time.time(), 4, text, follows=follows, waited=waited)


def begin() -> None:
    """Tell the launcher that training begins: from now on this rank handles signals itself, and says what it saved."""
    _mark(_BEGAN)


def stop_said() -> None:
    """Tell the launcher that this rank has said what a signal stopped, and what was saved."""
    _mark(_STOPPED)


def _mark(name: str) -> None:
    if VOICES in os.environ:
        with suppress(FileNotFoundError):  # the folder has gone with the launcher, or was cleaned away in a long run
            Path(os.environ[VOICES], name).touch()


def stop_of(number: int, folder: Path) -> Failure | None:
    """Return the end of a run that a signal stopped, None where a rank has said it; ``folder`` has the files of the
    run's processes. A rank that failed then, as at its last checkpoint, explains it."""
    name, began = signal.Signals(number).name, (folder / _BEGAN).exists()
    if (folder / _STOPPED).exists():
        return None
    if reports := [read_failure(0, 1, place) for place in folder.rglob("error.json")]:
        first = min(reports, key=lambda failure: (failure.follows, failure.time_s))
        message = f"stopped by {name}\n{first.message}"
        return replace(first, rank=None, exit_code=128 + number, message=message, follows=False)
    said = "; its ranks did not end by themselves" if began else " before the first step; nothing was saved"
    return Failure(None, time.time(), 128 + number, f"stopped by {name}{said}", expected=not began)


def leave_failure(failure: Failure) -> bool:
    """Write a failure where the launcher reads it. Return False without a launcher that does.

    Raises:
        OSError: it cannot be written.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return False
    Path(path).parent.mkdir(exist_ok=True)  # not those above: with the launcher the folder of the run has gone
    # The inner ``message`` and ``timestamp`` are shown by torchrun; the rest is for parc.
    extra = {"timestamp": str(int(failure.time_s))}
    content = {
        "message": {"message": failure.message, "extraInfo": extra},
        "parc": {
            "time_s": failure.time_s, "exit_code": failure.exit_code, "message": failure.message,
            "follows": failure.follows, "late": failure.late, "expected": failure.expected, "waited": failure.waited,
        },
    }  # fmt: skip
    write_whole(Path(path), json.dumps(content))
    return True


def read_failure(rank: int, exit_code: int, path: Path) -> Failure:
    """Return the failure of a rank from its report; a rank that was killed left none."""
    try:
        return Failure(rank, **json.loads(path.read_text(encoding="utf-8"))["parc"])
    except (OSError, ValueError, KeyError, TypeError):
        if exit_code - 128 in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            return Failure(rank, time.time(), exit_code, "it was stopped", follows=True)  # or another ended it
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = ", often because memory ran out" if name == "SIGKILL" else ""
        # A rank that the launcher ended, because another had failed, explains nothing.
        return Failure(
            rank, time.time(), 4, f"it was killed by {name}{hint}", follows=name == "SIGTERM", killed=name == "SIGKILL"
        )
    return Failure(rank, time.time(), 4, f"it ended with exit code {exit_code}")


# ---- ranks that do not answer: once another has waited too long, the launcher says where each of them is, and ends it


_FAILING_S = 2.0
"""The seconds that the other ranks have to notice that one is gone, and to leave their failures."""
_ANSWER_S = 1.0
"""The seconds that a rank has to write its stack."""


def answer() -> None:
    """Let the launcher ask where this rank is: its process number is in a file, and SIGUSR1 writes its stack to
    another, even while it waits in C++."""
    folder, local, rank = Path(os.environ[VOICES]), os.environ["LOCAL_RANK"], os.environ["RANK"]
    stack = open(folder / f"stack{local}", "w", encoding="utf-8")  # noqa: SIM115 open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stack)
    write_whole(folder / f"process{local}", f"{os.getpid()} {rank}")


class Others(Protocol):
    """The other hosts of a run."""

    failures: list[Failure]
    """The failures there."""
    trouble_s: float | None
    """The time when the first of their ranks or launchers stopped going on, by the monotonic clock."""

    def tell(self, failure: Failure) -> None:
        """Tell them of a failure here."""


@final
class Hanging:
    """A search, beside the launcher, for ranks of this host for which others waited too long; ``reports`` says where
    they are. It ends these ranks. If other hosts do not go on, it stops the ranks of this one, and ends those that have
    not stopped within the timeout.

    A context: it looks until it is left.
    """

    def __init__(self, folder: Path, others: Others | None = None, timeout_s: float = math.inf) -> None:
        self._folder, self._others, self._timeout_s = folder, others, timeout_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="parc-hanging", daemon=True)
        self.reports: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def late(self) -> bool:
        """Return whether a rank of any host waited too long for another."""
        elsewhere = self._others.failures if self._others is not None else ()
        return self._late_here() is not None or any(failure.late for failure in elsewhere)

    def _late_here(self) -> Failure | None:
        for place in self._folder.rglob("error.json"):
            if (failure := read_failure(0, 1, place)).late:
                process = self._folder / f"process{place.parent.name}"
                rank = self._process(process)[1] if process.exists() else None
                return replace(failure, rank=rank)
        return None

    def _look(self) -> None:
        stopped = set[int]()
        while not self.late():
            trouble_s = self._others.trouble_s if self._others is not None else None
            since_s = 0.0 if trouble_s is None else time.monotonic() - trouble_s
            for _, process, _ in self._silent() if since_s > _FAILING_S else ():
                if process not in stopped:
                    stopped.add(process)
                    with suppress(ProcessLookupError):  # it has just ended by itself
                        os.kill(process, signal.SIGTERM)
            if self._over.wait(0.2):
                return
            if since_s > self._timeout_s:
                break
        if (late := self._late_here()) is not None and self._others is not None:
            self._others.tell(late)
        self._over.wait(_FAILING_S)
        for local, process, rank in self._silent():
            with suppress(ProcessLookupError):  # it has just ended by itself
                if where := self._where(local, process):
                    self.reports.append(f"rank {rank} does not answer: process {process} {where}")
                os.kill(process, signal.SIGKILL)

    def _silent(self) -> Iterator[tuple[str, int, int]]:
        """Yield the local number, the process and the rank of those that run and have reported no failure."""
        said = {place.parent.name for place in self._folder.rglob("error.json")}
        for place in sorted(self._folder.glob("process*")):
            local = place.name.removeprefix("process")
            process, rank = self._process(place)
            if local not in said and _state(process) not in ("Z", ""):
                yield local, process, rank

    @staticmethod
    def _process(place: Path) -> tuple[int, int]:
        """Return the number of a process and its rank, from the file that it left."""
        process, rank = place.read_text(encoding="utf-8").split()
        return int(process), int(rank)

    def _where(self, local: str, process: int) -> str:
        """Return the end of a sentence on where a rank is, "" for one that only waits for others."""
        if _state(process) == "T":
            return "is stopped (SIGSTOP)"
        os.kill(process, signal.SIGUSR1)
        until, place = time.monotonic() + _ANSWER_S, self._folder / f"stack{local}"
        while not place.stat().st_size and time.monotonic() < until:
            time.sleep(0.05)
        frames, of_model = stack_frames(place.read_text(encoding="utf-8"))
        if not of_model and any("distributed" in Path(file).name for file, _, _ in frames[:2]):
            return ""
        at = ", ".join(f"{file}:{line} in {name}" for file, line, name in (of_model or frames)[:1])
        return f"is at {at}" if at else "did not say where it is"


def _state(process: int) -> str:
    """Return Linux's letter for the state of a process, `Z` for one that has ended; `?` where it is not known."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return "" if Path("/proc/self/stat").exists() else "?"
