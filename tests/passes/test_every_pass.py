"""Every pass on a small model: the graph or the programs that it changes, before and after, beside a golden file."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import fx

from parc.compiler.layout.mesh import Mesh
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.program import Program
from parc.compiling.driver import task_lines
from parc.compiling.plan_capture import capture_plan
from parc.compiling.request import ask
from parc.grammar.source import Source
from parc.passes.pipeline import ALL_PASSES, Pass, StepValues, run_passes, values_of

from .as_text import text_of, typed_text

GOLDEN = Path(__file__).parent.parent / "golden" / "passes.txt"
TRAINING = "loss cross_entropy(output, targets)\ninput targets int64 [B, S]\noptimizer sgd lr 0.1\n"
ROWS = TRAINING.replace("cross_entropy(", '"./small_net.py:smoothed"(')
DATA = "shard tokens, targets [B/dp, _]\n"
PLANS = {
    "splits": ("b", "B=4, S=2", TRAINING + DATA + """mesh dp=2, tp=4
        column blocks.*.up over tp
        row blocks.*.down over tp
        vocab head over tp pad
        freeze embed
        zero 1 over dp
        precision bf16
        offload activations to cpu
        schedule microbatches 2"""),
    "a pipeline": ("bb", "B=4, S=2", TRAINING + DATA + """mesh dp=1, pp=2
        stage balanced over pp
        recompute blocks.0
        schedule 1f1b microbatches 2"""),
    "two nodes": ("b", "B=4, S=2", TRAINING + DATA + """mesh dp=4
        node 2
        hierarchical over dp
        compress gradients over dp using fp16"""),
    "experts": ("e", "B=2, S=2", TRAINING + "mesh dp=1, ep=2\nshard tokens, targets [B/ep, _]\n"
        "experts blocks.0.experts over ep dropless"),
    "a ring": ("a", "B=2, S=4", TRAINING + "mesh cp=2\ncontext ** dim S over cp using ring"),
    "logits, padded": ("b", "B=2, S=2", ROWS + "mesh tp=4\nvocab head over tp pad"),
    "logits": ("b", "B=2, S=2", ROWS + "mesh tp=2\nvocab head over tp"),
    "inference": ("b", "B=2, S=2", "mesh pp=2\nstage before head over pp\nschedule gpipe microbatches 1"),
}  # fmt: skip
WITHOUT_TEXT = {
    "rows and blocks", "dead code", "claims", "placements", "sums of microbatches", "recomputation",
    "stages", "segments", "levels", "compression", "parts of a step",
}  # fmt: skip
"""The passes that note or decide what later ones write."""


def _texts(values: StepValues) -> Mapping[str, str]:
    """Return the texts of a step's graphs and programs, by name."""
    mesh: Mesh = values["mesh"]

    def written(name: str, value: Any) -> str:
        if isinstance(value, fx.Graph):
            return typed_text(value, mesh) if name in ("typed", "counted") else text_of(value)
        if isinstance(value, Program):
            return value.text()
        return "\n".join(program.text() for programs in value.values() for program in programs.values())

    shown = ("graph", "count", "reference", "typed", "counted", "roles")
    return {name: written(name, values[name]) for name in shown if values.get(name) is not None}


def _changes(kinds: str, sizes: str, lines: str) -> Iterator[tuple[str, str]]:
    """Yield the passes that change a text of a plan's, each with its lines before and after."""
    head = f'model "./small_net.py:Net" (kinds="{kinds}")\ninput tokens int64 [B, S]\nsizes {sizes}\nseed 1\n'
    text = head + "\n".join(line.strip() for line in lines.splitlines()) + "\n"
    plan, folder = read_plan(Source("passes.parc", text)), Path(__file__).parent
    recorded, captured = capture_plan(plan, task_lines(plan), folder, None, evaluates=not plan.trains)
    _, request = ask(plan, folder, recorded, captured)
    # beside a step that trains, an evaluation reads parameters that are not frozen
    if not plan.trains:
        request = replace(request, computing=replace(request.computing, frozen=frozenset()))
    before: dict[str, str] = {}
    changes: list[tuple[str, str]] = []

    def watch(row: Pass, values: StepValues) -> None:
        after = _texts(values)
        for name in sorted(after.keys() | before.keys()):
            old, new = before.get(name, ""), after.get(name, "")
            if old != new:
                rows = list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0))[2:]
                changes.append((row.name, "\n".join(line for line in rows if not line.startswith("@@"))))
        before.update(after)

    run_passes(ALL_PASSES, values_of(captured, request), watch)
    yield from changes


def written() -> str:
    """Return the text of the golden file: each pass in the first plan in which it changes something."""
    shown: dict[str, str] = {}
    for title, plan in PLANS.items():
        first: dict[str, list[str]] = {}
        for name, rows in _changes(*plan):
            if name not in shown:
                first.setdefault(name, []).append(rows)
        shown.update((name, f"({title})\n" + "\n\n".join(texts)) for name, texts in first.items())
    return "\n\n\n".join(f"# {row.name} {shown[row.name]}" for row in ALL_PASSES if row.name in shown) + "\n"


def test_every_pass_changes_what_its_golden_says() -> None:
    """To accept a change, delete the golden file and run this once."""
    text = written()
    if not GOLDEN.exists():
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_every_pass_has_a_golden_or_writes_no_text() -> None:
    text = GOLDEN.read_text(encoding="utf-8")
    assert {row.name for row in ALL_PASSES if f"# {row.name} (" not in text} == WITHOUT_TEXT
