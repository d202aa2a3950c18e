"""``make bench-replicas``: the part of a step's time that the comparison of what ranks hold alike takes.

Two gloo ranks of one thread train over ``dp``, so that both hold all weights and moments: the GPT of ``parc example``,
and the Llama of ``llama20m.parc``. Steps after a check and steps without one take turns; the seconds of the check
itself stand beside them, and its share of all steps where it is made after every 1,000th, as without a line in the
plan. Its exchange is the step's own.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import parc
from benchmarks.command import command
from benchmarks.peers import PLAN
from benchmarks.sides import BUILDS, Stopwatch, built
from benchmarks.turns import ROOT, WARM_UP, Side, run
from parc.compiler.plan.directives.check import DEFAULT

PLANS = {"gpt": ROOT / "examples" / "gpt.parc", "llama20m": PLAN}


def worker(build: Path, times: int) -> tuple[int, list[float], list[float], list[float]]:
    """Run one rank, whose steps begin by a check and by none in turn. Return the number of its parameters, the seconds
    of steps with a check, of those without, and those of the checks."""
    session = parc.load(build)
    session.last_step = None
    sizes, generator = session.build.manifest["sizes"], torch.Generator().manual_seed(0)
    shape = sizes["B"], sizes["S"]
    batch = {name: torch.randint(0, 256, shape, generator=generator) for name in session.feed.types}
    step, compared, plain, checks = Stopwatch(session.step), list[float](), list[float](), list[float]()
    for _ in range(WARM_UP + times):
        for seconds in (compared, plain):
            if seconds is compared:
                session.replicas.due()
            dist.barrier()
            step(batch)
            seconds.append(step.lap())
        checked = session.replicas.last
        assert checked is not None and not checked.apart
        checks.append(checked.seconds)
    entries = sum(value.numel() for value in session.state.parameters.values())
    return entries, compared[WARM_UP:], plain[WARM_UP:], checks[WARM_UP:]


def main(times: int = 10) -> None:
    """Build each plan, run both its ranks, and print what was measured."""
    for name, plan in PLANS.items():
        build = built(BUILDS / f"{name}-dp2-tp1", plan, dp=2, tp=1)
        entries, *seconds = run(Side(worker, (build, times), 2))[0]
        compared, step, check = map(median, seconds)
        print(f"{name}: {entries / 1e6:.2f} M parameters on each of two ranks, AdamW; medians of {times}, in turn")
        print(f"  a step without a check    {step * 1e3:9.1f} ms")
        print(f"  a step that begins by one {compared * 1e3:9.1f} ms")
        print(f"  the check itself          {check * 1e3:9.1f} ms ({check / step:.2f} of a step)")
        print(f"  after every {DEFAULT:,}th step    {check / step / DEFAULT:9.4%} of all steps")


if __name__ == "__main__":
    command(main)
