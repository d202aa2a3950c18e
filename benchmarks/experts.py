"""``make bench-experts``: a mixture of experts on two gloo ranks, in turn in one run.

The model is Mixtral's with 4 layers of width 256, 8 experts and 2 of them a token; each rank has 4 samples of 128
tokens and one thread. The sides: parc with all experts on each rank (``dp=2``), with half of them (``ep=2``), and on
one rank with all samples (``one``), all with a router that gives every expert as many tokens; the first two with the
model's own router (``routed``); and the plain module under DistributedDataParallel, with the same optimizer. The side
``messages`` is those of ``ep=2`` alone, one after the other: all-to-alls of rows, and the sum of dense gradients.

Prints the least and the median seconds of a step, and the bytes of training state on a rank; then what ``ep=2`` takes
of half of ``one`` and ``messages``. ``python -m benchmarks.experts STEPS`` takes another number of steps.
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

EVEN, OWN = "even_experts.py:even", "moe.py:mixtral"
SIDES = {
    "dp=2": (EVEN, {"dp": 2, "ep": 1}),
    "ep=2": (EVEN, {"dp": 1, "ep": 2}),
    "one": (EVEN, {"dp": 1, "ep": 1}),
    "dp=2 routed": (OWN, {"dp": 2, "ep": 1}),
    "ep=2 routed": (OWN, {"dp": 1, "ep": 2}),
    "DDP": (OWN, {}),
    "messages": (OWN, {}),
}
SAMPLES, LENGTH, LAYERS, WIDTH, EXPERTS, TOP = 8, 128, 4, 256, 8, 2
PLAN = ROOT / "examples" / "moe.parc"
BUILDS = ROOT / "build" / "bench" / "experts"
_FOLDERS = {EVEN: "benchmarks", OWN: "examples"}


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
    half = slice(rank * SAMPLES // 2, (rank + 1) * SAMPLES // 2)

    def step() -> None:
        optimizer.zero_grad()
        logits = parallel(words["input_ids"][half]).logits
        F.cross_entropy(logits.flatten(0, 1), words["targets"][half].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step, 3 * sum(value.nbytes for value in model.parameters())


def messages_step() -> tuple[Any, int]:
    """Return the messages of a step of ``ep=2``: two all-to-alls of rows forward and two backward in each layer, those
    of what is chosen, and the sum of all gradients but those of experts."""
    import torch.distributed as dist

    from examples.moe import mixtral

    dist.init_process_group("gloo")
    model = mixtral(layers=LAYERS, width=WIDTH, ffn=WIDTH, length=LENGTH)
    dense = sum(value.numel() for name, value in model.named_parameters() if ".experts." not in name)
    tokens = SAMPLES * LENGTH // 2
    rows, chosen = torch.zeros(tokens * TOP, WIDTH), torch.zeros(EXPERTS, tokens, dtype=torch.bool)
    gradients = torch.zeros(dense)

    def step() -> None:
        for sent in [chosen, rows, rows, rows, rows] * LAYERS:
            dist.all_to_all_single(torch.empty_like(sent), sent)
        dist.all_reduce(gradients)

    return step, 0


def worker(side: str, port: str) -> None:
    """Run one rank of a side; its first rank prints what it took."""
    torch.set_num_threads(1)
    if side == "one":
        if os.environ["RANK"] != "0":
            os._exit(0)
        os.environ["WORLD_SIZE"] = "1"
    step, held = parc_step(side) if SIDES[side][1] else plain_step() if side == "DDP" else messages_step()
    taken = steps(step, side, port, int(os.environ["STEPS"]))
    if os.environ["RANK"] == "0":
        (BUILDS / f"{side}.json").write_text(json.dumps({"seconds": taken, "bytes": held}))
    os._exit(0)  # as in benchmarks/peers.py


def make_builds() -> None:
    """Build the plan for every side that is parc's."""
    BUILDS.mkdir(parents=True, exist_ok=True)
    text = PLAN.read_text().replace("length=64", f"length={LENGTH}").replace("B=8, S=64", f"B={SAMPLES}, S={LENGTH}")
    for side, (model, mesh) in SIDES.items():
        if not mesh:
            continue
        path = ROOT / "build" / "bench" / "experts.parc"
        path.write_text(text.replace("./moe.py:mixtral", str(ROOT / _FOLDERS[model] / model)))
        words = [f"{name}={value}" for name, value in {**mesh, "width": WIDTH, "layers": LAYERS}.items()]
        command = [sys.executable, "-m", "parc", "build", str(path), "-o", str(BUILDS / side)]
        defines = [item for word in words for item in ("-D", word)]
        subprocess.run([*command, *defines], cwd=ROOT, check=True, capture_output=True)


def main(times: int) -> None:
    """Build, run all sides in turn, and print the table."""
    make_builds()
    environment = {**LAUNCHED, "STEPS": str(times)}
    in_turn({side: (["-m", "benchmarks.experts"], environment) for side in SIDES}, 2, times)
    row_of = {side: json.loads((BUILDS / f"{side}.json").read_text()) for side in SIDES}
    first = row_of["dp=2"]["seconds"]
    print(f"{'side':<12}{'least':>9}{'median':>9}{'of dp=2':>16}{'state a rank':>15}")
    for side, row in row_of.items():
        least, middle = min(row["seconds"]), statistics.median(row["seconds"])
        ratios = f"{least / min(first):.2f} ({middle / statistics.median(first):.2f})"
        print(f"{side:<12}{least:>8.3f}s{middle:>8.3f}s{ratios:>16}{row['bytes'] / 2**20:>11.1f} MiB")
    for word, of in (("least", min), ("median", statistics.median)):
        split, one, messages = (of(row_of[side]["seconds"]) for side in ("ep=2", "one", "messages"))
        print(f"{word}: ep=2 takes {split / (one / 2 + messages):.2f} of one / 2 + messages")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        worker(*sys.argv[1:])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
