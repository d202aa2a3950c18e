"""``make bench-replicas``: the part of a step's time that the comparison of what ranks hold alike takes.

Two gloo ranks of one thread train over ``dp``, so that both hold all weights and moments: the GPT of ``parc example``,
and the Llama of ``llama20m.parc``. Steps after a check and steps without one take turns; the seconds of the check
itself stand beside them, and its share of all steps where it is made after every 1,000th, as without a line in the
plan. Its exchange is the step's own.
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

from benchmarks.peers import PLAN
from benchmarks.turns import LAUNCHED, ROOT, WARM_UP
from parc.compiler.plan.directives.check import DEFAULT

PLANS = {"gpt": ROOT / "examples" / "gpt.parc", "llama20m": PLAN}
SIZES = ("-D", "dp=2", "-D", "tp=1")


def worker(name: str, build: Path, times: int) -> None:
    """Run one rank: steps in turn, and their figures on the first rank."""
    import parc

    torch.set_num_threads(1)
    session = parc.load(build)
    session.last_step = None
    sizes, generator = session.build.manifest["sizes"], torch.Generator().manual_seed(0)
    batch = {
        input_: torch.randint(0, 256, (sizes["B"], sizes["S"]), generator=generator) for input_ in session.feed.types
    }
    taken: dict[bool, list[float]] = {True: [], False: []}
    checks = []
    for turn in range(2 * (WARM_UP + times)):
        if on := turn % 2 == 0:
            session.replicas.due()
        dist.barrier()
        start = time.perf_counter()
        session.step(batch)
        if turn >= 2 * WARM_UP:
            taken[on].append(time.perf_counter() - start)
            if on:
                assert session.replicas.last is not None and not session.replicas.last.apart
                checks.append(session.replicas.last.seconds)
    if session.rank == 0:
        with_, without, check = (statistics.median(seconds) for seconds in (taken[True], taken[False], checks))
        tensors = sum(value.numel() for value in session.state.parameters.values())
        print(f"{name}: {tensors / 1e6:.2f} M parameters on each of two ranks, AdamW; medians of {times}, in turn")
        print(f"  a step without a check    {without * 1e3:9.1f} ms")
        print(f"  a step that begins by one {with_ * 1e3:9.1f} ms")
        print(f"  the check itself          {check * 1e3:9.1f} ms ({check / without:.2f} of a step)")
        print(f"  after every {DEFAULT:,}th step    {check / without / DEFAULT:9.4%} of all steps")
    sys.stdout.flush()
    os._exit(0)  # as in benchmarks/peers.py


def main(times: int) -> None:
    """Build each plan, and run both its ranks."""
    for name, plan in PLANS.items():
        build = ROOT / "build" / "bench" / f"{name}-dp2-tp1"
        command = [sys.executable, "-m", "parc", "build", str(plan), "-o", str(build), *SIZES]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        script = ["-m", "benchmarks.replicas", "--worker", name, str(build), str(times)]
        subprocess.run([sys.executable, *ranks, *script], cwd=ROOT, check=True, env={**os.environ, **LAUNCHED})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
