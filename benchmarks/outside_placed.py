"""``make outside-placed``: placements by the integer program over the models of ``make outside``, beside `parc init`'s.

Each model is placed over tp=2 and tp=4, with dp=2, from what makes it alone; what is found is built with every check.
Beside each other are the bytes that a rank sends over tp in a step, the predicted time of a step on H100s and the
seconds of the solver. None may be dearer, unless it divides attention, experts or tables that `parc init` leaves
whole; `work` is the part of the products that a rank computes. Words that are given choose the models whose names hold
one of them.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks import outside
from benchmarks.command import command
from benchmarks.outside_init import model_of
from benchmarks.outside_table import cases
from benchmarks.turns import ROOT
from parc.compiler.clock.cluster import find_cluster
from parc.compiling.compiled import Compiled
from parc.grammar.syntax import size_text
from parc.proposing.cheapest import cheapest_placements
from parc.proposing.proposal import Wish, propose
from parc.step_time import price, seconds_text

OUT = Path(__file__).with_suffix(".md")
RANKS = 2, 4
DEARER, DIVIDES_MORE = "DEARER", "divides what `parc init` leaves whole"
ABOUT = """# Placements over tp that `parc plan --placements` finds

Written by `make outside-placed`: for models of `make outside`, over dp=2 and tp=2 or tp=4, the lines of the integer
program beside those of `parc init`, from the model alone. *Verified* is every check of the build that is found.

"""


def build(name: str) -> tuple[Compiled, str]:
    """Compile a model with the cheapest placements, and tell how they compare with those of `parc init`."""
    model, _, ranks = name.rpartition(" tp=")
    initial = propose(Wish(model_of(cases()[model]), {"dp": 2, "tp": int(ranks)}), ROOT, "outside.parc").compiled
    cluster, start = find_cluster("h100-sxm"), time.perf_counter()
    result = cheapest_placements(initial.plan, initial.folder, initial, "tp", cluster)
    seconds = time.perf_counter() - start
    before, after = (price(each.build, each.plan, cluster).time.seconds for each in (result.initial, result.compiled))
    dearer = bool(result.after.excess(result.before)) or after > 1.0001 * before
    sent = " to ".join(size_text(one.wire_bytes) for one in (result.before, result.after))
    work = " to ".join(f"{one.work:.0%}" for one in (result.before, result.after))
    words = [f"sent {sent}", f"work {work}",
             f"step {seconds_text(before)} to {seconds_text(after)} ({after / before - 1:+.1%})",
             f"solver {result.seconds_of_solver:.1f} of {seconds:.0f} s"]  # fmt: skip
    if dearer:
        words.append(DIVIDES_MORE if result.before.lacking and result.after.work < result.before.work else DEARER)
    return result.compiled, "; ".join(words)


def main(*wanted: str) -> int:
    """Place and build the models, or those whose names contain one of the wanted words."""
    models = [name for name in cases() if "=2" not in name and (not wanted or any(word in name for word in wanted))]
    names = [f"{model} tp={ranks}" for model in models for ranks in RANKS]
    outcomes = outside.outcomes_of(names, "benchmarks.outside_placed")
    dearer = sum(why.endswith(DEARER) for _, why in outcomes.values())
    total = f"{outside.summary(outcomes)}; {dearer} dearer than `parc init`"
    print(total)
    if not wanted:
        rows = [outside.row_of(name, *outcome) for name, outcome in sorted(outcomes.items())]
        head = [f"{total}.", "", "| model | outcome | sent over tp, step, solver |", "| --- | --- | --- |"]
        OUT.write_text(ABOUT + "\n".join([*head, *rows]) + "\n")
    return int(dearer > 0 or any(outcome == "crashed" for outcome, _ in outcomes.values()))


if __name__ == "__main__":
    outside.child(build) if sys.argv[1:] == ["--child"] else command(main)
