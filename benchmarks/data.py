"""``make bench-data``: how long a step waits for its data.

One rank of one thread trains the Llama of ``llama20m.parc`` on a file of 100 M tokens that is mapped into memory and
shuffled. The time inside the feed, in the thread that trains, stands beside the whole step's; and beside it the time
that reading the same rows takes in the open, which a thread does meanwhile.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers import PLAN, VOCAB
from benchmarks.turns import LAUNCHED, ROOT, WARM_UP

TOKENS = 100_000_000


def worker(build: Path, times: int) -> None:
    """Train, and print the table."""
    import parc

    torch.set_num_threads(1)
    session = parc.load(build)
    read, inside = session.feed.read, 0.0

    def timed(step: int, steps: int | None = None) -> object:
        nonlocal inside
        start = time.perf_counter()
        part = read(step, steps)
        inside += time.perf_counter() - start
        return part

    session.feed.read = timed  # type: ignore[assignment, method-assign]
    steps, waits = [], []
    for turn in range(WARM_UP + times):
        inside, start = 0.0, time.perf_counter()
        session.step()
        if turn >= WARM_UP:
            steps.append(time.perf_counter() - start)
            waits.append(inside)
    session.close()
    alone = []
    for step in range(times):
        start = time.perf_counter()
        read(10_000 + step, 0)
        alone.append(time.perf_counter() - start)
    session.close()
    step_s, wait_s, alone_s = (statistics.median(seconds) for seconds in (steps, waits, alone))
    print(f"a step                       {step_s * 1e3:9.2f} ms (median of {times})")
    most = f"most {max(waits) * 1e3:.3f} ms"
    print(f"waiting for data             {wait_s * 1e3:9.3f} ms ({wait_s / step_s:.3%} of the step; {most})")
    print(f"reading a step's rows alone  {alone_s * 1e3:9.3f} ms ({alone_s / step_s:.3%} of the step)")


def main(times: int) -> None:
    """Write the tokens, build, and run."""
    folder = ROOT / "build" / "bench" / "data"
    folder.mkdir(parents=True, exist_ok=True)
    tokens, plan = folder / "train.bin", folder / "llama20m.parc"
    if not tokens.exists():
        np.random.default_rng(0).integers(0, VOCAB, TOKENS, dtype=np.uint16).tofile(tokens)
    text = PLAN.read_text().replace('"../examples/', f'"{ROOT}/examples/')
    plan.write_text(f'{text}\ndata      tokens "{tokens.name}" dtype uint16 shuffle\n')
    build = folder / "llama20m"
    command = [sys.executable, "-m", "parc", "build", str(plan), "-o", str(build)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    script = [sys.executable, "-m", "benchmarks.data", "--worker", str(build), str(times)]
    subprocess.run(script, cwd=ROOT, check=True, env={**os.environ, **LAUNCHED})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
