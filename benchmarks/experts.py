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

from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import parc
from benchmarks.command import Table, command
from benchmarks.sides import BUILDS, adamw, batch, built, share_of, text_of, train_step
from benchmarks.turns import ROOT, Side, Timed, beside, in_turn

SAMPLES, LENGTH, LAYERS, WIDTH, EXPERTS, TOP = 8, 128, 4, 256, 8, 2
PLAN = ROOT / "examples" / "moe.parc"
EVEN, ROUTED = ROOT / "benchmarks" / "even_experts.py:even", ROOT / "examples" / "moe.py:mixtral"
BATCH = batch(SAMPLES, LENGTH, 256)
Figures = tuple[list[float], int]
"""The seconds of steps, and the bytes of parameters and optimizer on this rank."""


def parc_side(timed: Timed, build: Path) -> Figures:
    """Return the figures of a build."""
    session = parc.load(build)
    session.step(BATCH)
    size = sum(value.nbytes for value in session.state.parameters.values())
    return timed(lambda: session.step(BATCH)), 3 * size  # AdamW keeps two of each


def plain_model() -> Any:
    """Make the model as its user wrote it."""
    from examples.moe import mixtral

    torch.manual_seed(0)
    return mixtral(layers=LAYERS, width=WIDTH, ffn=WIDTH, length=LENGTH)


def ddp_side(timed: Timed) -> Figures:
    """Return the figures of the plain module under DistributedDataParallel."""
    model = DistributedDataParallel(plain_model())
    step = train_step(model, share_of(BATCH), adamw(model, lr=1e-3), clip=1.0)
    return timed(step), 3 * sum(value.nbytes for value in model.parameters())


def messages_side(timed: Timed) -> Figures:
    """Return the seconds of the messages of a step of ``ep=2``: two all-to-alls of rows forward and two backward in
    each layer, those of what is chosen, and the sum of all gradients but those of experts."""
    dense = sum(value.numel() for name, value in plain_model().named_parameters() if ".experts." not in name)
    tokens = SAMPLES * LENGTH // 2
    rows, chosen = torch.zeros(tokens * TOP, WIDTH), torch.zeros(EXPERTS, tokens, dtype=torch.bool)
    gradients = torch.zeros(dense)

    def step() -> None:
        for sent in [chosen, rows, rows, rows, rows] * LAYERS:
            dist.all_to_all_single(torch.empty_like(sent), sent)
        dist.all_reduce(gradients)

    return timed(step), 0


def side_of(name: str, model: Path, dp: int, ep: int) -> Side:
    """Build the plan with a model, and return the side of parc."""
    text = text_of(PLAN).replace("length=64", f"length={LENGTH}").replace("B=8, S=64", f"B={SAMPLES}, S={LENGTH}")
    text = text.replace(str(ROUTED), str(model))
    build = built(BUILDS / "experts" / name, text, dp=dp, ep=ep, width=WIDTH, layers=LAYERS)
    return Side(parc_side, (build,), dp * ep)


def main(times: int = 20) -> None:
    """Build, run all sides in turn, and print the table."""
    sides = {
        "dp=2": side_of("dp=2", EVEN, 2, 1),
        "ep=2": side_of("ep=2", EVEN, 1, 2),
        "one": side_of("one", EVEN, 1, 1),
        "dp=2 routed": side_of("dp=2 routed", ROUTED, 2, 1),
        "ep=2 routed": side_of("ep=2 routed", ROUTED, 1, 2),
        "DDP": Side(ddp_side, ranks=2),
        "messages": Side(messages_side, ranks=2),
    }
    figures_of: dict[str, Figures] = {side: ranks[0] for side, ranks in in_turn(sides, times).items()}
    table = Table("side", "least, s", "median, s", "of dp=2", "state a rank, MiB")
    for side, (seconds, size) in figures_of.items():
        table.row(side, *beside(seconds, figures_of["dp=2"][0]), f"{size / 2**20:.1f}")
    for word, of in (("least", min), ("median", median)):
        split, one, messages = (of(figures_of[side][0]) for side in ("ep=2", "one", "messages"))
        print(f"{word}: ep=2 takes {split / (one / 2 + messages):.2f} of one / 2 + messages")


if __name__ == "__main__":
    command(main)
