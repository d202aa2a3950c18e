"""Ranks that do not answer. Once another has waited too long, the launcher says where each of them is, and ends it."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self, final

from ..processes import STORE
from .failures import read_failure

_GRACE_S = 2.0
"""The time that the other ranks have to see that one is gone, and to say so, in seconds."""
_ANSWER_S = 1.0
_FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')
_PARC = str(Path(__file__).resolve().parents[2])


def answer() -> None:
    """Let the launcher ask this rank: write its process number to a file, and on SIGUSR1 its stack, even in a wait."""
    folder, local, rank = Path(os.environ[STORE]).parent, os.environ["LOCAL_RANK"], os.environ["RANK"]
    stack = open(folder / f"stack{local}", "w", encoding="utf-8")  # noqa: SIM115 open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stack)
    (folder / f"process{local}").write_text(f"{os.getpid()} {rank}", encoding="utf-8")


@final
class Hanging:
    """A search, beside the launcher, for ranks of this host for which others waited too long; ``found`` says what they
    do.

    A context: it looks until it is left.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="parc-hanging", daemon=True)
        self.found: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not any(read_failure(0, 1, place).late for place in self._folder.rglob("error.json")):
            if self._over.wait(0.2):
                return
        self._over.wait(_GRACE_S)
        for local, process, rank in self._silent():
            if where := self._where(local, process):
                self.found.append(f"rank {rank} does not answer: process {process} {where}")
            os.kill(process, signal.SIGKILL)

    def _silent(self) -> Iterator[tuple[str, int, int]]:
        """Yield the ranks that run and have reported no failure: the local number, the process, the rank."""
        said = {place.parent.name for place in self._folder.rglob("error.json")}
        for place in sorted(self._folder.glob("process*")):
            local = place.name.removeprefix("process")
            process, rank = map(int, place.read_text(encoding="utf-8").split())
            if local not in said and _state(process) not in ("Z", ""):
                yield local, process, rank

    def _where(self, local: str, process: int) -> str:
        """Return a sentence on what a rank does, "" for one that only waits for others."""
        if _state(process) == "T":
            return "is stopped (SIGSTOP)"
        os.kill(process, signal.SIGUSR1)
        until, place = time.monotonic() + _ANSWER_S, self._folder / f"stack{local}"
        while not place.stat().st_size and time.monotonic() < until:
            time.sleep(0.05)
        frames = _FRAME.findall(place.read_text(encoding="utf-8"))
        own = [frame for frame in frames if not _foreign(frame[0])]
        if not own and any("distributed" in Path(file).name for file, _, _ in frames[:2]):
            return ""
        at = ", ".join(f"{file}:{line} in {name}" for file, line, name in (own or frames)[:1])
        return f"is at {at}" if at else "did not say where it is"


def _foreign(file: str) -> bool:
    """Return whether a file belongs to Python, torch or parc itself."""
    return file.startswith((sysconfig.get_path("stdlib"), _PARC, "<")) or "/parc/" in file or "/torch/" in file


def _state(process: int) -> str:
    """Return Linux's letter for the state of a process, `Z` for one that has ended; `?` where it is not known."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return "" if Path("/proc/self/stat").exists() else "?"
