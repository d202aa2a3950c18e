"""``make bench-batches``: the part of a step's time that the comparison of all ranks' batches takes.

Two gloo ranks of one thread train the Llama of ``llama20m.parc`` over ``dp``, on whole batches. Steps that hash the
batch and steps that do not take turns; the time inside the hash stands beside them, as does how fast pictures are
hashed. The exchange that brings the hashes is in both: it is the one in which ranks add up their counts of targets.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import parc
from benchmarks.command import command
from benchmarks.peers import BATCH, PLAN
from benchmarks.sides import BUILDS, Stopwatch, built
from benchmarks.turns import WARM_UP, Side, run
from parc.compiler.initial.counter import digest
from parc.runtime.data import feed


def worker(build: Path, times: int) -> tuple[list[float], list[float], list[float]]:
    """Run one rank, whose steps hash and do not hash in turn. Return the seconds of those that hash, of those that do
    not, and those inside the hash."""
    session = parc.load(build)
    step, hashing, no_digest = Stopwatch(session.step), Stopwatch(digest), torch.zeros((), dtype=torch.int64)
    hashed, plain, inside = list[float](), list[float](), list[float]()
    for _ in range(WARM_UP + times):
        for function, seconds in ((hashing, hashed), (lambda _: no_digest, plain)):
            feed.digest = function  # type: ignore[assignment, attr-defined]
            dist.barrier()
            step(BATCH)
            seconds.append(step.lap())
        inside.append(hashing.lap())
    return hashed[WARM_UP:], plain[WARM_UP:], inside[WARM_UP:]


def hash_pictures() -> tuple[int, list[float]]:
    """Hash 64 pictures ten times. Return their bytes, and the seconds of each time."""
    pictures, hashing, seconds = torch.randn(64, 3, 224, 224), Stopwatch(digest), []
    for _ in range(10):
        hashing(pictures)
        seconds.append(hashing.lap())
    return pictures.nbytes, seconds


def main(times: int = 10) -> None:
    """Build, run both ranks, and print what was measured."""
    build = built(BUILDS / "llama20m-dp2-tp1-zero0", PLAN, dp=2)
    hashed, plain, inside = map(median, run(Side(worker, (build, times), 2))[0])
    print(f"a step that hashes its batch   {hashed * 1e3:9.2f} ms (median of {times}, in turn)")
    print(f"a step that does not           {plain * 1e3:9.2f} ms (ratio {hashed / plain:.4f})")
    print(f"inside the hash                {inside * 1e3:9.3f} ms ({inside / hashed:.4%} of the step)")
    ((size, seconds),) = run(Side(hash_pictures))
    rate = size / min(seconds) / 1e9
    print(f"64 pictures of 224 x 224       {min(seconds) * 1e3:9.2f} ms ({rate:.1f} GB/s on one thread)")


if __name__ == "__main__":
    command(main)
