"""Real ranks for tests: functions run in processes that are joined by gloo, forked from a server that knows torch.

The server is a fork of the tests' process, made before the first test; warnings are errors in it too. It forks rank 0,
which reads the builds, records their models and forks the other ranks: so this is done once for all ranks.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import pairwise
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Module

from parc.compiler.build.build import BuildError
from parc.compiler.build.directory import MANIFEST, read_build
from parc.compiler.capture.model_calls import TaskLines, model_builder
from parc.compiler.initial.recipes import record
from parc.runtime.state import initial
from parc.runtime.state.opening import task_of

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([])  # it is a fork: the modules are there


def start_server() -> None:
    """Start the server of ranks, if it does not run."""
    from tests.runtime.warm import warm_up

    warm_up()
    resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", _fork)
        forkserver.ensure_running()


def _fork(python: str, words: list[str], files: list[int]) -> int:
    """Fork this process where multiprocessing would start a new Python for its server, which would import all anew.
    Return the number of the new process; in it, be the server with these open files alone."""
    gc.collect()  # here, and not in each rank
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of xdist's thread, which holds nothing that ranks need
        number = os.fork()
    if number:
        return number
    try:
        faulthandler.disable()  # it would write to a file that is closed now
        for first, last in pairwise([2, *sorted(files), os.sysconf("SC_OPEN_MAX")]):
            os.closerange(first + 1, last)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)  # a forked process has none of the threads of the pool
        gc.freeze()
        forkserver._forkserver.__init__()  # type: ignore # this process has its lock; a launcher has its own server
        SERVER.set_forkserver_preload([])
        exec(words[-1], {})  # what multiprocessing would give the new Python: it differs from version to version
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def run_ranks(
    function: Callable[..., Any], world: int, *arguments: Any, wait_s: float = 90, before: Callable[[], object] = bool
) -> list[Any]:
    """Run ``function(*arguments)`` on every rank of a gloo group, and return the results in rank order; they may take
    ``wait_s``. What ``before`` does in a process is done once for all ranks.

    Raises:
        AssertionError: a rank failed, with its traceback.
    """
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [SERVER.Pipe(duplex=False) for _ in range(world)]
        first = SERVER.Process(
            target=_first_rank, args=(folder, [pipe for _, pipe in pipes], before, function, arguments), daemon=True
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


def _first_rank(
    folder: str,
    pipes: list[Any],
    before: Callable[[], object],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Be rank 0, in a group of processes with the others, and wait for them at the end."""
    os.setsid()
    hide_gpus()
    before()
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


def hide_gpus() -> None:
    """Compute on the CPU: the server of ranks has closed the files of a GPU's driver, which would be asked for them."""
    from parc.runtime.ranks.processes import DEVICE

    os.environ.update({DEVICE: "cpu", "CUDA_VISIBLE_DEVICES": ""})


def _read_builds(arguments: tuple[Any, ...]) -> None:
    """Read the builds among the arguments, and those in folders among them, and record their models: what was read once
    is known, and so is, for the short life of these processes, what was recorded once. A build that cannot be read is
    refused where a rank opens it."""
    builders: dict[str, Callable[[], Module]] = {}

    def builder_once(lines: TaskLines, folder: Path) -> Callable[[], Module]:
        key = repr((lines, folder))
        if key not in builders:
            builders[key] = model_builder(lines, folder)
        return builders[key]

    record_once = cache(record)
    for name, function in {"model_builder": builder_once, "record": record_once}.items():
        setattr(initial, name, function)
    for path in (Path(argument) for argument in arguments if isinstance(argument, str)):
        if path.is_dir():
            for folder in [path] if (path / MANIFEST).is_file() else sorted(path.iterdir()):
                with suppress(BuildError):
                    build = read_build(folder, custom="refused")
                    make = builder_once(task_of(build.manifest), build.folder)
                    record_once(make, int(build.manifest["seed"]))


def _rank(rank: int, folder: str, pipes: list[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    from parc.runtime.ranks.processes import STORE, join_processes, leave

    for other in pipes[:rank] + pipes[rank + 1 :]:
        other.close()  # its end is seen when its own rank dies
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(len(pipes)))
    os.environ[STORE] = str(Path(folder) / "store")
    try:
        if len(pipes) > 1:
            join_processes(timeout_s=240)  # a rank may compile for long where others want the cores
        pipes[rank].send_bytes(pickle.dumps((True, function(*arguments))))
        leave()
    except BaseException:
        pipes[rank].send_bytes(pickle.dumps((False, traceback.format_exc())))
