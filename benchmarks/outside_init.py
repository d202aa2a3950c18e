"""``make outside-init``: `parc init` over the models of ``make outside``: what it proposes builds, and what it gathers.

Of each model it is told what makes it, and nothing of inputs, loss or placements. A proposal is built with every check.
Gathers are those that no line asks for; beside them are those of the hand-written plan, where there is one for tp.
Words that are given choose the models whose names hold one of them.
"""

from __future__ import annotations

import re
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path

from benchmarks.outside import ROOT, child, outcomes_of, summary
from benchmarks.outside_models import HERE, Case
from benchmarks.outside_table import cases

OUT = Path(__file__).with_suffix(".md")
LEAST = 0.9
ABOUT = """# Plans that `parc init` proposes

Written by `make outside-init`: for every model of `make outside`, from what makes it alone, over dp=2 and tp=2.
*Verified* is every check of a build. `tp` and `dp` are the gathers and exchanges in one forward over each axis that no
line asks for; `by-hand` are those over tp of the plan that was written by hand, where there is one.

"""


def build(name: str) -> tuple[str, str]:
    """Build the plan that is proposed for a model, and return the outcome with what it gathers, or the reason."""
    from parc.checking.checks import check_build
    from parc.grammar.diagnostics import PlanError
    from parc.proposing.proposal import Wish, propose

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages, about their own future
            proposal = propose(Wish(model_of(cases()[name]), {"dp": 2, "tp": 2}), ROOT, "outside.parc")
            gathered = gathers_of(proposal.compiled)
            checked = check_build(proposal.compiled)
            by_hand = gathers_by_hand(name)
    except PlanError as refused:
        diagnostic = refused.diagnostics[0]
        return "refused", f"{diagnostic.code.name} {diagnostic.message}"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return "crashed", f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
    if checked.faults:  # of parc's own making
        return "crashed", f"a check refused it: {checked.faults[0]}"
    return "verified", " ".join([f"tp={gathered['tp']}", f"dp={gathered['dp']}", *by_hand, *kinds_of(proposal.text)])


def model_of(case: Case):  # type: ignore[no-untyped-def] # its class is imported where it is needed
    """Return the model of a case as a plan names it."""
    from parc.proposing.lines import ModelLine

    place = HERE if case.arguments else "benchmarks.outside_plain"
    return ModelLine(f"{place}:{case.maker}", dict(re.findall(r'(\w+)="([^"]*)"', case.arguments)))


def gathers_of(compiled) -> dict[str, int]:  # type: ignore[no-untyped-def]
    """Return how many values a forward gathers or exchanges unasked over each axis."""
    from parc.advice import unasked_gathers

    gathers = unasked_gathers(compiled.plan, compiled.built.reshards)
    return {axis: sum(one.axis == axis for one in gathers) for axis in ("dp", "tp")}


def gathers_by_hand(name: str) -> list[str]:
    """Return the gathers over tp of the plan that was written for a model by hand, if there is one."""
    from parc.compiler.plan.plan import read_plan
    from parc.compiling.driver import compile_plan
    from parc.grammar.source import Source

    case = cases().get(f"{name} tp=2")
    if case is None:
        return []
    return [f"by-hand={gathers_of(compile_plan(read_plan(Source('outside.parc', case.plan())), ROOT))['tp']}"]


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
        rows.append(f"| {name} | {outcome} | {' '.join(why.split()).replace('|', '/')} |")
    return rows


def main(wanted: list[str]) -> int:
    """Propose and build plans for all models, or for those whose names contain one of the wanted words."""
    names = [name for name in cases() if not name.endswith(" tp=2") and (not wanted or any(w in name for w in wanted))]
    start = time.perf_counter()
    outcomes = outcomes_of(names, "benchmarks.outside_init")
    good = [why for outcome, why in outcomes.values() if outcome == "verified"]
    without = sum("tp=0" in why.split() for why in good)
    total = f"{summary(outcomes)}; {without} of {len(good)} gather nothing over tp"
    print(f"{total}; {time.perf_counter() - start:.0f} s")
    if not wanted:
        OUT.write_text(ABOUT + "\n".join(table(outcomes, total)) + "\n")
    return int(len(good) / len(names) < LEAST)


if __name__ == "__main__":
    sys.exit(child(build) if sys.argv[1:] == ["--child"] else main(sys.argv[1:]))
