"""Real ranks for tests: functions run in processes that are joined by gloo, forked from a server that knows torch."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.runtime.warm"])


def run_ranks(function: Callable[..., Any], world: int, *arguments: Any, wait_s: float = 90) -> list[Any]:
    """Run ``function(*arguments)`` on every rank of a gloo group, and return the results in rank order; they may take
    ``wait_s``.

    Raises:
        AssertionError: a rank failed, with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [SERVER.Pipe(duplex=False) for _ in range(world)]
        processes = [
            SERVER.Process(target=_rank, args=(rank, world, folder, pipe, function, arguments), daemon=True)
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, pipe in pipes:
            pipe.close()
        try:
            results = [_receive(reader, wait_s) for reader, _ in pipes]
        finally:
            for process in processes:
                process.join(10)
                process.kill()
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


def _rank(
    rank: int, world: int, folder: str, pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    from parc.runtime.processes import STORE, join_processes, leave

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ[STORE] = str(Path(folder) / "store")
    try:
        if world > 1:
            join_processes(timeout_s=240)  # a rank may compile for long where others want the cores
        pipe.send_bytes(pickle.dumps((True, function(*arguments))))
        leave()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
