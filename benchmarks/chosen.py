"""The plan that the search chooses, beside others that run here: the best and as many random plans of three open plans.

Each model's open plan is searched on two ranks of this machine, which is measured first (``--cluster FILE`` names its
file). The ``best`` plans and as many of the others, drawn at random, run in turn, two rounds. Of each model: the median
step of the chosen plan beside that of the fastest, beside the spread of two runs of one plan (the median over plans),
and Spearman's rank correlation of predicted and measured steps. Words choose the models.
"""

from __future__ import annotations

import os
import random
import statistics
from pathlib import Path

from benchmarks.clock import GPT_TP, measured, measured_cluster, plan_text
from benchmarks.command import Table, command
from benchmarks.predict import spearman
from benchmarks.sides import BUILDS, built
from benchmarks.turns import ROOT
from parc.compiler.clock.cluster import Cluster, find_cluster
from parc.compiler.plan.open_plan import read_open
from parc.grammar.source import Source
from parc.searching.pricing import ExactPrices, PricedPlan
from parc.searching.search import choice_text, closed_text, search
from parc.step_time import seconds_text

RANKS, ROUNDS = 2, 2
_DENSE = """\
let dp=?, tp=1 | 2, pp=1 | 2, zero=0 | 1 | 2 | 3, again=none | {blocks}
let schedule=gpipe | 1f1b | zb-h1, microbatches=2 | 4 | 8
mesh dp=$dp, pp=$pp, tp=$tp
shard {tokens}, targets [B/dp, _]
zero $zero over dp
stage balanced over pp
schedule $schedule microbatches $microbatches
recompute $again
"""
_EXPERTS = """\
let dp=?, ep=1 | 2, zero=0 | 1 | 2 | 3, again=none | model.layers.*, microbatches=1 | 2 | 4
mesh dp=$dp, ep=$ep
shard {tokens}, targets [B/dp/ep, _]
zero $zero over dp
experts model.layers.*.mlp.experts over ep dropless
schedule microbatches $microbatches
recompute $again
"""
OPEN = {
    "gpt": _DENSE.replace("{blocks}", "blocks.*") + GPT_TP,
    "llama": _DENSE.replace("{blocks}", "model.layers.*") + 'include "parc:llama" (tp=$tp)\n',
    "moe": _EXPERTS,
}
"""The lines of the open plans, by the model of ``make bench-clock``."""


def main(*words: str, cluster: str = "", best: int = 8, seed: int = 1) -> int:
    """Print the tables; fail if a chosen plan is more than 5 % behind the fastest, and more than the spread."""
    links = find_cluster(str(Path(cluster).resolve() if cluster else measured_cluster()), Path())
    models = [name for name in OPEN if not words or name in words]
    chosen = {name: _built(name, links, best, seed) for name in models}
    print(f"runs begin, load {os.getloadavg()[0]:.1f}", flush=True)
    return int(sum(_compare(name, plans) for name, plans in chosen.items()) > 0)


def _built(name: str, links: Cluster, best: int, seed: int) -> list[tuple[PricedPlan, Path]]:
    """Search a model's plans, and build the best and as many others."""
    source = Source(f"{name}.parc", plan_text(name, OPEN[name]), path=ROOT / "examples" / f"{name}.parc")
    opened = read_open(source, {})
    result = search(opened, ExactPrices(ROOT / "examples", links), RANKS, opened.combinations)
    print(f"{name}: {len(result.best)} plans of {opened.combinations} choices", flush=True)
    plans = result.best[:best]
    plans += random.Random(seed).sample(result.best[best:], min(best, len(result.best) - best))
    return [(one, built(BUILDS / f"chosen-{name}{at}", closed_text(opened, one, []))) for at, one in enumerate(plans)]


def _compare(name: str, plans: list[tuple[PricedPlan, Path]]) -> bool:
    """Run plans in turn and print them; True if the first is behind."""
    runs: list[list[float]] = [[] for _ in plans]
    for _ in range(ROUNDS):
        for (_, build), medians in zip(plans, runs, strict=True):
            medians.append(statistics.median(measured(build)))
    print(f"\n## {name}\n")
    table = Table("plan", "predicted", "least", "most", names=70)
    for (one, _), medians in zip(plans, runs, strict=True):
        table.row(choice_text(one.choice), *map(seconds_text, (one.figures.seconds, min(medians), max(medians))))
    spread = statistics.median(max(medians) / min(medians) - 1 for medians in runs)
    least = [min(medians) for medians in runs]
    behind = least[0] / min(least) - 1
    rho = spearman([(seconds, one.figures.seconds) for (one, _), seconds in zip(plans, least, strict=True)])
    print(f"\nthe chosen plan is {behind:.1%} behind the fastest; two runs of one plan are {spread:.1%} apart (median)"
          f"; Spearman {rho:.2f} of {len(plans)} plans", flush=True)  # fmt: skip
    return behind > max(0.05, spread)


if __name__ == "__main__":
    command(main)
