"""``make bench-gpu``: what rewriting costs on a GPU: a Llama of 1.1 B parameters in bfloat16, parc's program beside the
plain module, each in eager mode and compiled.

All sides clip the norm of the gradients and update with torch's fused AdamW. There are two kinds of bfloat16:

- ``bf16 weights``: the model's own weights are bfloat16, and so is their update. Both sides round alike, so a ratio is
  the cost of rewriting alone.
- ``float32 weights``: the plan has ``precision bf16``. Its peer is ``torch.autocast``, as a person would write it.

Each side is a process of its own; while one runs a step the others wait. Prints a table and writes
``benchmarks/gpu.md``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.turns import ROOT, in_turn, steps

PLAN = ROOT / "benchmarks" / "llama1b.parc"
OUT = Path(__file__).with_suffix(".md")
GPU = torch.device("cuda", 0)
BATCH, LENGTH, VOCAB = 4, 2048, 32768
SIZES = {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": VOCAB, "length": LENGTH}
KINDS = {"bf16 weights": ["-D", "model=narrow"], "float32 weights": ["-D", "precision=bf16"]}
"""The kinds of bfloat16, with the words of their builds."""
SIDES = ("plain eager", "parc eager", "torch.compile", "parc --compile")
FOUND = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
Step = Callable[[], float]


def narrow(**sizes: int) -> nn.Module:
    """Make a Llama whose weights are bfloat16."""
    return plain_model(**sizes).to(torch.bfloat16)


def plain_model(**sizes: int) -> nn.Module:
    """Make a Llama as its user wrote it."""
    sys.path.insert(0, str(ROOT / "examples"))
    from llama import llama

    return llama(**sizes)


def batch() -> dict[str, torch.Tensor]:
    """Return the batch of every step, on the GPU."""
    words = torch.randint(0, VOCAB, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(0)).to(GPU)
    return {"input_ids": words[0], "targets": words[1]}


def parc_step(build: Path, compiled: bool) -> Step:
    """Return a step of a build on the GPU."""
    import parc

    session, data = parc.load(build, GPU, compile=compiled), batch()
    return lambda: session.step(data).loss


def plain_step(kind: str, compiled: bool) -> Step:
    """Return a step of the plain module, whose weights are float32 under autocast, or bfloat16."""
    torch.manual_seed(0)
    with GPU:
        model = narrow(**SIZES) if kind == "bf16 weights" else plain_model(**SIZES)
    run: Any = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    data = batch()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=kind == "float32 weights"):
            loss = F.cross_entropy(run(data["input_ids"]).logits.flatten(0, 1), data["targets"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def worker(kind: str, times: int, folder: Path, side: str, port: str) -> None:
    """Run one side, and write the seconds of its steps, its losses, and the most memory of a step after the first."""
    compiled = side in ("torch.compile", "parc --compile")
    step = parc_step(folder / kind, compiled) if side.startswith("parc") else plain_step(kind, compiled)
    losses = [step()]  # all sides compile at once, which takes memory of its own
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds = steps(lambda: losses.append(step()), side, port, times)
    figures = {"seconds": seconds, "losses": losses, "bytes": torch.cuda.max_memory_allocated()}
    (folder / f"{kind}, {side}.json").write_text(json.dumps(figures), encoding="utf-8")


def measure(kind: str, sides: Sequence[str], folder: Path, times: int) -> dict[str, Any]:
    """Measure some sides in turn."""
    script = ["-m", "benchmarks.gpu", "--worker", kind, str(times), str(folder)]
    in_turn(dict.fromkeys(sides, (script, FOUND)), 1, times)
    return {side: json.loads((folder / f"{kind}, {side}.json").read_text(encoding="utf-8")) for side in sides}


def rows(kind: str, figures_of: dict[str, Any]) -> list[str]:
    """Return the rows of a kind's table."""
    lines = []
    for side, peer in zip(SIDES, (SIDES[0], SIDES[0], SIDES[2], SIDES[2]), strict=True):
        mine, other = figures_of[side], figures_of[peer]
        least, median, peer_median = min(mine["seconds"]), *map(statistics.median, (mine["seconds"], other["seconds"]))
        ratios = ("", "")
        if side != peer:
            ratios = f"{median / peer_median:.3f}", f"{mine['bytes'] / other['bytes']:.3f}"
        times, memory = f"{least * 1e3:.1f} | {median * 1e3:.1f}", f"{mine['bytes'] / 2**30:.2f}"
        cells = (kind, side, times, ratios[0], memory, ratios[1], f"{mine['losses'][-1]:.4f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(times: int = 10) -> None:
    """Build both plans, measure all sides, print the table and write it."""
    if not torch.cuda.is_available():
        sys.exit("make bench-gpu needs a GPU that torch can use")
    folder = ROOT / "build" / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    table = [
        f"# A Llama of 1.1 B parameters in bfloat16 on one {torch.cuda.get_device_name(GPU)}",
        "",
        f"Written by `make bench-gpu` with torch {torch.__version__}: a step of {BATCH} sequences of {LENGTH} tokens,",
        "with clipping and fused AdamW. Times are milliseconds of a step. Ratios are parc's median time and",
        "memory by those of the peer in the row above.",
        "",
        "| weights | side | least | median | ratio | GiB at most | ratio | last loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, words in KINDS.items():
        build = [sys.executable, "-m", "parc", "build", str(PLAN), "-o", str(folder / kind), *words]
        subprocess.run(build, check=True, cwd=ROOT, env={**os.environ, **FOUND})
        figures_of = {}
        for sides in (SIDES[:2], SIDES[2:]):
            figures_of.update(measure(kind, sides, folder, times))
        table += rows(kind, figures_of)
        print("\n".join(table), flush=True)
    OUT.write_text("\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5], sys.argv[6])
    else:
        main(*map(int, sys.argv[1:]))
