"""The end of a process with its parent, also of one that is stopped (SIGSTOP) or does not leave C. Imports no torch, so
that it holds from the start of a process."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

_SET_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of Linux: the signal that a process gets when the *thread* that started it ends."""
_LOOK_S = 0.5
"""The seconds between two looks at the parent, where the kernel does not tell of its end."""


def end_with_parent(parent: int) -> None:
    """End this process, without another word, when the process ``parent`` ends, which has started it. The thread of
    ``parent`` that did so must live as long: the kernel looks at threads."""
    if not _ask_kernel(signal.SIGKILL):
        threading.Thread(target=_follow, args=(parent,), name="parc-follow", daemon=True).start()
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


def wake_with_parent() -> None:
    """Let this process go on, if it is stopped, when its parent ends, so that it can notice that end."""
    _ask_kernel(signal.SIGCONT)


def wait_for_end(parent: int) -> None:
    """Wait until the process ``parent`` is this one's parent no longer."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)


def _follow(parent: int) -> None:
    wait_for_end(parent)
    os._exit(1)


def _ask_kernel(number: int) -> bool:
    """Ask for a signal at the parent's end. Return False where no kernel sends one."""
    control = getattr(ctypes.CDLL(None), "prctl", None)
    return control is not None and control(_SET_DEATH_SIGNAL, number, 0, 0, 0) == 0
