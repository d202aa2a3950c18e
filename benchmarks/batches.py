"""``make bench-batches``: the part of a step's time that the comparison of all ranks' batches takes.

Two gloo ranks of one thread train the Llama of ``llama20m.parc`` over ``dp``, on whole batches. Steps that hash the
batch and steps that do not take turns; the time inside the hash stands beside them, as does how fast pictures are
hashed. The exchange that brings the hashes is in both: it is the one in which ranks add up their counts of targets.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.peers import PLAN, batch
from benchmarks.turns import LAUNCHED, ROOT, WARM_UP
from parc.compiler.initial.counter import digest
from parc.runtime.data import feed

PICTURES = (64, 3, 224, 224)


def worker(build: Path, times: int) -> None:
    """Run one rank: steps in turn, and the table on the first rank."""
    import parc

    torch.set_num_threads(1)
    session, data = parc.load(build), batch()
    inside = 0.0

    def timed(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal inside
        start = time.perf_counter()
        number = digest(tensor)
        inside += time.perf_counter() - start
        return number

    nothing = torch.zeros((), dtype=torch.int64)
    taken: dict[bool, list[float]] = {True: [], False: []}
    hashed = []
    for turn in range(2 * (WARM_UP + times)):
        on, inside = turn % 2 == 0, 0.0
        feed.digest = timed if on else lambda _: nothing
        dist.barrier()
        start = time.perf_counter()
        session.step(data)
        if turn >= 2 * WARM_UP:
            taken[on].append(time.perf_counter() - start)
            hashed += [inside] if on else []
    if session.rank == 0:
        with_, without, within = (statistics.median(seconds) for seconds in (taken[True], taken[False], hashed))
        print(f"a step that hashes its batch   {with_ * 1e3:9.2f} ms (median of {times}, in turn)")
        print(f"a step that does not           {without * 1e3:9.2f} ms (ratio {with_ / without:.4f})")
        print(f"inside the hash                {within * 1e3:9.3f} ms ({within / with_:.4%} of the step)")
        pictures = torch.randn(PICTURES)
        seconds = []
        for _ in range(10):
            start = time.perf_counter()
            digest(pictures)
            seconds.append(time.perf_counter() - start)
        rate = pictures.numel() * 4 / min(seconds) / 1e9
        print(f"64 pictures of 224 x 224       {min(seconds) * 1e3:9.2f} ms ({rate:.1f} GB/s on one thread)")
    sys.stdout.flush()
    os._exit(0)  # as in benchmarks/peers.py


def main(times: int) -> None:
    """Build, and run both ranks."""
    build = ROOT / "build" / "bench" / "llama20m-dp2-tp1"
    command = [sys.executable, "-m", "parc", "build", str(PLAN), "-o", str(build), "-D", "dp=2"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = ["-m", "benchmarks.batches", "--worker", str(build), str(times)]
    subprocess.run([sys.executable, *ranks, *script], cwd=ROOT, check=True, env={**os.environ, **LAUNCHED})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), int(sys.argv[3]))
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
