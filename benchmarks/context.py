"""``make bench-context``: sequences that two gloo ranks share, in turn in one run; and how long they may be.

The model is a Llama with 4 layers of width 64 and 4 heads, and one sample of ``LENGTH`` tokens. The sides: parc on two
ranks with each way of ``using``, and on one rank; every rank has one thread. The limit is half of one rank.

Then, for 1, 2 and 4 ranks, the longest sequence of which a build says that a rank's peak stays below a limit of memory;
then a step runs, and the peak of its tensors is measured. ``python -m benchmarks.context STEPS`` takes
another number of steps.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import parc
from benchmarks.command import Table, command
from benchmarks.sides import BUILDS, batch, built, report_in, text_of
from benchmarks.storages import Storages
from benchmarks.turns import ROOT, Side, Timed, beside, in_turn, run

SIDES = {"one": (1, "zigzag"), **{using: (2, using) for using in ("gather", "ring", "zigzag", "ulysses")}}
"""The ranks of each side, and what its attention uses."""
LENGTH, LIMIT = 8192, 256 * 2**20
PLAN = ROOT / "examples" / "llama-long.parc"


def build(folder: Path, ranks: int, using: str, length: int) -> Path:
    """Build the plan for one sample of a length."""
    text = text_of(PLAN).replace("B=2", "B=1").replace("heads=8, kv_heads=4", "heads=4, kv_heads=2")
    return built(folder, text, layers=4, width=64, length=length, cp=ranks, using=using)


def side(timed: Timed, folder: Path) -> list[float]:
    """Return the seconds of the steps of a build."""
    session, whole = parc.load(folder), batch(1, LENGTH, 512)
    return timed(lambda: session.step(whole))


def times_of_steps(times: int) -> None:
    """Build, run all sides in turn, and print the table."""
    folder = BUILDS / "context"
    sides = {
        name: Side(side, (build(folder / name, ranks, using, LENGTH),), ranks) for name, (ranks, using) in SIDES.items()
    }
    seconds_of = {name: ranks[0] for name, ranks in in_turn(sides, times).items()}
    print(f"{LENGTH} tokens, two ranks\n")
    table = Table("side", "least, s", "median, s", "of one rank (0.5 at best)")
    for name, seconds in seconds_of.items():
        table.row(name, *beside(seconds, seconds_of["one"]))


def peak_of(folder: Path, length: int) -> int:
    """Return the peak of a step of this rank in bytes."""
    whole = batch(1, length, 512)
    storages = Storages()
    with storages, parc.load(folder) as session:
        return storages.peak_of(lambda: session.step(whole))


def longest(ranks: int, folder: Path) -> tuple[int, int]:
    """Return the longest sequence of a multiple of 512 tokens below the limit, and the peak that its build says. A peak
    grows evenly with the sequence, so two builds tell where the limit lies."""

    def peak(parts: int) -> int:
        return int(report_in(build(folder, ranks, "zigzag", 512 * parts))["memory"][0]["peak_bytes"])

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
    print(f"\na limit of {LIMIT // 2**20} MiB of tensors a rank\n")
    table = Table("ranks", "tokens", "of one rank", "estimate, MiB", "measured, MiB")
    first = 0
    with tempfile.TemporaryDirectory() as place:
        for ranks in (1, 2, 4):
            folder = Path(place) / f"cp{ranks}"
            length, estimate = longest(ranks, folder)
            first = first or length
            peak = run(Side(peak_of, (folder, length), ranks))[0]
            sizes = (f"{size / 2**20:.1f}" for size in (estimate, peak))
            table.row(str(ranks), f"{length:,}", f"{length / first:.2f}", *sizes)


def main(times: int = 10) -> None:
    """Print both tables."""
    times_of_steps(times)
    lengths()


if __name__ == "__main__":
    command(main)
