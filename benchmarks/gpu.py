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

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import parc
from benchmarks.command import Table, command
from benchmarks.sides import BUILDS, Batch, adamw, batch, built, train_step
from benchmarks.turns import ROOT, Side, Timed, in_turn, least_and_median

PLAN = ROOT / "benchmarks" / "llama1b.parc"
OUT = Path(__file__).with_suffix(".md")
GPU = torch.device("cuda", 0)
SAMPLES, LENGTH, VOCAB = 4, 2048, 32768
SIZES = {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": VOCAB, "length": LENGTH}
KINDS = {"bf16 weights": {"model": "narrow"}, "float32 weights": {"precision": "bf16"}}
"""The kinds of bfloat16, with the values that the plan gets."""
SIDES = ("plain eager", "parc eager", "torch.compile", "parc --compile")
IMPORTS = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
Step = Callable[[], float]


def narrow(**sizes: int) -> nn.Module:
    """Make a Llama whose weights are bfloat16."""
    return plain_model(**sizes).to(torch.bfloat16)


def plain_model(**sizes: int) -> nn.Module:
    """Make a Llama as its user wrote it."""
    from examples.llama import llama

    model: nn.Module = llama(**sizes)
    return model


def batch_on_gpu() -> Batch:
    """Return the batch of every step."""
    return {name: tensor.to(GPU) for name, tensor in batch(SAMPLES, LENGTH, VOCAB).items()}


def parc_step(build: Path, compiled: bool) -> Step:
    """Return a step of a build on the GPU."""
    session, data = parc.load(build, GPU, compile=compiled), batch_on_gpu()
    return lambda: session.step(data).loss


def plain_step(kind: str, compiled: bool) -> Step:
    """Return a step of the plain module, whose weights are float32 under autocast, or bfloat16."""
    torch.manual_seed(0)
    with GPU:
        model = narrow(**SIZES) if kind == "bf16 weights" else plain_model(**SIZES)
    called: Any = torch.compile(model) if compiled else model
    return train_step(called, batch_on_gpu(), adamw(model), clip=1.0, autocast=kind == "float32 weights")


def side(timed: Timed, kind: str, name: str, build: Path) -> dict[str, Any]:
    """Return the seconds of a side's steps, its losses, and the most memory of a step after the first."""
    compiled = name in ("torch.compile", "parc --compile")
    step = parc_step(build, compiled) if name.startswith("parc") else plain_step(kind, compiled)
    losses = [step()]  # all sides compile at once, which takes memory of its own
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds = timed(lambda: losses.append(step()))
    return {"seconds": seconds, "losses": losses, "bytes": torch.cuda.max_memory_allocated()}


def rows(kind: str, figures_of: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a kind's table."""
    for name, peer in zip(SIDES, (SIDES[0], SIDES[0], SIDES[2], SIDES[2]), strict=True):
        mine, other = figures_of[name], figures_of[peer]
        (least, median), (_, peer_median) = (least_and_median(figures["seconds"]) for figures in (mine, other))
        ratios = ("", "")
        if name != peer:
            ratios = f"{median / peer_median:.3f}", f"{mine['bytes'] / other['bytes']:.3f}"
        times, memory = (f"{least * 1e3:.1f}", f"{median * 1e3:.1f}"), f"{mine['bytes'] / 2**30:.2f}"
        yield kind, name, *times, ratios[0], memory, ratios[1], f"{mine['losses'][-1]:.4f}"


def main(times: int = 10) -> None:
    """Build both plans, measure all sides, print the table and write it."""
    if not torch.cuda.is_available():
        sys.exit("make bench-gpu needs a GPU that torch can use")
    about = f"""# A Llama of 1.1 B parameters in bfloat16 on one {torch.cuda.get_device_name(GPU)}

Written by `make bench-gpu` with torch {torch.__version__}: a step of {SAMPLES} sequences of {LENGTH} tokens,
with clipping and fused AdamW. Times are milliseconds of a step. Ratios are parc's median time and
memory by those of the peer in the row above.

"""
    table = Table("weights", "side", "least", "median", "ratio", "GiB at most", "ratio", "last loss", names=15)
    for kind, values in KINDS.items():
        build = built(BUILDS / "gpu" / kind, PLAN, **values)
        figures_of: dict[str, Any] = {}
        for pair in (SIDES[:2], SIDES[2:]):
            sides = {name: Side(side, (kind, name, build), environment=IMPORTS) for name in pair}
            figures_of |= {name: first for name, (first,) in in_turn(sides, times).items()}
        for row in rows(kind, figures_of):
            table.row(*row)
    OUT.write_text(about + "\n".join(table.lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command(main)
