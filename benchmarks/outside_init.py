"""``make outside-init``: `parc init` over the models of ``make outside``: what it proposes builds, and what it gathers.

Of each model it is told what makes it, and nothing of inputs, loss or placements. A proposal is built with every check.
Gathers are those that no line asks for; beside them are those of the hand-written plan, where there is one for tp. The
seconds are those of a processor that the proposal took, without imports. Words that are given choose the models whose
names hold one of them.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks import outside
from benchmarks.command import command
from benchmarks.outside_models import Case
from benchmarks.outside_table import cases
from benchmarks.turns import ROOT
from parc.advice import unasked_gathers
from parc.compiling.compiled import Compiled
from parc.proposing.lines import ModelLine
from parc.proposing.proposal import Wish, propose

OUT = Path(__file__).with_suffix(".md")
LEAST = 0.9
MOST_SECONDS = 20
"""The seconds of a processor that a proposal should take at most; processes beside it make them more."""
ABOUT = """# Plans that `parc init` proposes

Written by `make outside-init`: for every model of `make outside`, from what makes it alone, over dp=2 and tp=2.
*Verified* is every check of a build. The seconds are those of a processor that the proposal took, on two cores that
ran two at once. `tp` and `dp` are the gathers and exchanges in one forward over each axis that no line asks for;
`by-hand` are those over tp of the plan that was written by hand, where there is one.

"""


def build(name: str) -> tuple[Compiled, str]:
    """Compile the plan that is proposed for a model, and tell what it gathers and which lines it has."""
    begin = time.process_time()
    proposal = propose(Wish(model_of(cases()[name]), {"dp": 2, "tp": 2}), ROOT, "outside.parc")
    seconds = time.process_time() - begin
    gathers = [f"{axis}={count}" for axis, count in gathers_of(proposal.compiled).items()]
    return proposal.compiled, " ".join([f"{seconds:.0f} s", *gathers, *gathers_by_hand(name), *kinds_of(proposal.text)])


def model_of(case: Case) -> ModelLine:
    """Return the model of a case as a plan names it."""
    return ModelLine(f"{case.place}:{case.maker}", dict(re.findall(r'(\w+)="([^"]*)"', case.arguments)))


def gathers_of(compiled: Compiled) -> dict[str, int]:
    """Return how many values a forward gathers or exchanges unasked over each axis."""
    gathers = unasked_gathers(compiled.plan, compiled.built.reshards)
    return {axis: sum(one.axis == axis for one in gathers) for axis in ("tp", "dp")}


def gathers_by_hand(name: str) -> list[str]:
    """Return the gathers over tp of the plan that was written for a model by hand, if there is one."""
    by_hand = f"{name} tp=2"
    if by_hand not in cases():
        return []
    return [f"by-hand={gathers_of(outside.build(by_hand)[0])['tp']}"]


def kinds_of(text: str) -> list[str]:
    """Return the placing lines of a plan: how many of each kind, or the family."""
    if family := re.search(r'^include +"(parc:[\w-]+)"', text, re.M):
        return [family[1]]
    return [
        f"{verb}={count}" for verb in ("column", "row", "vocab") if (count := len(re.findall(f"^{verb} ", text, re.M)))
    ]


def table(outcomes: Mapping[str, tuple[str, str]], total: str) -> list[str]:
    """Return the lines of the table."""
    rows = [f"{total}.", "", "| model | outcome | gathers and lines, or the reason |", "| --- | --- | --- |"]
    for name, (outcome, why) in sorted(outcomes.items()):
        rows.append(outside.row_of(name, outcome, why))
    return rows


def main(*wanted: str) -> int:
    """Propose and build plans for all models, or for those whose names contain one of the wanted words."""
    names = [name for name in cases() if "=2" not in name and (not wanted or any(w in name for w in wanted))]
    start = time.perf_counter()
    outcomes = outside.outcomes_of(names, "benchmarks.outside_init")
    good = [why for outcome, why in outcomes.values() if outcome == "verified"]
    without = sum("tp=0" in why.split() for why in good)
    slow = sum(float(why.split()[0]) > MOST_SECONDS for why in good if why[0].isdigit())
    total = f"{outside.summary(outcomes)}; {without} of {len(good)} gather nothing over tp"
    total += f"; {slow} took more than {MOST_SECONDS} s"
    print(f"{total}; {time.perf_counter() - start:.0f} s")
    if not wanted:
        OUT.write_text(ABOUT + "\n".join(table(outcomes, total)) + "\n")
    return int(len(good) / len(names) < LEAST)


if __name__ == "__main__":
    outside.child(build) if sys.argv[1:] == ["--child"] else command(main)
