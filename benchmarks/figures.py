"""``make figures``: what introductions to parallel training promise, beside what builds of parc's examples have.

The rows stand in ``docs/figures.md``: a claim, the unit, its formula's number, parc's number, and the example with its
variants. parc's numbers are read from reports and programs of builds, printed, and written into the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.turns import ROOT
from parc.checking.reports import report_of
from parc.compiler.analysis.liveness import local_bytes
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.actions import FORWARD
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source

PAGE = ROOT / "docs" / "figures.md"
ROW = re.compile(
    r"^\| (?P<claim>[^|]+) \| (?P<unit>[^|]+) \| (?P<formula>[^|]+) \| (?P<parc>[^|]*) \| (?P<build>`[^|]+) \|$", re.M
)
WIDTH, VOCAB, LAYERS, LENGTH, BATCH = 512, 8192, 8, 128, 16
"""Sizes of examples/llama-pipeline.parc; the readers below that count activations are for these."""


@dataclass(frozen=True)
class Read:
    """The report of a build, and the bytes that each of its stages keeps of a microbatch."""

    report: Mapping[str, Any]
    kept: Sequence[int]

    def sent(self, *carries: str, op: str = "", module: str = "", key: str = "wire_bytes") -> float:
        """Return the bytes that a rank of the second role, or the only one, sends in a step; or the sum of another
        ``key`` of its collectives."""
        role = [*self.report["roles"]][:2][-1]
        rows = (row for row in self.report["communication"] if row["role"] == role and row["carries"] in carries)
        rows = (row for row in rows if op in row["op"] and module in row["module"])
        return float(sum(row["count_per_step"] * (row[key] if key else 1) for row in rows))

    def each(self, key: str) -> list[Any]:
        """Return a number of each role's memory."""
        return [row[key] for row in self.report["memory"]]

    @property
    def parameters(self) -> int:
        return int(self.report["parameters"])


READERS: dict[str, Callable[[Read], float]] = {
    "bytes of state a parameter": lambda b: sum(b.each("state")[0].values()) / b.parameters,
    "GB of state a rank": lambda b: sum(b.each("state")[0].values()) / 1e9,
    "bytes sent a parameter": lambda b: b.sent("weights", "gradients") / b.parameters,
    "bytes of gradients sent a parameter": lambda b: b.sent("gradients") / b.parameters,
    "bytes across nodes a parameter": lambda b: b.report["across_nodes"]["bytes"] / b.parameters,
    "percent idle": lambda b: 100 * sum(b.report["idle"].values()) / len(b.report["idle"]),
    "microbatches held": lambda b: b.each("activations")[0] / b.kept[0],
    "activations sent a microbatch": lambda b: b.sent("activations", op="send") / (BATCH * LENGTH * WIDTH * 4),
    "all-reduces a layer": lambda b: b.sent("activations", op="all_reduce", module=".layers.", key="") / LAYERS,
    "activations sent a layer": lambda b: (
        b.sent("activations", module=".layers.") / (LAYERS * BATCH * LENGTH * WIDTH * 4)
    ),
    "activations kept a layer": lambda b: b.kept[:2][-1] / (LAYERS * LENGTH * WIDTH * 4),
    "operations a parameter and token": lambda b: (
        sum(row["flops"] for row in b.report["stages"]) / ((b.parameters - VOCAB * WIDTH) * BATCH * LENGTH)
    ),
    "GiB a rank": lambda b: max(b.each("peak_bytes")) / 2**30,
    "GiB of gradients a rank": lambda b: max(b.each("gradients")) / 2**30,
}


@cache
def read(plan: str, variant: str) -> Read:
    """Compile an example, given as its name with ``-D`` words, with lines (between them ``; ``) or further ``-D``."""
    name, *words = f"{plan} {variant if variant.startswith('-D') else ''}".split()
    lines = "" if variant.startswith("-D") else variant.replace("; ", "\n")
    text = (ROOT / "examples" / f"{name}.parc").read_text(encoding="utf-8")
    defines = dict(word.split("=") for word in words if word != "-D")
    compiled = compile_plan(read_plan(Source(f"{name}.parc", f"{text}{lines}\n"), defines), ROOT / "examples")
    kept = []
    for role in compiled.build.roles.values():
        program = next(program for program in role.programs.values() if program.action == FORWARD)
        values, saved = program.main.values(), {name for key, name in program.main.returns if key.kind == "saved"}
        kept.append(sum(local_bytes(values[name].type, program) for name in saved))
    return Read(report_of(compiled), kept)


def measured(row: re.Match[str]) -> str:
    """Return a row with parc's numbers, one for each variant; ``without`` is the example as it is."""
    plan, _, rest = row["build"].strip("`").partition("`")
    variants = [word[1] or "" for word in re.finditer(r"`([^`]+)`?|without", rest)] or [""]
    numbers = [READERS[row["unit"]](read(plan, variant)) for variant in variants]
    cell = " / ".join(f"{number:,.0f}" if number >= 100 else f"{number:.3g}" for number in numbers)
    text = f"| {row['claim']} | {row['unit']} | {row['formula']} | {cell} | {row['build']} |"
    print(text, flush=True)
    return text


if __name__ == "__main__":
    PAGE.write_text(ROW.sub(measured, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
