"""``make outside``: models from other packages, built: verified, refused by a message, or crashed.

Prints every model as it is done and writes a table of the reasons to ``benchmarks/outside.md``. A model is built in a
child process under a limit of time and one of memory; a child builds several, until one is killed. Words that are given
choose the models whose names hold one of them.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import select
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from benchmarks.command import command
from benchmarks.outside_table import cases
from benchmarks.turns import ROOT
from parc.checking.checks import check_build
from parc.compiler.plan.plan import read_plan
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source

OUT = Path(__file__).with_suffix(".md")
SECONDS, GIGABYTES, AT_ONCE, A_CHILD = 400, 6, int(os.environ.get("WORKERS", "2")), 12
LEAST = 0.95
ABOUT = """# Models from elsewhere

Written by `make outside`: tiny models of packages that an index installs (`benchmarks/outside-requirements.txt` and
`constraints.txt`), batch 4 over dp=2, and over tp=2 too where it is said; no model's code was touched. *Verified* is
every check of a build, and *certified* is proved by the checker of certificates as well. Layers are not left out at
random (`layerdrop` is 0), which no program of fixed lines does, and spectra are not masked by NumPy's random numbers.

"""


NOT_CERTIFIED = "not certified"
"""The first words of the reason of a build that its own numbers verify, and not the checker of certificates."""
Outcome = tuple[str, str]
"""``verified``, ``refused`` or ``crashed``, with the reason or what else is to be told."""


def build(name: str) -> tuple[Compiled, str]:
    """Compile a model under its plan."""
    return compile_plan(read_plan(Source("outside.parc", cases()[name].plan())), ROOT), ""


def outcome_of(build: Callable[[str], tuple[Compiled, str]], name: str) -> Outcome:
    """Compile a model by a function, which also returns what to tell of it, check the build, and return the outcome."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages, about their own future
            compiled, told = build(name)
            checked = check_build(compiled)
    except PlanError as refused:
        diagnostic = refused.diagnostics[0]
        return "refused", f"{diagnostic.code.name} {diagnostic.message}"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return "crashed", f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
    if checked.faults:  # of parc's own making
        return "crashed", f"a check refused it: {checked.faults[0]}"
    missing = checked.certificate.missing
    return "verified", f"{NOT_CERTIFIED}: {missing}" if missing else told


def child(build: Callable[[str], tuple[Compiled, str]]) -> None:
    """Build the models named on stdin, one on each line, and print a line of JSON for each on the first stdout."""
    resource.setrlimit(resource.RLIMIT_DATA, (GIGABYTES << 30, GIGABYTES << 30))
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models print
    for line in sys.stdin:
        print(json.dumps(outcome_of(build, line.strip())), file=results, flush=True)


class Child:
    """A process that builds one model after the other."""

    def __init__(self, module: str) -> None:
        words = [sys.executable, "-m", module, "--child"]
        self.process = subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.left = A_CHILD

    def build(self, name: str) -> Outcome:
        """Return the outcome of a model. The process has ended if its limits or its time killed it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.left -= 1
        print(name, file=self.process.stdin, flush=True)
        ready, _, _ = select.select([self.process.stdout], [], [], SECONDS)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.end()
            ended = f"its process ended with {self.process.returncode}"
            return "crashed", ended if ready else f"not done in {SECONDS} seconds"
        outcome, why = json.loads(line)
        return outcome, why

    def end(self) -> None:
        """End the process; it holds nothing."""
        self.process.kill()
        self.process.wait()
        self.left = 0


def outcomes_of(names: Sequence[str], module: str) -> dict[str, Outcome]:
    """Return the outcome and the reason of each model, from children that run a module. Print them as they come."""
    idle: SimpleQueue[Child] = SimpleQueue()
    for _ in range(AT_ONCE):
        idle.put(Child(module))
    count = itertools.count(1)

    def outcome_of(name: str) -> Outcome:
        child, start = idle.get(), time.perf_counter()
        outcome, why = child.build(name)
        seconds, first = time.perf_counter() - start, why.partition("\n")[0]
        print(f"{next(count):3}/{len(names)} {outcome:8} {name:44} {seconds:5.1f} s  {first}"[:220], flush=True)
        if not child.left:
            child.end()
        idle.put(child if child.left else Child(module))
        return outcome, why

    with ThreadPoolExecutor(AT_ONCE) as threads:
        outcomes = dict(zip(names, threads.map(outcome_of, names), strict=True))
    while not idle.empty():
        idle.get().end()
    return outcomes


def summary(outcomes: Mapping[str, Outcome]) -> str:
    """Return how many models had which outcome."""
    counts = Counter(outcome for outcome, _ in outcomes.values())
    share = counts["verified"] / len(outcomes)
    proved = counts["verified"] - sum(why.startswith(NOT_CERTIFIED) for _, why in outcomes.values())
    total = f"{len(outcomes)} builds: {counts['verified']} verified ({share:.1%}), {counts['refused']} refused"
    total += f" by a message, {counts['crashed']} crashed"
    return total + f"; certified {proved} of those verified ({proved / max(counts['verified'], 1):.1%})"


def row_of(name: str, outcome: str, why: str) -> str:
    """Return a line of a table."""
    return f"| {name} | {outcome} | {' '.join(why.split()).replace('|', '/')} |"


def main(*wanted: str) -> int:
    """Build all models, or those whose names contain one of the wanted words."""
    names = [name for name in cases() if not wanted or any(word in name for word in wanted)]
    start = time.perf_counter()
    outcomes = outcomes_of(names, "benchmarks.outside")
    counts, total = Counter(outcome for outcome, _ in outcomes.values()), summary(outcomes)
    print(f"{total}; {time.perf_counter() - start:.0f} s")
    if not wanted:
        OUT.write_text(ABOUT + "\n".join(table(outcomes, total)) + "\n")
    return int(counts["verified"] / len(names) < LEAST or counts["crashed"] > 0)


def table(outcomes: dict[str, Outcome], total: str) -> list[str]:
    """Return the lines of the table: models that were not verified, with their reasons, then all others."""
    rows = [f"{total}.", "", "| not verified, or not certified | outcome | reason |", "| --- | --- | --- |"]
    for name, (outcome, why) in sorted(outcomes.items()):
        if outcome != "verified" or why.startswith(NOT_CERTIFIED):
            rows.append(row_of(name, outcome, why))
    packages: dict[str, list[str]] = {}
    for name, (outcome, _) in sorted(outcomes.items()):
        if outcome == "verified":
            package, _, rest = name.partition(" ")
            packages.setdefault(package, []).append(rest)
    return [*rows, "", *(f"Verified of {package}: {', '.join(each)}.\n" for package, each in packages.items())]


if __name__ == "__main__":
    child(build) if sys.argv[1:] == ["--child"] else command(main)
