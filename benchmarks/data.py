"""``make bench-data``: how long a step waits for its data.

One rank of one thread trains the Llama of ``llama20m.parc`` on a file of 100 M tokens that is mapped into memory and
shuffled. The time inside the feed, in the thread that trains, stands beside the whole step's; and beside it the time
that reading the same rows takes in the open, which a thread does meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import numpy as np

import parc
from benchmarks.command import command
from benchmarks.peers import PLAN, VOCAB
from benchmarks.sides import BUILDS, Stopwatch, built, text_of
from benchmarks.turns import WARM_UP, Side, run

TOKENS = 100_000_000


def worker(build: Path, times: int) -> tuple[list[float], list[float], list[float]]:
    """Train. Return the seconds of steps, those in which they wait for data, and those of reading rows alone."""
    session = parc.load(build)
    step, read = Stopwatch(session.step), Stopwatch(session.feed.read)
    session.feed.read = read  # type: ignore[method-assign, assignment]
    steps, waits, alone = list[float](), list[float](), list[float]()
    for _ in range(WARM_UP + times):
        step()
        steps.append(step.lap())
        waits.append(read.lap())
    session.close()
    for number in range(times):
        read(10_000 + number, 0)
        alone.append(read.lap())
    session.close()
    return steps[WARM_UP:], waits[WARM_UP:], alone


def main(times: int = 20) -> None:
    """Write the tokens, build, run, and print what was measured."""
    folder = BUILDS / "data"
    tokens = folder / "train.bin"
    folder.mkdir(parents=True, exist_ok=True)
    if not tokens.exists():
        np.random.default_rng(0).integers(0, VOCAB, TOKENS, dtype=np.uint16).tofile(tokens)
    build = built(folder / "llama20m", f'{text_of(PLAN)}\ndata tokens "{tokens.name}" dtype uint16 shuffle\n')
    ((steps, waits, alone),) = run(Side(worker, (build, times)))
    step, wait, reading = map(median, (steps, waits, alone))
    print(f"a step                       {step * 1e3:9.2f} ms (median of {times})")
    most = f"most {max(waits) * 1e3:.3f} ms"
    print(f"waiting for data             {wait * 1e3:9.3f} ms ({wait / step:.3%} of the step; {most})")
    print(f"reading a step's rows alone  {reading * 1e3:9.3f} ms ({reading / step:.3%} of the step)")


if __name__ == "__main__":
    command(main)
