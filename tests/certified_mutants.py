"""Mutants of builds for the certificate: texts changed line by line, and what the checker says of each.

``python -m tests.certified_mutants [BUILD ...]`` changes texts of small builds as a faulty pass would, and faults alike
in all programs; ``model.py`` stays, as it says what is meant. A mutant that is accepted runs beside the reference, all
ranks in one process in float64: if any number differs, the checker has a hole. What neither refuses in words nor
accepts is a fault too. The folder of a large build may be named too: each of its mutants is told as it is judged. A
long run goes on where it ended: ``--from 6600`` passes over as many mutants, which are drawn alike in every run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

from certificate.build import read_manifest, read_texts
from certificate.step import certify_texts
from certificate.text import Refused
from parc.checking.checks import case_of
from parc.compiler.build.build import Build
from parc.compiling.compiled import Compiled
from parc.runtime.compare.agreement import TOLERANCE
from parc.runtime.compare.simulate import compare
from tests.certified_judge import Judge, texts_of
from tests.certified_mutators import SOURCES, Edits, Mutant, Texts, lying, programs
from tests.planted_builds import PLANS, compiled_plan
from tests.planted_pipelines import PIPELINES, good

BUILDS = (
    "gpt dp=2, tp=2, two microbatches",
    "llama dp=2, tp=2, split sequences",
    "stack tp=2, two microbatches",
    "stack tp=2, fp16",
    "experts ep=2",
    "gpt with batch over dp and sequence over tp",
    "gpt dp=2, zero 3",
    "stack dp=2, zero 2, bf16",
    "stack dp=4, zero 3 within node",
    "stack dp=4 in nodes of 2, compressed across",
    "experts dp=2, ep=2",
    "experts dp=2, tp=2 as ep=4",
    "window, cp=3 in zigzag",
    "causal, dp=2, cp=2 in a ring",
    "batch norm, dp=2, tp=2",
    "gpt dp=2, zero 3, bf16, offloaded",
    "two stages",
    "four stages on two ranks",
    "windows, dp=2, a sample a rank",
)
"""The builds that are changed, by their names in ``planted_builds`` and ``planted_pipelines``."""


def again(texts: Texts, edits: Edits) -> str:
    """Return why the checker itself refuses changed texts, with nothing known before; "" if it accepts them."""
    try:
        certify_texts(changed := {**texts, **edits}, read_manifest(changed))
    except Refused as error:
        return str(error) or "refused"
    return ""


def numbers(compiled: Compiled, texts: Texts) -> str:
    """Return how the numbers of changed texts differ from the reference's, or why these do not run; "" if they agree to
    1e-10."""
    try:
        manifest = json.loads(texts["manifest.json"])
        files = {name: text for name, text in texts.items() if name != "manifest.json"}
        changed = replace(compiled, written=Build.of(compiled.folder, files, manifest, {}))
        for part in (changed, changed.evaluated):
            if part is None:
                continue
            case = case_of(part)
            agreement = compare(replace(case, reference=case_of(compiled).reference) if part is changed else case, 2)
            if agreement.not_finite:
                return f"numbers: {agreement.not_finite}"
            if not agreement.largest <= TOLERANCE:
                return f"numbers: {agreement.worst}"
    except (Exception, SystemExit) as error:
        return f"does not run: {type(error).__name__}: {str(error)[:150]}"
    return ""


@dataclass
class Count:
    """The mutants of a kind, and what became of them."""

    mutants: int = 0
    accepted: list[str] = field(default_factory=list)
    """Mutants that are accepted and compute the same."""
    idle: list[str] = field(default_factory=list)
    """Mutants that are accepted and do not run."""
    holes: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)


def judge(
    name: str, compiled: Compiled | None, texts: Texts, numbers_of: range, draw: Random, counts: dict[str, Count]
) -> int:
    """Judge the mutants ``numbers_of`` of a build, of each source and kind alike, and return how many it has up to the
    last of these. One that is not ``compiled`` here is too large to run, so its accepted mutants are told without their
    numbers."""
    build = Judge(texts, 300 if compiled is None else 60)
    if reason := build.verdict({}):
        raise SystemExit(f"{name}: is refused as it is: {reason}")
    axes = [word.split("=")[0] for word in re.search(r"mesh\((.*)\)", texts[programs(texts)[0]])[1].split(", ")]  # type: ignore[index]
    axes = [axis for axis in axes if axis]
    by_kind: dict[str, list[Mutant]] = {}
    for source in SOURCES:
        for mutant in source(texts, draw):
            by_kind.setdefault(mutant.kind, []).append(mutant)
    pools, number = [draw.sample(pool, len(pool)) for pool in by_kind.values()], 0
    for mutant in (each for turn in zip_longest(*pools) for each in turn if each is not None):
        if number == numbers_of.stop:
            break
        edits = {file: text for file, text in mutant.edits().items() if text != texts[file]}
        if not edits:
            continue
        number += 1
        if number <= numbers_of.start:
            continue
        count = counts.setdefault(mutant.kind, Count())
        count.mutants += 1
        if number % 100 == 0:
            print(f"{name}: mutant {number}", flush=True)
        what, begin = f"{name}: {mutant.what}", time.process_time()
        try:
            reason = build.verdict(edits)
            if reason and "type" not in mutant.kind and any(word in reason for word in ("differs along", "partial")):
                lies = lying({**texts, **edits}, axes)
                reason = build.verdict({**edits, **lies})
                what = f"{what} (with lying types)"
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            count.crashes.append(f"{what}: {type(error).__name__} {error} at {Path(last.filename).name}:{last.lineno}")
            print(f"crash: {mutant.kind}: {count.crashes[-1]}", flush=True)
            continue
        if compiled is None:
            spent = f"{time.process_time() - begin:.1f} s"
            print(f"{number}: {mutant.kind}: {spent}: {mutant.what}: {reason[:120] or 'accepted'}", flush=True)
        if reason:
            continue
        if reason := again(texts, edits):
            count.crashes.append(f"{what}: is accepted beside others, and refused by itself: {reason}")
            continue
        differs = "" if compiled is None else numbers(compiled, {**texts, **edits})
        if not differs:
            count.accepted.append(what)
        elif differs.startswith("numbers"):
            count.holes.append(f"{what}: {differs}")
            print(f"hole: {mutant.kind}: {what}: {differs}", flush=True)
        else:
            count.idle.append(f"{what}: {differs}")
    return number


def _line(kind: str, row: Mapping[str, int]) -> str:
    widths = {"mutants": 9, "accepted": 10, "not run": 9, "crashes": 9, "holes": 7}
    return f"{kind:<28}" + "".join(f"{row[name]:>{width}}" for name, width in widths.items())


def table(counts: Mapping[str, Count]) -> str:
    """Return the table of all kinds, and what was accepted."""
    head = f"{'kind':<28}{'mutants':>9}{'accepted':>10}{'not run':>9}{'crashes':>9}{'holes':>7}"
    lines, total = [head], Counter[str]()
    for kind, c in sorted(counts.items()):
        row = {"mutants": c.mutants, "accepted": len(c.accepted), "not run": len(c.idle), "crashes": len(c.crashes),
               "holes": len(c.holes)}  # fmt: skip
        total.update(row)
        lines.append(_line(kind, row))
    lines.append(_line("all", total))
    for word in ("accepted", "idle", "crashes", "holes"):
        lines += [f"{word}: {kind}: {what}" for kind, c in sorted(counts.items()) for what in getattr(c, word)]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Judge mutants, and print what was accepted. Return 1 if one has other numbers, or the checker fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="BUILD")
    parser.add_argument("--builds", type=int, default=len(BUILDS))
    parser.add_argument("--mutants", type=int, default=600, help="of each build")
    parser.add_argument("--from", type=int, default=0, dest="start", help="mutants of all builds that are passed over")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    counts: dict[str, Count] = {}
    left = args.start
    for name in args.names or BUILDS[: args.builds]:
        compiled: Any = None
        if not Path(name).is_dir():
            compiled = compiled_plan(name) if name in PLANS else good(name).compiled
        texts = read_texts(Path(name)) if compiled is None else texts_of(compiled)
        chosen = range(min(left, args.mutants), args.mutants)
        left -= min(left, judge(name, compiled, texts, chosen, Random(f"{args.seed} {name}"), counts))
        print(f"{name}: {sum(c.mutants for c in counts.values())} mutants", flush=True)
    print(table(counts))
    return int(any(c.holes or c.crashes for c in counts.values()))


if __name__ == "__main__":
    assert PIPELINES
    sys.exit(main())
