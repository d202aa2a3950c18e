"""Golden texts: hashes of every program, schedule, plan and memory row of about forty plans, ``make goldens``.

A program's text is canonical, so a change of the compiler that is meant to change nothing leaves every hash as it is.
Where one differs, the plan is compiled a second time at the commit that wrote the hashes, and the two texts are
compared line by line. ``make goldens-update`` writes the hashes anew, after a change that is meant.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.test_time import ROOT, checkout
from parc.checking.reports import report_of
from parc.checking.twins import find_twin
from parc.compiler.plan.plan import read_plan
from parc.compiling.compiled import files_of
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source

GOLDEN = Path(__file__).parent / "golden" / "programs.json"
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class GoldenPlan:
    """A plan of the corpus: an example with other values of its ``let`` lines, without some of its lines, and with
    more lines. Of ``twin`` the smaller model is compiled that stands for the plan's own."""

    example: str
    settings: str = ""
    more: str = ""
    without: str = ""
    twin: bool = False
    quick: bool = False
    """True for the plans that ``make test`` compiles: of models in ``examples/``, so no other package changes them."""

    @property
    def name(self) -> str:
        """The key of the plan's hashes."""
        return " | ".join(filter(None, (self.example, self.settings, self.more.strip(), "twin" * self.twin)))

    def texts(self) -> dict[str, str]:
        """Compile the plan. Return its texts by file name, with a row of memory for each role."""
        lines = (EXAMPLES / f"{self.example}.parc").read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if not self.without or not line.startswith(self.without)]
        settings = dict(word.split("=") for word in self.settings.split())
        source = Source(f"{self.example}.parc", "\n".join([*kept, self.more]))
        compiled = compile_plan(read_plan(source, settings), EXAMPLES)
        if self.twin:
            compiled = find_twin(compiled)
        memory = [json.dumps(row, sort_keys=True) for row in report_of(compiled)["memory"]]
        return {**files_of(compiled), "memory": "\n".join(memory) + "\n"}


PLANS = (
    GoldenPlan("gpt", quick=True),
    GoldenPlan("gpt", "dp=1 tp=4", quick=True),
    GoldenPlan("gpt3d", quick=True),
    GoldenPlan("gpt3d", "schedule=gpipe"),
    GoldenPlan("gpt3d", "schedule=zb-h1", "zero 2 over dp", quick=True),
    GoldenPlan("gpt3d", "schedule=zbv", "zero 3 over dp\nrecompute blocks.*"),
    GoldenPlan("gpt3d", more="zero 1 over dp", quick=True),
    GoldenPlan("gpt3d", more="zero 3 over dp", quick=True),
    GoldenPlan("gpt3d", more="zero 2 over dp\nprecision bf16", quick=True),
    GoldenPlan("gpt3d", "dp=4", "node 2\nhierarchical over dp\nzero 1 over dp within node"),
    GoldenPlan("gpt", more="sizes B=4..16 by 4, S=64..128 by 32", without="sizes", quick=True),
    GoldenPlan("gpt", more="compress gradients over dp using int8", quick=True),
    GoldenPlan("gpt", more="eval every 10", quick=True),
    GoldenPlan("gpt", "dp=4", "node 2\nhierarchical over dp\ncompress gradients over dp using fp16", quick=True),
    GoldenPlan("gpt3d", more="zero 3 over dp\nprefetch 2\nprecision bf16", quick=True),
    GoldenPlan("llama"),
    GoldenPlan("llama", "precision=bf16"),
    GoldenPlan("llama", more="precision fp16 loss_scale dynamic", without="precision"),
    GoldenPlan("llama", more="compress gradients over dp using int8"),
    GoldenPlan("llama", more="compress gradients over dp using fp16"),
    GoldenPlan("llama", more="recompute model.layers.*"),
    GoldenPlan("llama", more="recompute model.layers.* keep products"),
    GoldenPlan("llama", more="eval every 10"),
    GoldenPlan("llama-sequence"),
    GoldenPlan("llama-sequence", "precision=bf16"),
    GoldenPlan("llama-zero", "zero=0"),
    GoldenPlan("llama-zero", "zero=1"),
    GoldenPlan("llama-zero", "zero=2"),
    GoldenPlan("llama-zero", "zero=3"),
    GoldenPlan("llama-zero", "dp=4 zero=3", "node 2\nhierarchical over dp"),
    GoldenPlan("llama-zero", "dp=4 zero=1", "node 2\nhierarchical over dp"),
    GoldenPlan("llama-zero", "dp=4 zero=0", "node 2\nhierarchical over dp"),
    GoldenPlan("llama-zero", "dp=4", "node 2\nzero 3 over dp within node", without="zero"),
    GoldenPlan("llama-zero", "zero=1", "bucket 4KB"),
    GoldenPlan("llama-zero", "zero=3", "bucket 4KB\nprefetch 0"),
    GoldenPlan("llama-zero", "zero=3", "prefetch 2\nprecision bf16", without="precision"),
    GoldenPlan("llama-long", "using=gather"),
    GoldenPlan("llama-long", "using=ring"),
    GoldenPlan("llama-long", "using=zigzag"),
    GoldenPlan("llama-long", "using=ulysses cp=2"),
    GoldenPlan("llama-offload"),
    GoldenPlan("llama-pipeline", "layers=4"),
    GoldenPlan("llama-pipeline", "layers=4 schedule=interleaved chunks=2"),
    GoldenPlan("moe"),
    GoldenPlan("moe", more="zero 1 over dp"),
    GoldenPlan("seven", quick=True),
    GoldenPlan("llama3-8b"),
    GoldenPlan("llama3-8b", twin=True),
    GoldenPlan("deepseek-v3", "layers=7 pp=2 dp=8 edp=2 ep=4 microbatches=4 batch=64"),
)


def hashes(texts: Mapping[str, str]) -> dict[str, str]:
    """Return a hash of each text, by its name, without the numbers of lines in transformers: they move there."""
    known = {name: re.sub(r"((?:modeling_\w+|activations)\.py):\d+", r"\1", text) for name, text in texts.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in known.items()}


def changes(plan: GoldenPlan, texts: Mapping[str, str]) -> str:
    """Return the first changed lines of a plan's texts, or "" where every hash is the golden one."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8")).get(plan.name, {})
    now = hashes(texts)
    changed = sorted(name for name in golden.keys() | now.keys() if golden.get(name) != now.get(name))
    if not changed:
        return ""
    before = _texts_then(plan) if golden else {}
    diffs = [
        line for name in changed for line in difflib.unified_diff(
            before.get(name, "").splitlines(), texts.get(name, "").splitlines(), f"{name} (golden)", name, "", "", 1, ""
        )
    ]  # fmt: skip
    more = [f"… and {len(diffs) - 60} more lines"] if len(diffs) > 60 else []
    help_ = "where this is meant: `make goldens-update`, and say so in the commit"
    return "\n".join([f"{plan.name}: {', '.join(changed)} changed", *diffs[:60], *more, help_])


def _texts_then(plan: GoldenPlan) -> dict[str, str]:
    """Return a plan's texts as the commit makes them that wrote the golden hashes; none outside of a git checkout."""
    command = ["git", "log", "-1", "--format=%H", "--", str(GOLDEN)]
    log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if log.returncode or not (commit := log.stdout.strip()):
        return {}
    with checkout(commit) as tree, TemporaryDirectory() as folder:
        file = Path(folder) / "texts.json"
        command = [sys.executable, "-m", "tests.goldens", plan.name, "--texts", str(file)]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, env={"PYTHONPATH": str(tree)})
        texts: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if done.returncode == 0 else {}
    return texts


def _compiled(plans: Collection[GoldenPlan]) -> Iterator[tuple[GoldenPlan, dict[str, str]]]:
    """Yield plans with their texts. A model is captured once for all plans that are compiled of it."""
    from tests.captured_once import captured_once

    with captured_once():
        for plan in plans:
            yield plan, plan.texts()


def main() -> int:
    """Compare the corpus with the golden hashes, or write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wanted", nargs="?", default="", help="only the plans whose name has this in it")
    parser.add_argument("--update", action="store_true", help="write the hashes")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="write the texts of the plan of this very name")
    options = parser.parse_args()
    if options.texts:
        (plan,) = (plan for plan in PLANS if plan.name == options.wanted)
        options.texts.write_text(json.dumps(plan.texts()), encoding="utf-8")
        return 0
    plans = [plan for plan in PLANS if options.wanted in plan.name]
    golden = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    count = changed = 0
    for plan, texts in _compiled(plans):
        count += len(texts)
        if options.update:
            golden[plan.name] = hashes(texts)
        elif difference := changes(plan, texts):
            changed += 1
            print(difference, end="\n\n", flush=True)
    if options.update:
        kept = {plan.name: golden[plan.name] for plan in PLANS if plan.name in golden}
        GOLDEN.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(
        f"{count} texts of {len(plans)} plans {'written' if options.update else f'compared, {changed} plans changed'}"
    )
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
