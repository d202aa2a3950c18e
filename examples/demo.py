"""``make demo``: build a plan, train it on 4 processes, train the plain module beside it, and compare every loss.

An argument is the time in seconds at which the demo began, with all that was installed for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import parc

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "build"
STEPS = 60
LIMIT = 1e-4


def run(*words: str) -> None:
    """Run one ``parc`` command, shown as a person would type it."""
    console.print(f"[bold]$ parc {' '.join(words)}[/bold]")
    done = subprocess.run([sys.executable, "-m", "parc", *words], cwd=HERE.parent, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def losses_of(metrics: Path) -> list[float]:
    """Return the losses that a run wrote."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows if "step" in row]


def plain_losses(build: Path) -> list[float]:
    """Return the losses of the user's own module on one device, with the same weights, dropout and data."""
    torch.set_num_threads(2)
    console.print("[bold]the plain module, on one device, beside it[/bold]")
    plain = parc.reference(build)
    losses = []
    with console.status("the plain module on one device") as status:
        for step in range(STEPS):
            losses.append(plain.step().loss)
            status.update(f"the plain module on one device: step {step + 1} of {STEPS}, loss {losses[-1]:.4f}")
    plain.close()
    return losses


def differences(ours: list[float], theirs: list[float]) -> list[float]:
    """Return the relative difference of every step's loss."""
    return [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]


def show(ours: list[float], theirs: list[float], apart: list[float]) -> None:
    """Print both losses, step by step."""
    table = Table("step", "parc, 4 processes", "plain module", "relative difference", title="Loss (nats a byte)")
    for step, (a, b, d) in enumerate(zip(ours, theirs, apart, strict=True), 1):
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{d:.1e}")
    console.print(table)


def draw(ours: list[float], theirs: list[float], apart: list[float], path: Path) -> None:
    """Draw both curves, and below them their difference."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1), layout="constrained")
    steps = range(1, len(ours) + 1)
    top.plot(steps, theirs, color="0.6", linewidth=5, label="plain module, one device")
    top.plot(steps, ours, color="tab:blue", linewidth=1.5, label="parc, dp=2 × tp=2, four processes")
    top.set_ylabel("loss (nats a byte)")
    top.set_title("A GPT on Python's own sources: one plan file, the same numbers")
    top.legend()
    bottom.semilogy(steps, [max(d, 1e-9) for d in apart], color="tab:red", linewidth=1)
    bottom.axhline(LIMIT, color="0.6", linestyle=":", linewidth=1)
    bottom.annotate("limit", (1, LIMIT), textcoords="offset points", xytext=(0, -10), color="0.4", fontsize=8)
    bottom.set_ylabel("relative\ndifference")
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    console = Console(width=None if sys.stdout.isatty() else 100)
    start = float(sys.argv[1]) if len(sys.argv) > 1 else time.time()
    build, metrics = OUT / "demo", OUT / "demo.jsonl"
    OUT.mkdir(exist_ok=True)
    metrics.unlink(missing_ok=True)
    run("build", "examples/gpt.parc", "-o", str(build.relative_to(HERE.parent)))
    run(
        "run",
        str(build.relative_to(HERE.parent)),
        "--steps",
        str(STEPS),
        "--metrics",
        str(metrics.relative_to(HERE.parent)),
    )
    ours, theirs = losses_of(metrics), plain_losses(build)
    apart = differences(ours, theirs)
    show(ours, theirs, apart)
    picture = OUT / "demo.png"
    draw(ours, theirs, apart, picture)
    largest = max(apart)
    console.print(f"largest relative difference: {largest:.1e} (limit {LIMIT:.0e})")
    console.print(f"both curves: {picture.relative_to(HERE.parent)}; {time.time() - start:.0f} s in all")
    sys.exit(0 if largest <= LIMIT else 1)
