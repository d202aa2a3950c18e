"""Reports of failed processes to their launcher: a small file that says which rank failed, when, and why."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ...grammar.diagnostics import render
from ..communication import PeerLost
from ..faults import RunError
from ..processes import STORE

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "connection was closed",
    "NCCL communicator",
)


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a rank; ``rank`` is None where no rank is to blame. ``follows`` is True where it failed because
    another rank had failed before or, if ``late``, did not come in time; ``waited`` names the wait in which it
    ended."""

    rank: int | None
    time_s: float
    exit_code: int
    message: str
    follows: bool = False
    late: bool = False
    expected: bool = False
    waited: str = ""

    def text(self) -> str:
        """The failure in words."""
        if self.rank is None or self.expected:
            return self.message
        return f"rank {self.rank} failed: {self.message}"


def failure_of(rank: int, error: BaseException) -> Failure:
    """The failure of a rank that ended with an error."""
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
    if not follows:
        text = "".join(traceback.format_exception(error)).rstrip()
    return Failure(rank, time.time(), 4, text, follows=follows, waited=waited)


def begin() -> None:
    """Tell the launcher that this rank notes signals by itself from now on, and will report what it saved."""
    if STORE in os.environ:
        began_file(Path(os.environ[STORE]).parent).touch()


def began(folder: Path) -> bool:
    """Return whether a rank has left the word that training began."""
    return began_file(folder).exists()


def began_file(folder: Path) -> Path:
    """Return the path of the file that is left when training begins, among the files of a run's processes."""
    return folder / "began"


def unbegun(number: int) -> str:
    """Return the message of a run that a signal stopped before it trained."""
    return f"stopped by {signal.Signals(number).name} before the first step; nothing was saved"


def leave_failure(failure: Failure) -> bool:
    """Write a failure where the launcher looks for it. Return False if no launcher of parc's looks."""
    path = os.environ.get(_ERROR_FILE)
    if path is None:
        return False
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # The inner ``message`` and ``timestamp`` are what torchrun shows; the rest is for parc.
    extra = {"timestamp": str(int(failure.time_s))}
    content = {
        "message": {"message": failure.message, "extraInfo": extra},
        "parc": {
            "time_s": failure.time_s, "exit_code": failure.exit_code, "message": failure.message,
            "follows": failure.follows, "late": failure.late, "expected": failure.expected, "waited": failure.waited,
        },
    }  # fmt: skip
    Path(path).write_text(json.dumps(content), encoding="utf-8")
    return True


def read_failure(rank: int, exit_code: int, path: Path) -> Failure:
    """Return the failure of a rank from its report; a rank that was killed left none."""
    try:
        left = json.loads(path.read_text(encoding="utf-8"))["parc"]
        return Failure(rank, **left)
    except (OSError, ValueError, KeyError, TypeError):
        pass_on = exit_code in (128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGHUP)
        if pass_on:
            return Failure(rank, time.time(), exit_code, "it was stopped")
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = ", often because memory ran out" if name == "SIGKILL" else ""
        # A rank that the launcher ended, because another had failed, explains nothing.
        return Failure(rank, time.time(), 4, f"it was killed by {name}{hint}", follows=name == "SIGTERM")
    return Failure(rank, time.time(), 4, f"it ended with exit code {exit_code}")
