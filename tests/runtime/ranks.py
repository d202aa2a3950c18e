"""Real ranks for tests: functions run in processes that are joined by gloo, forked from a server that knows torch.

The server forks rank 0, which reads the builds and forks the other ranks: so the programs' texts are read once.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from contextlib import chdir, suppress
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

from parc.compiler.build.build import BuildError
from parc.compiler.build.directory import MANIFEST, read_build

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.runtime.warm"])
_ROOT = Path(__file__).resolve().parents[2]


def start_server() -> None:
    """Start the server of ranks, if it does not run. It starts in the root folder: elsewhere it would not find what it
    is to know, and would say nothing, and every rank would import torch for itself."""
    with chdir(_ROOT):
        ensure_running()


def run_ranks(function: Callable[..., Any], world: int, *arguments: Any, wait_s: float = 90) -> list[Any]:
    """Run ``function(*arguments)`` on every rank of a gloo group, and return the results in rank order; they may take
    ``wait_s``.

    Raises:
        AssertionError: a rank failed, with its traceback.
    """
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [SERVER.Pipe(duplex=False) for _ in range(world)]
        first = SERVER.Process(
            target=_first_rank, args=(folder, [pipe for _, pipe in pipes], function, arguments), daemon=True
        )
        first.start()
        for _, pipe in pipes:
            pipe.close()
        try:
            results = [_receive(reader, wait_s) for reader, _ in pipes]
        finally:
            first.join(10)
            first.kill()
            assert first.pid
            with suppress(ProcessLookupError):
                os.killpg(first.pid, signal.SIGKILL)
    failed = [text for done, text in results if not done]
    assert not failed, "\n".join(failed)
    return [value for _, value in results]


def _receive(reader: Any, wait_s: float) -> tuple[bool, Any]:
    if not reader.poll(wait_s):
        return False, "a rank did not answer"
    try:
        done, value = pickle.loads(
            reader.recv_bytes()
        )  # a plain pickle: torch's would share memory with a dead process
    except EOFError:
        return False, "a rank died"
    return bool(done), value


def _first_rank(folder: str, pipes: list[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Be rank 0, in a group of processes with the others, and wait for them at the end."""
    os.setsid()
    _read_builds(arguments)
    others = []
    for rank in range(1, len(pipes)):
        others.append(os.fork())
        if not others[-1]:
            try:
                _rank(rank, folder, pipes, function, arguments)
            finally:
                os._exit(0)
    _rank(0, folder, pipes, function, arguments)
    for other in others:
        os.waitpid(other, 0)


def _read_builds(arguments: tuple[Any, ...]) -> None:
    """Read the builds among the arguments, and those in folders among them: what was read once is known."""
    for path in (Path(argument) for argument in arguments if isinstance(argument, str)):
        if path.is_dir():
            for build in [path] if (path / MANIFEST).is_file() else sorted(path.iterdir()):
                with suppress(BuildError):
                    read_build(build, imports=False)


def _rank(rank: int, folder: str, pipes: list[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    from parc.runtime.processes import DEVICE, STORE, join_processes, leave

    for other in pipes[:rank] + pipes[rank + 1 :]:
        other.close()  # its end is seen when its own rank dies
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(len(pipes)))
    os.environ[STORE] = str(Path(folder) / "store")
    try:
        if len(pipes) > 1:
            os.environ[DEVICE] = "cpu"  # over NCCL each rank wants a GPU of its own
            join_processes(timeout_s=240)  # a rank may compile for long where others want the cores
        pipes[rank].send_bytes(pickle.dumps((True, function(*arguments))))
        leave()
    except BaseException:
        pipes[rank].send_bytes(pickle.dumps((False, traceback.format_exc())))
