"""Processes of ``parc`` for tests: forked from the server of ranks, which knows torch, not started as a new Python."""

from __future__ import annotations

import atexit
import ctypes
import inspect
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing.reduction import DupFd
from typing import Any, final

import pytest
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from parc.runtime.ranks.processes import DEVICE
from tests.runtime.ranks import SERVER, hide_gpus, start_server

_MOST_RANKS = 8
"""The most ranks of a test."""


@final
class Forked:
    """A process ``python -m parc …``, with the part of ``subprocess.Popen`` that torch's agent asks for. It
    enters the namespaces of these files, and ``forks`` its ranks."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        stdout: int = 1,
        stderr: int = 2,
        namespaces: Sequence[str] = (),
        forks: bool = False,
    ) -> None:
        _, flag, module, *words = (word for word in command if word != "-u")  # torchrun's; nothing is buffered here
        assert (flag, module) == ("-m", "parc")
        files = _Files(stdout, stderr)
        self._process = SERVER.Process(
            target=_parc, args=(words, dict(env), os.getcwd(), files, namespaces, forks), daemon=True
        )
        self._process.start()
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """The exit code, less than zero for a signal, None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the same."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        self._process.join(timeout)
        if (code := self.returncode) is None:
            raise subprocess.TimeoutExpired("parc", timeout or 0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self.returncode is None:
            os.kill(self.pid, number)


@final
class _Files:
    """The open files of a process, which go to it as what they are."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def __reduce__(self) -> Any:
        return _detached, tuple(map(DupFd, self._numbers))


def _detached(*files: Any) -> tuple[int, ...]:
    return tuple(file.detach() for file in files)


def _parc(
    words: list[str], env: dict[str, str], folder: str, files: tuple[int, int], namespaces: Sequence[str], forks: bool
) -> None:
    """Be the process: with a session, files, an environment and arguments of its own."""
    os.setsid()
    enter(namespaces)
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(env)
    if "cuda" not in words:
        hide_gpus()
    os.chdir(folder)
    sys.argv = ["parc", *words]
    sys.modules.pop("parc.__main__", None)  # a test imports it, and here it is to begin
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # it may have children
    try:
        with forked_ranks() if forks else nullcontext():
            runpy.run_module("parc", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()


def enter(namespaces: Sequence[str]) -> None:
    """Let this process, which has one thread, enter the namespaces of these files, of which it may see none later."""
    libc = ctypes.CDLL(None, use_errno=True)
    for number in [os.open(file, os.O_RDONLY | os.O_CLOEXEC) for file in namespaces]:
        if libc.setns(number, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.close(number)


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Enter a block in which ``parc run`` forks its ranks."""

    def start(handler: Any, command: tuple[str, ...], env: dict[str, str]) -> Any:
        sys.stdout.flush()
        sys.stderr.flush()
        return Forked(command, env)

    start_server()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SubprocessHandler, "_popen", start)
            patch.setattr(inspect, "stack", partial(inspect.stack, 0))  # torch's agent would read all sources for names
            if torch.cuda.is_available() and torch.cuda.device_count() < _MOST_RANKS:
                patch.setenv(DEVICE, "cpu")  # over NCCL each rank wants a GPU of its own
            yield
    finally:
        for number, handler in handlers.items():  # torch's agent sets its own, and leaves them
            signal.signal(number, handler)
