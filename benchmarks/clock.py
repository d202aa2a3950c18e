"""``make bench-clock``: plans of three models on one and two ranks of this machine, beside the times that the clock
predicts for it.

The machine is measured before each round (``parc cluster measure``), or ``--cluster FILE`` names its file. All plans
run in turn, so many rounds, and of a plan's steps the fastest counts, as of the measurements and of the predictions by
each of them: other work on the machine only makes steps slower. The load of the machine is printed beside.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.predict import error_after_scalar, spearman
from benchmarks.sides import BUILDS, built
from benchmarks.turns import ROOT

STEPS = 12
HEAD = """\
model {model}
input {tokens} int64 [B, S]
input targets int64 [B, S]
sizes B={batch}, S={length}
loss cross_entropy({output}, targets)
data synthetic
optimizer adamw lr 1e-3
seed 1
"""
MODELS = {
    "gpt": (
        '"{root}/examples/gpt.py:GPT" (layers=4, width=256, heads=4, vocab=2048, length=128)',
        16, 128, "tokens", "output",
    ),
    "llama": (
        '"{root}/examples/llama.py:llama" (layers=4, width=256, heads=8, kv_heads=4, ffn=704, vocab=2048, length=256)',
        8, 256, "input_ids", "output.logits",
    ),
    "moe": (
        '"{root}/examples/moe.py:mixtral" (layers=2, width=256, heads=4, kv_heads=2, ffn=256, experts=8, top=2,'
        " vocab=1024, length=128)", 16, 128, "input_ids", "output.logits",
    ),
}  # fmt: skip
"""The models: their lines, the samples of a step, the tokens of a sample, and the names of the input and the logits."""
GPT_TP = """\
column blocks.*.attn.qkv over tp rows (3 h/tp d)
row blocks.*.attn.out over tp
column blocks.*.mlp.up over tp
row blocks.*.mlp.down over tp
vocab embed, head over tp
"""


def plan_text(name: str, lines: str) -> str:
    """Return the text of a plan of one of the models; ``{tokens}`` in its lines is the model's input."""
    model, batch, length, tokens, output = MODELS[name]
    values = {"model": model.replace("{root}", str(ROOT)), "tokens": tokens, "output": output}
    return HEAD.format(batch=batch, length=length, **values) + lines.replace("{tokens}", tokens)


@dataclass(frozen=True)
class Config:
    """A plan of a model: a name, and the lines that place it."""

    model: str
    name: str
    lines: str

    @property
    def text(self) -> str:
        """The plan's text."""
        return plan_text(self.model, self.lines)


_TWO = "mesh dp=2\nshard {tokens}, targets [B/dp, _]\n"
_STAGES = "mesh pp=2\nstage balanced over pp\nschedule SCHEDULE microbatches 4\n"
_LLAMA_TP = 'mesh tp=2\ninclude "parc:llama" (tp=2)\n'
_EP = "mesh ep=2\nshard {tokens}, targets [B/ep, _]\nexperts model.layers.*.mlp.experts over ep dropless\n"
CONFIGS = (
    Config("gpt", "1 rank", "mesh dp=1\n"),
    Config("gpt", "1 rank, 4 microbatches", "mesh dp=1\nschedule microbatches 4\n"),
    Config("gpt", "1 rank, recompute", "mesh dp=1\nrecompute blocks.*\n"),
    Config("gpt", "dp 2", _TWO),
    Config("gpt", "dp 2, zero 1", _TWO + "zero 1 over dp\n"),
    Config("gpt", "dp 2, zero 3", _TWO + "zero 3 over dp\n"),
    Config("gpt", "tp 2", "mesh tp=2\n" + GPT_TP),
    Config("gpt", "pp 2, gpipe", _STAGES.replace("SCHEDULE", "gpipe")),
    Config("gpt", "pp 2, 1f1b", _STAGES.replace("SCHEDULE", "1f1b")),
    Config("llama", "1 rank", "mesh dp=1\n"),
    Config("llama", "1 rank, recompute", "mesh dp=1\nrecompute model.layers.*\n"),
    Config("llama", "dp 2", _TWO),
    Config("llama", "dp 2, zero 2", _TWO + "zero 2 over dp\n"),
    Config("llama", "tp 2", _LLAMA_TP),
    Config("llama", "tp 2, sequence", _LLAMA_TP + "sequence model.layers.* over tp\n"),
    Config("llama", "pp 2, 1f1b", _STAGES.replace("SCHEDULE", "1f1b")),
    Config("llama", "cp 2, ring", "mesh cp=2\ncontext model.layers.* dim S over cp using ring\n"),
    Config("moe", "1 rank", "mesh dp=1\n"),
    Config("moe", "1 rank, 2 microbatches", "mesh dp=1\nschedule microbatches 2\n"),
    Config("moe", "dp 2", _TWO),
    Config("moe", "dp 2, zero 1", _TWO + "zero 1 over dp\n"),
    Config("moe", "ep 2", _EP),
)
"""The plans."""


def parc(*words: object) -> str:
    """Run a command of parc's, and return what it prints.

    Raises:
        SystemExit: it fails; its messages are printed.
    """
    ended = subprocess.run(
        [sys.executable, "-m", "parc", *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        sys.exit(ended.stderr)
    return ended.stdout


def measured(build: Path) -> list[float]:
    """Return the seconds of a run's steps, without the first two."""
    metrics = build.with_suffix(".jsonl")
    metrics.unlink(missing_ok=True)
    parc("run", build, "--steps", STEPS, "--metrics", metrics, "--no-first-check")
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [row["step_s"] for row in rows[2:] if "step_s" in row]


def measured_cluster(number: int) -> Path:
    """Measure this machine, and return the file of this measurement."""
    BUILDS.mkdir(parents=True, exist_ok=True)
    cluster = BUILDS / f"here{number}.toml"
    parc("cluster", "measure", "-o", cluster)
    return cluster


def print_price() -> None:
    """Print what pricing Llama 3 405B on 16,384 ranks takes after it is compiled, in seconds of a processor."""
    from parc.compiler.clock.cluster import find_cluster
    from parc.compiler.plan.plan import read_plan
    from parc.compiling.driver import compile_plan
    from parc.step_time import price

    seconds = [time.process_time()]
    plan = read_plan(ROOT / "examples" / "llama3-405b.parc", {"dp": "128", "microbatches": "16"})
    build = compile_plan(plan, ROOT / "examples").build
    seconds.append(time.process_time())
    step = price(build, plan, find_cluster("h100-sxm"))
    seconds.append(time.process_time())
    compiling, pricing = (after - before for before, after in pairwise(seconds))
    print(f"{build.mesh.world:,} ranks: compiled in {compiling:.1f} s of a processor, priced in {pricing:.2f} s")
    print(f"{pricing / compiling:.1%} of that: a step takes {step.time.seconds:.1f} s on {step.cluster.name}")


def main() -> None:
    """Build, run and price every plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", type=Path, help="a file of this machine, instead of a measurement")
    parser.add_argument("--only", default="", help="configurations with this in their names")
    parser.add_argument("--rounds", type=int, default=2, help="the times that each plan runs")
    parser.add_argument("--price", action="store_true", help="say instead what pricing takes")
    args = parser.parse_args()
    if args.price:
        print_price()
        return
    chosen = [config for config in CONFIGS if args.only in f"{config.model} {config.name}"]
    if not chosen:
        parser.error(f"no configuration has {args.only!r} in its name, as {CONFIGS[0].model} {CONFIGS[0].name}")
    clusters: list[Path] = [args.cluster] if args.cluster else []
    builds = {config: built(BUILDS / f"clock{CONFIGS.index(config)}", config.text) for config in chosen}
    fastest = dict.fromkeys(chosen, math.inf)
    for number in range(args.rounds):
        print(f"round {number + 1}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
        if not args.cluster:
            clusters.append(measured_cluster(number))
        for config, build in builds.items():
            fastest[config] = min(fastest[config], *measured(build))
    rows: list[tuple[Config, float, float, dict[str, Any]]] = []
    for config, build in builds.items():
        forms = [json.loads(parc("show", build, "--time", "--cluster", cluster.resolve(), "--json"))
                 for cluster in clusters]  # fmt: skip
        form, seconds = min(forms, key=lambda form: form["step_s"]), fastest[config]
        rows.append((config, seconds, form["step_s"], form["parts"]))
        shares = " ".join(f"{part} {value / form['step_s']:.0%}" for part, value in form["parts"].items())
        print(f"{config.model:6} {config.name:24} {1e3 * seconds:8.1f} ms {1e3 * form['step_s']:8.1f} ms"
              f" {form['step_s'] / seconds - 1:+7.1%}  {shares}", flush=True)  # fmt: skip
    print_summary(rows)


def print_summary(rows: Sequence[tuple[Config, float, float, dict[str, Any]]]) -> None:
    """Print errors and ranks."""
    errors = [abs(predicted / seconds - 1) for _, seconds, predicted, _ in rows]
    _, scalar, after = error_after_scalar([(seconds, predicted) for _, seconds, predicted, _ in rows])
    print(
        f"{len(rows)} plans: mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%};"
        f" after {scalar:.3f}: {after:.1%}"
    )
    for model in dict.fromkeys(config.model for config, *_ in rows):
        pairs = [(seconds, predicted) for config, seconds, predicted, _ in rows if config.model == model]
        if len(pairs) > 2:
            print(f"{model}: Spearman {spearman(pairs):.2f} of {len(pairs)} plans")


if __name__ == "__main__":
    main()
