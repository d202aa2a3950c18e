"""``make bench-clock``: plans of three models on one and two ranks of this machine, beside the times that the clock
predicts for it.

The machine is measured first (``parc cluster measure``), or ``--cluster FILE`` names its file. Of a run's steps the
fastest counts, as of the measurements: other work on the machine only makes steps slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.predict import error_after_scalar, spearman
from benchmarks.sides import BUILDS, built
from benchmarks.turns import ROOT

STEPS = 12
_HEAD = """\
input {tokens} int64 [B, S]
input targets int64 [B, S]
sizes B={batch}, S={length}
loss cross_entropy({output}, targets)
data synthetic
optimizer adamw lr 1e-3
seed 1
"""
_GPT = ('model "{root}/examples/gpt.py:GPT" (layers=4, width=256, heads=4, vocab=2048, length=128)\n'
        + _HEAD.replace("{tokens}", "tokens").replace("{output}", "output"))  # fmt: skip
_LLAMA = ('model "{root}/examples/llama.py:llama" (layers=4, width=256, heads=8, kv_heads=4, ffn=704, vocab=2048, length=256)\n'
          + _HEAD.replace("{tokens}", "input_ids").replace("{output}", "output.logits"))  # fmt: skip
_MOE = ('model "{root}/examples/moe.py:mixtral" (layers=2, width=256, heads=4, kv_heads=2, ffn=256, experts=8, top=2, vocab=1024,'
        " length=128)\n" + _HEAD.replace("{tokens}", "input_ids").replace("{output}", "output.logits"))  # fmt: skip
_GPT_TP = """\
column blocks.*.attn.qkv over tp rows (3 h/tp d)
row blocks.*.attn.out over tp
column blocks.*.mlp.up over tp
row blocks.*.mlp.down over tp
vocab embed, head over tp
"""


@dataclass(frozen=True)
class Config:
    """A plan of a model: a name, and the lines that place it."""

    model: str
    name: str
    lines: str

    @property
    def text(self) -> str:
        """The plan's text."""
        head, batch, length, tokens = {
            "gpt": (_GPT, 16, 128, "tokens"), "llama": (_LLAMA, 8, 256, "input_ids"), "moe": (_MOE, 16, 128, "input_ids"),
        }[self.model]  # fmt: skip
        text = head.replace("{root}", str(ROOT)).replace("{batch}", str(batch)).replace("{length}", str(length))
        return text + self.lines.replace("{tokens}", tokens)


def configs() -> Iterator[Config]:
    """Yield the plans."""
    one, two = "mesh dp=1\n", "mesh dp=2\nshard {tokens}, targets [B/dp, _]\n"
    stages = "mesh pp=2\nstage balanced over pp\nschedule {} microbatches 4\n"
    yield from (Config("gpt", name, lines) for name, lines in (
        ("1 rank", one), ("1 rank, 4 microbatches", one + "schedule microbatches 4\n"), ("1 rank, recompute", one + "recompute blocks.*\n"),
        ("dp 2", two), ("dp 2, zero 1", two + "zero 1 over dp\n"), ("dp 2, zero 3", two + "zero 3 over dp\n"),
        ("tp 2", "mesh tp=2\n" + _GPT_TP), ("pp 2, gpipe", stages.format("gpipe")), ("pp 2, 1f1b", stages.format("1f1b")),
    ))  # fmt: skip
    tp = 'mesh tp=2\ninclude "parc:llama" (tp=2)\n'
    yield from (Config("llama", name, lines) for name, lines in (
        ("1 rank", one), ("1 rank, recompute", one + "recompute model.layers.*\n"), ("dp 2", two), ("dp 2, zero 2", two + "zero 2 over dp\n"),
        ("tp 2", tp), ("tp 2, sequence", tp + "sequence model.layers.* over tp\n"), ("pp 2, 1f1b", stages.format("1f1b")),
        ("cp 2, ring", "mesh cp=2\ncontext model.layers.* dim S over cp using ring\n"),
    ))  # fmt: skip
    experts = "experts model.layers.*.mlp.experts over {} dropless\n"
    yield from (Config("moe", name, lines) for name, lines in (
        ("1 rank", one), ("1 rank, 2 microbatches", one + "schedule microbatches 2\n"), ("dp 2", two), ("dp 2, zero 1", two + "zero 1 over dp\n"),
        ("experts over dp 2", two + experts.format("dp")),
    ))  # fmt: skip


def parc(*words: object) -> str:
    """Run a command of parc's, and return what it prints.

    Raises:
        SystemExit: it fails; its messages are printed.
    """
    ended = subprocess.run([sys.executable, "-m", "parc", *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(ended.stderr)
    return ended.stdout


def measured(build: Path) -> float:
    """Return the fastest step of a run, without the first ones."""
    metrics = build.with_suffix(".jsonl")
    metrics.unlink(missing_ok=True)
    parc("run", build, "--steps", STEPS, "--metrics", metrics)
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return min(row["step_s"] for row in rows[2:] if "step_s" in row)


def main() -> None:
    """Build, run and price every plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", type=Path, help="a file of this machine, instead of a measurement")
    parser.add_argument("--only", default="", help="configurations with this in their names")
    args = parser.parse_args()
    cluster = args.cluster or BUILDS / "here.toml"
    if args.cluster is None:
        BUILDS.mkdir(parents=True, exist_ok=True)
        parc("cluster", "measure", "-o", cluster)
    rows: list[tuple[Config, float, float, dict[str, Any]]] = []
    for at, config in enumerate(configs()):
        if args.only not in f"{config.model} {config.name}":
            continue
        build = built(BUILDS / f"clock{at}", config.text)
        form = json.loads(parc("show", build, "--time", "--cluster", cluster.resolve(), "--json"))
        seconds = measured(build)
        rows.append((config, seconds, form["step_s"], form["parts"]))
        shares = " ".join(f"{part} {value / form['step_s']:.0%}" for part, value in form["parts"].items())
        print(f"{config.model:6} {config.name:24} {1e3 * seconds:8.1f} ms {1e3 * form['step_s']:8.1f} ms"
              f" {form['step_s'] / seconds - 1:+7.1%}  {shares}", flush=True)  # fmt: skip
    print_summary(rows)


def print_summary(rows: Sequence[tuple[Config, float, float, dict[str, Any]]]) -> None:
    """Print errors and ranks."""
    errors = [abs(predicted / seconds - 1) for _, seconds, predicted, _ in rows]
    _, scalar, after = error_after_scalar([(seconds, predicted) for _, seconds, predicted, _ in rows])
    print(f"{len(rows)} plans: mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}; after {scalar:.3f}: {after:.1%}")
    for model in dict.fromkeys(config.model for config, *_ in rows):
        pairs = [(seconds, predicted) for config, seconds, predicted, _ in rows if config.model == model]
        if len(pairs) > 2:
            print(f"{model}: Spearman {spearman(pairs):.2f} of {len(pairs)} plans")


if __name__ == "__main__":
    main()
