"""Every family under every plan: whether the build is verified, the messages that it sends, and its error beside the
plain model.

Prints a table, and writes it to ``benchmarks/families.md``.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.command import Table, command
from benchmarks.turns import ROOT
from parc.advice import warnings_of
from parc.checking.checks import Checked, check_build
from parc.compiler.plan.plan import read_plan
from parc.compiling.driver import compile_plan
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from parc.grammar.syntax import size_text
from tests.family_plans import MODELS, plan_text
from tests.layouts import strided_after_a_step

OUT = Path(__file__).with_suffix(".md")
PLANS = ((2, 1), (1, 2), (2, 2), (1, 4))
COLUMNS = ("family", "plan", "verified", "collectives a step", "bytes a rank a step", "loss", "gradients", "parameters")
ABOUT = """# Families under plans

Written by `make families`: the tiny models of `tests/family_models.py` (two layers, four heads, two heads of keys and
values; batch 8 in 2 microbatches, float32) under the plans that parc ships. *Verified* is every check of a build, its
certificate too, and that all tensors of all ranks lie in memory as their types say; gathers are those that no line
asked for. Collectives and bytes are those of a step. The errors are the largest relative ones of three steps of all
ranks in float64 against the captured model.

"""


def row(name: str, dp: int, tp: int) -> tuple[str, ...]:
    """Return one family under one plan, as the table's cells."""
    title = " x ".join(f"{axis}={size}" for axis, size in (("dp", dp), ("tp", tp)) if size > 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transformers, about its own future
            plan = read_plan(Source("family.parc", plan_text(name)), {"dp": str(dp), "tp": str(tp)})
            compiled = compile_plan(plan, ROOT)
            checked = check_build(compiled)
    except PlanError as refused:
        (first, *_) = refused.diagnostics
        return name, title, f"no: {first.code.name} {first.message}", "", "", "", "", ""
    if checked.faults:
        return name, title, f"no: {checked.faults[0]}", "", "", "", "", ""
    if missing := checked.certificate.missing:
        return name, title, f"no: not certified: {missing}", "", "", "", "", ""
    if wrong := strided_after_a_step(compiled):
        return name, title, f"no: {', '.join(wrong)} in another order than its type's", "", "", "", "", ""
    gathers = len([w for w in warnings_of(compiled) if w.message.startswith(("all_gather", "all_to_all"))])
    verified = f"yes, {gathers} gather{'s' * (gathers > 1)}" if gathers else "yes"
    return name, title, verified, *_sent(checked.report), *_errors(checked)


def _sent(report: dict[str, Any]) -> tuple[str, str]:
    """Return the number of collectives by kind, and their bytes."""
    rows = report["communication"]
    kinds: Counter[str] = Counter()
    for each in rows:
        kinds[each["op"].removeprefix("parc.")] += each["count_per_step"]
    total = sum(each["bytes"] * each["count_per_step"] for each in rows)
    return ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())), size_text(total)


def _errors(checked: Checked) -> Iterator[str]:
    """Return errors as bounds, because their last digits depend on the machine."""
    for kind in ("loss", "gradient", "parameter"):
        error = checked.report["numbers"][kind]
        yield next((f"< 1e-{digits}" for digits in (12, 10, 8, 6) if error < 10.0**-digits), f"{error:.0e}")


def main() -> None:
    """Build them all, print the table and write it."""
    table = Table(*COLUMNS)
    for name in MODELS:
        for dp, tp in PLANS:
            table.row(*row(name, dp, tp))
    OUT.write_text(ABOUT + "\n".join(table.lines) + "\n")


if __name__ == "__main__":
    command(main)
