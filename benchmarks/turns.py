"""Functions measured on processes of their own: once, or in turn with the other sides of a comparison.

A side is a row: a function of a benchmark, its arguments, its ranks, and the environment of their processes.
``run`` calls it once. ``in_turn`` starts all sides, and each runs a step while the others wait.
"""

from __future__ import annotations

import os
import pickle
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from parc.runtime.ranks.processes import KEEP_MEMORY

ROOT = Path(__file__).resolve().parent.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
LAUNCHED = {**ONE_THREAD, **KEEP_MEMORY}
"""The environment of a process that ``parc run`` starts: one thread, and its settings for memory."""
WARM_UP = 3
"""The steps of each side that are not measured."""
Step = Callable[[], object]
Timed = Callable[[Step], list[float]]
"""Run a step when it is this side's turn, until all turns are over; return the seconds of those after the warm-up."""
_LONGEST = timedelta(minutes=10)


@dataclass(frozen=True)
class Side:
    """One side of a comparison: every rank calls a function of a module, and what it returns is the measurement.

    Arguments and results are pickled, so they hold no class of the benchmark's own. Several ranks are joined by gloo.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any] = ()
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=LAUNCHED.copy)
    """Additions to the environment."""

    def command(self, name: str, store: TCPStore, times: int = 0) -> dict[str, Any]:
        """Leave in a store what the ranks are to do, and return the arguments of ``Popen`` that start them."""
        module = self.function.__module__
        if module == "__main__":  # of this process: the ranks have another
            module = sys.modules[module].__spec__.name  # type: ignore[union-attr]
        _put(store, f"{name} job", (module, self.function.__name__, self.arguments, times))
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"]
        words = [*launcher * (self.ranks > 1), "-m", "benchmarks.turns", name, str(store.port)]
        return {"args": [sys.executable, *words], "cwd": ROOT, "env": {**os.environ, **self.environment}}

    def results(self, name: str, store: TCPStore) -> list[Any]:
        """Return what the function returned on each rank."""
        return [pickle.loads(store.get(f"{name} result {rank}")) for rank in range(self.ranks)]


def run(side: Side, timeout_s: float | None = None) -> list[Any]:
    """Call a side's function on its ranks, and return the result of each.

    Raises:
        CalledProcessError: a rank failed; ``stderr`` says why.
        TimeoutExpired: they took longer than ``timeout_s`` seconds.
    """
    store = _store()
    command = side.command("side", store)
    try:
        subprocess.run(**command, check=True, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.CalledProcessError as failure:
        failure.add_note(failure.stderr[-2000:])
        raise
    return side.results("side", store)


def in_turn(sides: Mapping[str, Side], times: int) -> dict[str, list[Any]]:
    """Start the processes of each side, and give it its turn, one after another, for the steps that warm up and
    ``times`` more. The function of a side gets ``timed`` before its arguments. Return the results of its ranks.

    Raises:
        RuntimeError: a process ended before its time, or badly.
    """
    store = _store()
    running = {name: subprocess.Popen(**side.command(name, store, times)) for name, side in sides.items()}
    try:
        for turn in range(WARM_UP + times):
            for name, process in running.items():
                store.set(f"{name} {turn}", "")
                _wait(store, f"{name} {turn} over", process)
        for name, process in running.items():
            if process.wait():
                raise RuntimeError(f"{name} ended with status {process.returncode}")
    finally:
        for process in running.values():
            process.kill()
    return {name: side.results(name, store) for name, side in sides.items()}


def least_and_median(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the two numbers that stand for the seconds of many steps."""
    return min(seconds), statistics.median(seconds)


def beside(seconds: Sequence[float], base: Sequence[float]) -> tuple[str, str, str]:
    """Return the least and the median of seconds as cells of a table, and their ratios to those of another side."""
    (least, median), (base_least, base_median) = map(least_and_median, (seconds, base))
    return f"{least:.3f}", f"{median:.3f}", f"{least / base_least:.2f} ({median / base_median:.2f})"


def _store() -> TCPStore:
    """Start a store that no other computer reaches: what is in it is unpickled."""
    listener = socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _put(store: TCPStore, key: str, value: object) -> None:
    store.set(key, pickle.dumps(value))  # type: ignore[arg-type] # bytes are as good as a string


def _wait(store: TCPStore, key: str, process: subprocess.Popen[bytes]) -> None:
    while not store.check([key]):
        if process.poll() is not None:
            raise RuntimeError(f"a side ended with status {process.returncode} before `{key}`")
        time.sleep(0.05)  # the processes need the cores


def _timed(store: TCPStore, side: str, times: int, step: Step) -> list[float]:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    seconds = []
    for turn in range(WARM_UP + times):
        store.wait([f"{side} {turn}"], _LONGEST)
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
        if store.add(f"{side} {turn} done", 1) == ranks:
            store.set(f"{side} {turn} over", "")
    return seconds[WARM_UP:]


def _rank(side: str, port: str) -> NoReturn:
    """Do the work of one rank."""
    store = TCPStore("127.0.0.1", int(port), is_master=False, timeout=_LONGEST)
    module, name, arguments, times = pickle.loads(store.get(f"{side} job"))
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    timed = [partial(_timed, store, side, times)] * (times > 0)
    result = getattr(import_module(module), name)(*timed, *arguments)
    _put(store, f"{side} result {os.environ.get('RANK', '0')}", result)
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch's pipelines and compiler leave threads behind that abort an interpreter on its way out


if __name__ == "__main__":
    _rank(*sys.argv[1:])
