"""``make bench-experts``: a mixture of experts on two gloo ranks, in turn in one run.

The model is Mixtral's with 4 layers of width 256, 8 experts and 2 of them a token; each rank has 4 samples of 128
tokens and one thread. The sides: parc with all experts on each rank (``dp=2``) and with half of them (``ep=2``), and
the plain module under DistributedDataParallel, with the same optimizer. Prints the least and the median seconds of a
step, and the bytes of training state on a rank. ``python -m benchmarks.experts STEPS`` takes another number of steps.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.turns import LAUNCHED, ROOT, in_turn, steps

SIDES = {"dp=2": {"dp": 2, "ep": 1}, "ep=2": {"dp": 1, "ep": 2}, "DDP": {}}
SAMPLES, LENGTH, LAYERS, WIDTH = 8, 128, 4, 256
PLAN = ROOT / "examples" / "moe.parc"
BUILDS = ROOT / "build" / "bench" / "experts"


def batch() -> dict[str, torch.Tensor]:
    """Return the whole batch, the same on every rank."""
    words = torch.randint(0, 256, (2, SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": words[0], "targets": words[1]}


def parc_step(side: str) -> tuple[Any, int]:
    """Return a side's step, and the bytes of its parameters and optimizer on this rank."""
    import parc

    session, whole = parc.load(BUILDS / side), batch()
    session.step(whole)
    held = sum(value.nbytes for value in session.state.parameters.values())
    return lambda: session.step(whole), 3 * held  # AdamW keeps two of each


def plain_step() -> tuple[Any, int]:
    """Return a step of the plain module under DistributedDataParallel, and the bytes of its state."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from examples.moe import mixtral

    dist.init_process_group("gloo")
    rank, words = dist.get_rank(), batch()
    torch.manual_seed(0)
    model = mixtral(layers=LAYERS, width=WIDTH, ffn=WIDTH, length=LENGTH)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    own = slice(rank * SAMPLES // 2, (rank + 1) * SAMPLES // 2)

    def step() -> None:
        optimizer.zero_grad()
        logits = parallel(words["input_ids"][own]).logits
        F.cross_entropy(logits.flatten(0, 1), words["targets"][own].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step, 3 * sum(value.nbytes for value in model.parameters())


def worker(side: str, port: str) -> None:
    """Run one rank of a side; its first rank prints what it took."""
    torch.set_num_threads(1)
    step, held = parc_step(side) if SIDES[side] else plain_step()
    taken = steps(step, side, port, int(os.environ["STEPS"]))
    if os.environ["RANK"] == "0":
        (BUILDS / f"{side}.json").write_text(json.dumps({"seconds": taken, "bytes": held}))
    os._exit(0)  # as in benchmarks/peers.py


def main(times: int) -> None:
    """Build, run all sides in turn, and print the table."""
    BUILDS.mkdir(parents=True, exist_ok=True)
    small = ROOT / "build" / "bench" / "experts.parc"
    text = (
        PLAN.read_text().replace("./moe.py", str(ROOT / "examples" / "moe.py")).replace("length=64", f"length={LENGTH}")
    )
    small.write_text(text.replace("B=8, S=64", f"B={SAMPLES}, S={LENGTH}"))
    for side, mesh in SIDES.items():
        words = [f"{name}={value}" for name, value in {**mesh, "width": WIDTH, "layers": LAYERS}.items()]
        command = [sys.executable, "-m", "parc", "build", str(small), "-o", str(BUILDS / side)]
        defines = [item for word in words for item in ("-D", word)]
        if mesh:
            subprocess.run([*command, *defines], cwd=ROOT, check=True, capture_output=True)
    environment = {**LAUNCHED, "STEPS": str(times)}
    in_turn({side: (["-m", "benchmarks.experts"], environment) for side in SIDES}, 2, times)
    found = {side: json.loads((BUILDS / f"{side}.json").read_text()) for side in SIDES}
    first = found["dp=2"]["seconds"]
    print(f"{'side':<8}{'least':>9}{'median':>9}{'of dp=2':>16}{'state a rank':>15}")
    for side, row in found.items():
        least, middle = min(row["seconds"]), statistics.median(row["seconds"])
        ratios = f"{least / min(first):.2f} ({middle / statistics.median(first):.2f})"
        print(f"{side:<8}{least:>8.3f}s{middle:>8.3f}s{ratios:>16}{row['bytes'] / 2**20:>11.1f} MiB")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        worker(*sys.argv[1:])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
