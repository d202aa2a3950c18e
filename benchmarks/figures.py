"""``make figures``: what introductions to parallel training promise, beside what builds of parc's examples have.

Writes the table of ``docs/figures.md``. Each row has a claim with its source, the number that the claim's formula
gives, and the number in the report or the programs of a build, for each of a few variants of an example's plan.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from parc.checking.reports import report_of
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.actions import FORWARD
from parc.compiler.program.liveness import local_bytes
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "figures.md"
HEAD = "| introductions say | formula | parc | build |\n|---|---|---|---|\n"
TOKEN = 4 * 512  # bytes of one float32 activation of the small Llama, for each token
GIB = 2**30


@dataclass(frozen=True)
class Build:
    """A compiled plan and its report."""

    compiled: Compiled
    report: dict[str, Any]

    def sent(self, *carries: str, module: str = "", role: str = "") -> int:
        """Return the bytes that a rank sends in a step for some uses, of modules with a name's part."""
        rows = [row for row in self.report["communication"] if row["carries"] in carries and module in row["module"]]
        return sum(row["wire_bytes"] * row["count_per_step"] for row in rows if role in ("", row["role"]))

    def kept(self, role: str) -> int:
        """Return the bytes that the first stage of a role keeps for the backward of one microbatch."""
        programs = self.compiled.build.roles[role].programs
        program = next(program for program in programs.values() if program.action == FORWARD)
        saved = {name for binding, name in program.main.returns if binding.kind == "saved"}
        values = program.main.values()
        return sum(local_bytes(values[name].type, program) for name in saved)

    def most(self, kind: str) -> float:
        """Return the GiB of one kind of memory, of the role that has most."""
        return max(row["state"].get(kind, row.get(kind)) for row in self.report["memory"]) / GIB


@dataclass(frozen=True)
class Figure:
    """A row: the claim, the example with its ``-D``, a line or ``-D`` for each variant, the formula's number for each,
    and the reader of the same number from a build."""

    claim: str
    plan: str
    variants: tuple[str, ...]
    formula: tuple[float, ...]
    read: Callable[[Build], float]
    form: str = "{:.3g}"
    relative: bool = False
    """True where numbers count beside the first variant's."""

    def cells(self) -> list[str]:
        """Return the row, with the numbers of all variants in each cell."""
        numbers = [self.read(built(self.plan, variant)) for variant in self.variants]
        numbers = [number / numbers[0] for number in numbers] if self.relative else numbers
        words = [" ".join(map(self.form.format, each)) for each in (self.formula, numbers)]
        shown = ", ".join(f"`{variant}`" for variant in self.variants if variant)
        return [
            self.claim,
            *(" / ".join(each.split(" ")) for each in words),
            f"`{self.plan}`" + f" {shown}" * bool(shown),
        ]


@cache
def built(plan: str, variant: str) -> Build:
    """Compile an example, given as its name with ``-D`` words, with one more line or ``-D``."""
    name, *words = f"{plan} {variant if variant.startswith('-D') else ''}".split()
    text = (ROOT / "examples" / f"{name}.parc").read_text(encoding="utf-8")
    lines = "" if variant.startswith("-D") else variant.replace("; ", "\n")
    defines = dict(word.split("=") for word in words if word != "-D")
    made = compile_plan(read_plan(Source(f"{name}.parc", f"{text}{lines}\n"), defines), ROOT / "examples")
    return Build(made, report_of(made))


def state(build: Build) -> float:
    """Return the bytes of state of a rank, for each parameter of its role."""
    (row,) = build.report["memory"]
    return sum(row["state"].values()) / row["of"]


def idle(build: Build) -> float:
    """Return the mean idle share of ranks, in percent."""
    return 100 * sum(build.report["idle"].values()) / len(build.report["idle"])


def reduces(build: Build) -> float:
    """Return the all-reduces of activations in a layer, of one microbatch."""
    rows = [row for row in build.report["communication"] if ".layers." in row["module"] and row["op"] == "all_reduce"]
    return sum(row["count_per_step"] for row in rows if row["carries"] == "activations") / 8


ZERO = tuple(f"zero {level} over dp" for level in range(4))
DATA = "llama-pipeline -D pp=1 -D dp=4 -D microbatches=1"
STAGES = "llama-pipeline -D pp=4 -D layers=32"
LAYERS = "llama-pipeline -D pp=4 -D layers=32 -D batch=4 -D microbatches=4"
SPLIT = tuple(f'include "parc:llama" (tp=4, sequence={sequence})' for sequence in ("none", "tp"))
NODES = "llama-pipeline -D pp=1 -D dp=8 -D microbatches=1"
TRILLION = "llama-1t -D memory=200GB"
KEPT = (
    4 + 3 + 3 * 1408 / 512
)  # activations of a layer: norms' inputs and outputs, q, k, v, attention, gate, up, product
FIGURES = (
    Figure("ZeRO divides 16 bytes a parameter by ranks, level by level (arXiv:1910.02054), here 4 ranks",
           DATA, ZERO, (16, 8 + 8 / 4, 4 + 12 / 4, 16 / 4), state),
    Figure("the same in bfloat16 with float32 gradients, 18 bytes (Megatron-LM's documentation)",
           DATA, tuple(f"{line}; precision bf16" for line in ZERO), (18, 6 + 12 / 4, 2 + 16 / 4, 18 / 4), state),
    Figure("levels 1 and 2 send what data parallelism sends, level 3 half as much again; bytes a parameter",
           DATA, ZERO, (6, 6, 6, 9), lambda b: b.sent("weights", "gradients") / b.report["parameters"]),
    Figure("GPipe is idle (p-1)/(m+p-1) of a step (arXiv:1811.06965); p=4, m=4, 8, 16; percent",
           f"{STAGES} -D schedule=gpipe", tuple(f"-D microbatches={m}" for m in (4, 8, 16)),
           tuple(100 * 3 / (m + 3) for m in (4, 8, 16)), idle),
    Figure("1F1B is idle as long as GPipe", STAGES, tuple(f"-D microbatches={m}" for m in (4, 8, 16)),
           tuple(100 * 3 / (m + 3) for m in (4, 8, 16)), idle),
    Figure("v chunks a rank divide the idle time by v (arXiv:2104.04473); v=2, 4, m=8; percent",
           f"{STAGES} -D schedule=interleaved", ("-D chunks=2", "-D chunks=4"), (300 / 19, 300 / 35), idle),
    Figure("GPipe holds m microbatches, 1F1B p (arXiv:2104.04473); p=4, m=16; held by the first stage",
           f"{STAGES} -D microbatches=16", ("-D schedule=gpipe", "-D schedule=1f1b"), (16, 4),
           lambda b: b.report["memory"][0]["activations"] / b.kept("pp0")),
    Figure("a stage sends an activation forward and its gradient back, a chunk of interleaving too; MiB a microbatch",
           STAGES, ("-D schedule=1f1b", "-D schedule=interleaved -D chunks=2"), (1, 2),
           lambda b: sum(row["wire_bytes"] * row["count_per_step"] for row in b.report["communication"]
                         if row["op"] == "send" and row["role"] == "pp1") / 8 / 2**20),
    Figure("tensor parallelism has four all-reduces a layer (arXiv:1909.08053)",
           "llama-pipeline -D pp=1 -D microbatches=1", SPLIT[:1], (4,), reduces),
    Figure("sequence parallelism sends the same bytes (arXiv:2205.05198), and gathers twice more for backward;"
           " activations a layer", "llama-pipeline -D pp=1 -D microbatches=1", SPLIT, (4 * 1.5, 6 * 1.5),
           lambda b: b.sent("activations", module=".layers.") / (8 * 16 * 128 * TOKEN)),
    Figure("sequence parallelism divides all activations by tp=4, not only products'; activations kept a layer",
           LAYERS, SPLIT, (4 + (KEPT - 4) / 4, KEPT / 4), lambda b: b.kept("pp1") / (8 * 128 * TOKEN)),
    Figure("recomputation keeps one activation a layer (arXiv:1604.06174)",
           LAYERS, ("", "recompute model.layers.*"), (KEPT, 1), lambda b: b.kept("pp1") / (8 * 128 * TOKEN)),
    Figure("recomputation costs a second forward, a third of a step's operations",
           LAYERS, ("", "recompute model.layers.*"), (1, 4 / 3),
           lambda b: sum(row["flops"] for row in b.report["stages"]), relative=True),
    Figure("gradients in 2 bytes or 1 are half or a quarter of the messages; bytes a parameter",
           DATA, ("", *(f"compress gradients over dp using {form}" for form in ("fp16", "int8"))), (6, 3, 1.5),
           lambda b: b.sent("gradients") / b.report["parameters"]),
    Figure("sums in two levels send 2 (K-1)/K of a rank's part across K=2 nodes of 4; bytes a parameter",
           NODES, ("node 4", "node 4; hierarchical over dp"), (7, 1),
           lambda b: b.report["across_nodes"]["bytes"] / b.report["parameters"]),
    Figure("70 B on 64 GPUs of 80 GB: (2 + 4 + 12/dp) bytes a parameter, and activations; GiB a rank",
           "llama3-70b", ("-D dp=8", "-D dp=4 -D pp=2"), (7.5 * 70.55e9 / 8 / GIB, 9 * 70.55e9 / 16 / GIB),
           lambda b: b.most("peak_bytes")),
    Figure("a trillion on 1,024 GPUs of 80 GB: (2 + 4 + 12/dp) bytes a parameter, and activations; GiB a rank",
           TRILLION, ("-D accumulate=fp32",), (7.5 * 1.01e12 / 128 / GIB,), lambda b: b.most("peak_bytes")),
    Figure("gradients of a trillion in two bytes take half; GiB a rank",
           TRILLION, ("-D accumulate=fp32", "-D accumulate=bf16"), (4 * 1.01e12 / 128 / GIB, 2 * 1.01e12 / 128 / GIB),
           lambda b: b.most("gradients")),
    Figure("470 B parameters are 7.5 TB of state, 7.3 GB a rank of 1,024; GB a rank",
           "llama-470b", ("-D zero=0", "-D zero=3"), (16 * 469.6, 16 * 469.6 / 1024),
           lambda b: sum(b.report["memory"][0]["state"].values()) / 1e9, form="{:,.4g}"),
)  # fmt: skip


def rows(figures: tuple[Figure, ...]) -> Iterator[str]:
    """Yield the table's lines."""
    yield from (f"| {' | '.join(figure.cells())} |" for figure in figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "wanted", nargs="?", default="", help="only the rows whose claim has this in it; writes nothing"
    )
    given = parser.parse_args()
    lines = []
    for line in rows(tuple(figure for figure in FIGURES if given.wanted in figure.claim)):
        print(line, flush=True)
        lines.append(line)
    if not given.wanted:
        text = PAGE.read_text(encoding="utf-8")
        table = re.compile(re.escape(HEAD) + r"(?:\|.*\n)*")
        PAGE.write_text(table.sub(lambda _: HEAD + "".join(f"{line}\n" for line in lines), text), encoding="utf-8")
