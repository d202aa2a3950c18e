"""``make bench-context``: sequences that two gloo ranks share, in turn in one run; and how long they may be.

The model is a Llama with 4 layers of width 64 and 4 heads, and one sample of ``LENGTH`` tokens. The sides: parc on two
ranks with each way of ``using``, and on one rank; every rank has one thread. The limit is half of one rank.

Then, for 1, 2 and 4 ranks, the longest sequence of which a build says that a rank's peak stays below a limit of memory;
the first two run for a step, and the peak of their tensors is measured. ``python -m benchmarks.context STEPS`` takes
another number of steps.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.storages import Storages
from benchmarks.turns import LAUNCHED, ROOT, in_turn, steps

SIDES = {"one": 1, "gather": 2, "ring": 2, "zigzag": 2, "ulysses": 2}
LENGTH, LIMIT = 8192, 256 * 2**20
MODEL = "layers=4, width=64"
PLAN = ROOT / "examples" / "llama-long.parc"
BUILDS = ROOT / "build" / "bench" / "context"


def batch(length: int) -> dict[str, torch.Tensor]:
    """Return the whole batch, the same on every rank."""
    words = torch.randint(0, 512, (2, 1, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": words[0], "targets": words[1]}


def build(folder: Path, ranks: int, using: str, length: int) -> dict[str, Any]:
    """Build the plan, and return its report."""
    text = PLAN.read_text().replace("B=2", "B=1").replace("./llama.py", str(PLAN.parent / "llama.py"))
    plan = folder.with_suffix(".parc")
    plan.write_text(text.replace("heads=8, kv_heads=4", "heads=4, kv_heads=2"))
    words = ["layers=4", "width=64", f"length={length}", f"cp={ranks}", f"using={using}"]
    defines = [item for word in words for item in ("-D", word)]
    command = [sys.executable, "-m", "parc", "build", str(plan), "-o", str(folder), *defines]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def worker(side: str, port: str) -> None:
    """Run one rank of a side; its first rank prints what it took."""
    import parc

    torch.set_num_threads(1)
    if SIDES[side] == 1:
        if os.environ["RANK"] != "0":
            os._exit(0)
        os.environ["WORLD_SIZE"] = "1"
    session, whole = parc.load(BUILDS / side), batch(LENGTH)
    taken = steps(lambda: session.step(whole), side, port, int(os.environ["STEPS"]))
    if os.environ["RANK"] == "0":
        (BUILDS / f"{side}.json").write_text(json.dumps(taken))
    os._exit(0)  # as in benchmarks/peers.py


def times_of_steps(times: int) -> None:
    """Build, run all sides in turn, and print the table."""
    BUILDS.mkdir(parents=True, exist_ok=True)
    for side, ranks in SIDES.items():
        build(BUILDS / side, ranks, "zigzag" if side == "one" else side, LENGTH)
    environment = {**LAUNCHED, "STEPS": str(times)}
    in_turn({side: (["-m", "benchmarks.context"], environment) for side in SIDES}, 2, times)
    seconds_of = {side: json.loads((BUILDS / f"{side}.json").read_text()) for side in SIDES}
    print(f"{LENGTH} tokens, two ranks\n{'side':<10}{'least':>9}{'median':>9}{'of one rank (0.5 at best)':>28}")
    for side, taken in seconds_of.items():
        least, middle = min(taken), statistics.median(taken)
        ratios = f"{least / min(seconds_of['one']):.2f} ({middle / statistics.median(seconds_of['one']):.2f})"
        print(f"{side:<10}{least:>8.3f}s{middle:>8.3f}s{ratios:>28}")


def measured(path: str) -> None:
    """Run two steps on this rank, and print the largest bytes of tensors in the second."""
    import parc

    torch.set_num_threads(1)
    whole = batch(int(os.environ["LENGTH"]))
    with Storages() as storages, parc.load(path) as session:
        session.step(whole)
        storages.peak = storages.bytes
        session.step(whole)
    if os.environ.get("RANK", "0") == "0":
        print(storages.peak)


def longest(ranks: int, folder: Path) -> tuple[int, int]:
    """Return the longest sequence of a multiple of 512 tokens below the limit, and the peak that its build says. A peak
    grows evenly with the sequence, so two builds tell where the limit lies."""

    def peak(parts: int) -> int:
        return int(build(folder, ranks, "zigzag", 512 * parts)["memory"][0]["peak_bytes"])

    first, last = 4 * ranks, 12 * ranks
    one, other = peak(first), peak(last)
    parts = first + int((LIMIT - one) * (last - first) / (other - one))
    while peak(parts + 1) <= LIMIT:
        parts += 1
    while (size := peak(parts)) > LIMIT:
        parts -= 1
    return 512 * parts, size


def lengths() -> None:
    """Print the longest sequences."""
    print(f"\na limit of {LIMIT // 2**20} MiB of tensors a rank")
    print(f"{'ranks':<8}{'tokens':>8}{'of one rank':>13}{'estimate':>13}{'measured':>13}")
    first = 0
    with tempfile.TemporaryDirectory() as place:
        for ranks in (1, 2, 4):
            folder = Path(place) / f"cp{ranks}"
            length, peak = longest(ranks, folder)
            first = first or length
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
            command = [sys.executable, *launch, "-m", "benchmarks.context", "measure", str(folder)]
            environment = {**os.environ, **LAUNCHED, "LENGTH": str(length)}
            told = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
            seen = int(told.stdout.split()[-1])
            print(f"{ranks:<8}{length:>8,}{length / first:>13.2f}{peak / 2**20:>9.1f} MiB{seen / 2**20:>9.1f} MiB")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "measure":
        measured(sys.argv[2])
    elif len(sys.argv) == 3:
        worker(*sys.argv[1:])
    else:
        times_of_steps(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
        lengths()
