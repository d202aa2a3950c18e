"""Programs measured in turn: each has processes of its own, started by its own launcher, and runs a step while the
others wait."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from parc.runtime.launch.launch import KEEP_MEMORY

ROOT = Path(__file__).resolve().parent.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
LAUNCHED = {**ONE_THREAD, **KEEP_MEMORY}
"""The environment of a process that ``parc run`` starts: one thread, and its settings for memory."""
Step = Callable[[], object]
_LONGEST = timedelta(minutes=10)


def in_turn(sides: Mapping[str, tuple[Sequence[str], Mapping[str, str]]], ranks: int, times: int) -> None:
    """Start the processes of each side, a script with its arguments and additions to the environment. Give each side
    its turn, one after another, for the steps that warm up and ``times`` more. Each process calls ``steps``.

    Raises:
        RuntimeError: one ended before its time.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    running = {
        side: subprocess.Popen(
            [sys.executable, *start, *script, side, str(store.port)], cwd=ROOT, env={**os.environ, **environment}
        )
        for side, (script, environment) in sides.items()
    }
    try:
        for turn in range(WARM_UP + times):
            for side, process in running.items():
                store.set(f"{side} {turn}", "")
                _wait(store, f"{side} {turn} over", process)
        for side, process in running.items():
            if process.wait():
                raise RuntimeError(f"{side} ended with status {process.returncode}")
    finally:
        for process in running.values():
            process.kill()


WARM_UP = 3


def _wait(store: TCPStore, key: str, process: subprocess.Popen[bytes]) -> None:
    while not store.check([key]):
        if process.poll() is not None:
            raise RuntimeError(f"a side ended with status {process.returncode} before `{key}`")
        time.sleep(0.05)  # the processes need the cores


def steps(step: Step, side: str, port: str, times: int) -> list[float]:
    """Return the seconds of each step after the warm-up, in one rank of a side, which waits for its turn before
    each."""
    store = TCPStore("127.0.0.1", int(port), is_master=False, timeout=_LONGEST)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    taken = []
    for turn in range(WARM_UP + times):
        store.wait([f"{side} {turn}"], _LONGEST)
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
        if store.add(f"{side} {turn} done", 1) == ranks:
            store.set(f"{side} {turn} over", "")
    return taken[WARM_UP:]
