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
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import certificate.build
from certificate.build import EVALUATION, read_build, read_manifest, read_texts
from certificate.nodes import Form
from certificate.step import ATTEMPTS, Step, certify_texts
from certificate.text import Malformed, Refused, read_program
from parc.checking.checks import case_of
from parc.compiler.build.build import Build
from parc.compiling.compiled import Compiled, files_of, manifest_of
from parc.runtime.compare.agreement import TOLERANCE
from parc.runtime.compare.simulate import compare
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


def texts_of(compiled: Compiled) -> dict[str, str]:
    """Return the texts of a build, with its manifest."""
    return {**files_of(compiled), "manifest.json": json.dumps(manifest_of(compiled))}


_MOST_SECONDS = 60, 300
"""The seconds of its own after which a checker that has not answered is at fault, for small builds and large ones."""


def _too_long(*_: Any) -> None:
    raise TimeoutError("does not end")


class Judge:
    """The checker of one build's mutants. Their model is the same, so its meaning is known, in all normal forms, and
    so is that of all functions that a mutant leaves as they are."""

    def __init__(self, texts: Texts, most_seconds: float = _MOST_SECONDS[0]) -> None:
        self.texts, self._most_seconds = texts, most_seconds
        self._read = lru_cache(maxsize=None)(read_program)
        """Programs by their texts. All of them stay: what is known goes by the types that they hold."""
        self._models: dict[Hashable, Step] = {}

    def verdict(self, edits: Edits) -> str:
        """Return why the checker refuses changed texts, "" if it accepts them.

        Raises:
            Exception: it does neither.
        """
        signal.setitimer(signal.ITIMER_VIRTUAL, self._most_seconds)
        try:
            self._certify({**self.texts, **edits})
        except RecursionError:
            return "too deep"
        except Refused as error:
            return str(error) or "refused"
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return ""

    def _certify(self, texts: Texts) -> None:
        manifest = read_manifest(texts)
        if manifest.get("ranges"):
            certify_texts(texts, manifest)
            return
        for part in ("", EVALUATION) if any(place.startswith(EVALUATION) for place in texts) else ("",):
            with mock.patch("certificate.build.read_program", self._read):
                build = read_build(texts, manifest, part)
            self._in_forms(build)

    def _in_forms(self, build: certificate.build.Build) -> None:
        """Prove a build in one of the normal forms."""
        refused: list[Exception] = []
        for form, most in dict(ATTEMPTS).items():
            try:
                return self._in_form(build, form, most)
            except (Refused, RecursionError) as error:
                if isinstance(error, Malformed):
                    raise
                refused.append(error)
        raise refused[0]

    def _in_form(self, build: certificate.build.Build, form: Form, most: int) -> None:
        """Prove a build in one normal form, with the model's meaning of another build if that is the same."""
        step = Step(build)
        trains = any(action == "B" for _, action in build.programs)
        key = form, id(build.model), step.microbatches, step.mesh, step.axis, trains
        known = self._models.get(key)
        if known is None:
            step.table.form, step.table.most = form, most
            step.read_model()
            known = self._models[key] = step
        for name in _OF_MODEL:
            setattr(step, name, getattr(known, name))
        facts, axes, step.table._made = dict(step.table.facts), dict(step.table.axes), 0
        step.reader._texts.clear()
        step.tensors._reversed = False
        try:
            step.run_to_end()
        finally:
            step.table.facts = facts
            if step.table.axes != axes:  # values of the next mutant count ranks by one letter again
                del self._models[key]


_OF_MODEL = ("table", "reader", "tensors", "whole", "expected", "updates", "scales", "gradients")
"""The attributes of a step that depend on its model alone."""


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
    build = Judge(texts, _MOST_SECONDS[compiled is None])
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
    signal.signal(signal.SIGVTALRM, _too_long)
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
