"""``parc build``: a plan's build directory, with every check of the build, and a short report."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from parc.cli.plan_arguments import add_defines, default_out, plan_at
from parc.cli.refusal import show_refusal
from parc.cli.terminal import print_json, say, show, stages, text_table
from parc.grammar.syntax import size_text


def build_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", type=Path)
    parser.add_argument("-o", dest="out", metavar="DIR", type=Path, help="default: <plan>.parc.build here")
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    parser.add_argument(
        "--uncertified",
        action="store_true",
        help="also write a large build that is not certified",
    )
    add_defines(parser)


def build_command(args: argparse.Namespace) -> int:
    """Build, and print what was built."""
    out = args.out or default_out(args.plan)
    outcome = build_plan(args, args.plan, out)
    if isinstance(outcome, int):
        return outcome
    report, seconds = outcome
    if args.json:
        print_json({**report, "seconds": seconds})
    else:
        say(report_text(report))
        import torch

        from parc.runtime.observe.observer import peak_bytes

        parts = ", ".join(f"{name} {taken:.1f}" for name, taken in seconds.items())
        memory = size_text(peak_bytes(torch.device("cpu")))
        say(f"{'seconds':13}{sum(seconds.values()):.1f} ({parts}), {memory} of memory")
        say(f"built {out}")
    return 0


def build_plan(args: argparse.Namespace, plan: Path, out: Path) -> tuple[dict[str, Any], dict[str, float]] | int:
    """Build a plan into ``out``. Return the report and the seconds of each part, or the exit code of a refused
    build."""
    start = time.perf_counter()
    plan_at(args, plan)
    with stages() as progress:
        progress("loading torch")
        from parc.build import Refused, build

        imported = round(time.perf_counter() - start, 3)
        try:
            uncertified = getattr(args, "uncertified", False)  # other commands build too
            compiled, checked = build(plan, out, dict(args.defines), progress, uncertified=uncertified)
        except Refused as refused:
            return show_refusal(refused.checked.faults)
    show(checked.warnings)
    seconds = {"import": imported, **compiled.seconds, "checks": checked.seconds}
    seconds["emit"] = round(time.perf_counter() - start - sum(seconds.values()), 3)
    return checked.report, seconds


def report_text(report: Mapping[str, Any]) -> str:
    """Return a build's report for a reader."""
    from parc.report_words import across_table, across_text, check_texts, fact_rows, stage_rows, under, unit_of

    rows = fact_rows(report)
    if stages := stage_rows(report):
        rows += under("stages", text_table(stages[1:], stages[0], right=(2, 3, 4, 5)).splitlines())
    if report["communication"]:
        rows += under("collectives", communication_text(report["communication"], unit_of(report)).splitlines())
    rows += under("across nodes", filter(None, [across_text(report)]))
    if across := across_table(report):
        rows += under("", text_table(across[1:], across[0], right=(2, 3)).splitlines())
    rows += under("checks", check_texts(report))
    return "\n".join(f"{name:13}{text}" for name, text in rows)


def communication_text(entries: Collection[Mapping[str, Any]], unit: str = "step") -> str:
    """Return the table of a rank's collectives in one step, or another ``unit``, by phase, axis and operator. Of
    several roles each row names the one that sends most of it."""
    from parc.report_words import traffic_rows

    several = len({entry["role"] for entry in entries}) > 1
    rows = [(*key, sent.count, sent.messages, size_text(sent.bytes), size_text(sent.hidden), *[role] * several)
            for *key, role, sent in traffic_rows(entries)]  # fmt: skip
    head = ["axis", "phase", "collective", "of", f"tensors a {unit}", "messages", "sent by a rank", "beside work"]
    return text_table(rows, head + ["most by"] * several, right=(4, 5, 6, 7))
