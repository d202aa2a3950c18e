"""``parc build``: a plan's build directory, with every check of the build, and a short report."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from parc.cli.plan_arguments import add_defines, default_out, read
from parc.cli.refusal import show_refusal
from parc.cli.terminal import print_json, say, show, stages, text_table
from parc.grammar.syntax import size_text


def build_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", type=Path)
    parser.add_argument("-o", dest="out", metavar="DIR", type=Path, help="default: <plan>.parc.build here")
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    add_defines(parser)


def build_command(given: argparse.Namespace) -> int:
    """Build, and print what was built."""
    out = given.out or default_out(given.plan)
    outcome = make(given, given.plan, out)
    if isinstance(outcome, int):
        return outcome
    report, seconds = outcome
    if given.json:
        print_json({**report, "seconds": seconds})
    else:
        say(report_text(report))
        import torch

        from parc.runtime.launch.train import peak_bytes

        parts = ", ".join(f"{name} {taken:.1f}" for name, taken in seconds.items())
        memory = size_text(peak_bytes(torch.device("cpu")))
        say(f"{'seconds':13}{sum(seconds.values()):.1f} ({parts}), {memory} of memory")
        say(f"built {out}")
    return 0


def make(given: argparse.Namespace, plan: Path, out: Path) -> tuple[dict[str, Any], dict[str, float]] | int:
    """Return the report and the seconds of a build, or the exit code of one that was refused."""
    start = time.perf_counter()
    read(given, plan)
    with stages() as progress:
        progress("loading torch")
        from parc.build import Refused, build

        imported = round(time.perf_counter() - start, 3)
        try:
            compiled, checked = build(plan, out, dict(given.defines), progress)
        except Refused as refused:
            return show_refusal(refused.checked.faults)
    show(checked.warnings)
    seconds = {"import": imported, **compiled.seconds, "checks": checked.seconds}
    seconds["emit"] = round(time.perf_counter() - start - sum(seconds.values()), 3)
    return checked.report, seconds


def _view_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows of other axes that parts of the model see."""
    for view in report.get("views", ()):
        axes = ", ".join(f"{axis}={size}" for axis, size in zip(view["axes"], view["sizes"], strict=True))
        yield "", f"{', '.join(view['over'])} as {axes} in {', '.join(view['in'])}"


def report_text(report: Mapping[str, Any]) -> str:
    """Return a build's report for a reader."""
    from parc.compiler.program.cost import MEMORY_KINDS
    from parc.compiler.sizes.template import sizes_text

    mesh = ", ".join(f"{axis}={size}" for axis, size in report["mesh"].items()) or "one rank"
    rows = [("mesh", f"{mesh} ({report['world']} rank{'s' * (report['world'] != 1)})"), *_view_rows(report),
            ("roles", ", ".join(report["roles"])), ("parameters", f"{report['parameters']:,}")]  # fmt: skip
    if any(".." in size for size in report["sizes"].values()):
        rows.append(("sizes", f"{sizes_text(report['sizes'])}; bytes are those of the largest"))
    for entry in report["memory"]:
        held = ", ".join(f"{k} {size_text(entry[k])}" for k in MEMORY_KINDS if entry[k] or k in MEMORY_KINDS[:4])
        rows.append(("memory", f"{entry['role']}: peak {size_text(entry['peak_bytes'])} a rank ({held})"))
        if away := entry["offloaded"]:
            rows.append(("", "beside it " + ", ".join(f"{word} {size_text(size)}" for word, size in away.items())))
    rows += [("experts" if at == 0 else "", text) for at, text in enumerate(_expert_texts(report))]
    rows += [("made again" if at == 0 else "", text) for at, text in enumerate(_again_texts(report.get("recompute")))]
    rows += [("a parameter" if at == 0 else "", text) for at, text in enumerate(_state_texts(report["memory"]))]
    rows += [("padding" if at == 0 else "", text) for at, text in enumerate(_padding_texts(report["padding"]))]
    if whole := report["stored_whole"]:
        names = f"{len(whole)} parameter{'s' * (len(whole) != 1)}"
        rows.append(("stored whole", f"{names}, {size_text(sum(whole.values()))}: no dim divides without much padding"))
    pipeline = report["pipeline"]
    rows.append(("schedule", schedule_words(pipeline)))
    for entry in report["numerics"]:
        saved = f", at most {size_text(entry['saved_bytes'])} less a step from a rank" if "saved_bytes" in entry else ""
        rows.append(("rounds", f"{entry['directive']} (line {entry['line']}{saved})"))
    if sent := report["sent_whole"]:
        names = f"{len(sent)} gradient{'s' * (len(sent) != 1)}"
        rows.append(
            (
                "not rounded",
                f"{names}, {size_text(sum(sent.values()))}: no dim divides, or of another type or several stages",
            )
        )
    lines = [f"{name:13}{text}" for name, text in rows]
    if report["communication"]:
        text = communication_text(report["communication"])
        lines += [f"{'' if at else 'collectives':13}{line}" for at, line in enumerate(text.splitlines())]
    if across := report.get("across_nodes"):
        saved = across["in_one_level"] - across["bytes"]
        less = f", {size_text(saved)} less than in one level" if saved else ""
        lines.append(f"{'across nodes':13}at most {size_text(across['bytes'])} a step from one rank{less}")
    checks = ", ".join(f"{name} {how}" for name, how in report["checks"].items())
    lines.append(f"{'checks':13}{checks}")
    if "numbers" in report:
        numbers = report["numbers"]
        worst = max(numbers[kind] for kind in ("loss", "gradient", "parameter"))
        lines.append(f"{'':13}numbers: {numbers['steps']} steps of all ranks on {numbers['on']}, "
                     f"largest relative error {worst:.1e} (at most {numbers['tolerance']:.0e})")  # fmt: skip
        if margin := numbers.get("margin"):
            lines.append(f"{'':13}top-k: the closest scores that it tells apart differ by {margin['apart']:.1e} of the "
                         f"largest, in {margin['at']}")  # fmt: skip
    return "\n".join(lines)


def _state_texts(entries: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Return lines about the bytes of a rank's training state for each parameter that its role has; roles that are
    alike share a line."""
    alike: dict[str, list[str]] = {}
    for entry in (entry for entry in entries if entry["of"]):
        parts = {word: size / entry["of"] for word, size in entry["state"].items() if size}
        words = ", ".join(f"{word} {share:.4g}" for word, share in parts.items())
        text = f"{sum(parts.values()):.4g} bytes of state a rank ({words}), {sum(entry['state'].values()):,} in all"
        alike.setdefault(text, []).append(entry["role"])
    return [text if len(alike) == 1 else f"{', '.join(roles)}: {text}" for text, roles in alike.items()]


def _again_texts(chosen: Mapping[str, Any] | None) -> Iterable[str]:
    """Return lines about the blocks that a line has chosen to make again, and what that costs; roles that are alike
    share a line."""
    alike: dict[str, list[str]] = {}
    for row in chosen["roles"] if chosen is not None else ():
        blocks = row["kept"] + row["selective"] + row["full"]
        words = [f"{row[key]} {what}" for key, what in (("full", "in full"), ("selective", "but for products"))
                 if row[key]]  # fmt: skip
        cost = f", {row['again']:+.1%} of a step's multiply-adds" if words else ""
        text = f"{' and '.join(words) or 'none'} of {blocks} block{'s' * (blocks != 1)}{cost}"
        if (more := row["next_peak_bytes"]) is not None:
            text += f"; with less, a rank would need {size_text(more)}"
        alike.setdefault(text, []).append(row["role"])
    for text, roles in alike.items():
        yield text if len(alike) == 1 else f"{', '.join(roles)}: {text}"
    if chosen is not None:
        yield f"so that a rank needs at most {size_text(chosen['fit'])} (line {chosen['line']})"


def _expert_texts(report: Mapping[str, Any]) -> Iterable[str]:
    """Return lines about layers of experts: how many a rank has, and what their loads do to its memory."""
    for row in report.get("experts", ()):
        each = f", {row['experts'] // row['ranks']} a rank" if row["ranks"] > 1 else ""
        moved = f"; {row['rate']:g} a step moves the router's bias, beyond the model's own code" if row["rate"] else ""
        if row["capacity"] is not None:
            moved += f"; capacity {row['capacity']:g} leaves out tokens that come late, beyond the model's own code"
        layers = f"{row['layers']} layer{'s' * (row['layers'] != 1)}"
        yield f"{row['modules']}: {layers} of {row['experts']}{each}, {row['top']} a token{moved}"
    split = [row for row in report.get("experts", ()) if row["ranks"] > 1 and row["capacity"] is None]
    if split:
        load = max(row["load"] for row in split)
        most = size_text(report["experts_peak_bytes"])
        yield f"memory is that of a rank with {load:g} times the mean of their rows, and {most} with all that can come"


def schedule_words(pipeline: Mapping[str, Any]) -> str:
    """Return the schedule in words."""
    count, stages = pipeline["microbatches"], pipeline.get("stages", 1)
    words = f"{pipeline['schedule']}, {count} microbatch{'es' * (count != 1)}"
    return words if stages == 1 else f"{words}, {stages} stages, {pipeline['bubble']:.0%} idle"


def _padding_texts(entries: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Return lines about values that are longer than in the model. Alike values of numbered modules share a line."""
    alike: dict[str, int] = {}
    for entry in entries:
        name = ".".join("*" if word.isdigit() else word for word in entry["value"].split("."))
        line = f", line {entry['line']}" if entry["line"] else ""
        text = f"{name}: dim {entry['dim']} of {entry['from']:,} entries to {entry['to']:,}{line}"
        alike[text] = alike.get(text, 0) + 1
    return [text + (f" (x{count})" if count > 1 else "") for text, count in alike.items()]


def communication_text(entries: Iterable[Mapping[str, Any]]) -> str:
    """Return the collectives of one rank in one step, by phase, axis and operator; of several roles the one that sends
    most."""
    from parc.compiler.program.actions import PHASES

    sums: dict[tuple[str, str, str, str], dict[str, list[int]]] = {}
    axes: dict[str, int] = {}
    for entry in entries:
        axes.setdefault(entry["axis"], len(axes))
        roles = sums.setdefault((entry["axis"], entry["phase"], entry["op"], entry["carries"]), {})
        total = roles.setdefault(entry["role"], [0, 0, 0])
        total[0] += entry["count_per_step"]
        total[1] += entry["count_per_step"] * entry["wire_bytes"]
        total[2] += entry["count_per_step"] * entry["wire_bytes"] * entry["hidden"]
    most = {key: max(roles.values(), key=lambda total: total[::-1]) for key, roles in sums.items()}
    order = sorted(most, key=lambda key: (PHASES.index(key[1]), axes[key[0]]))
    rows = [(*key, most[key][0], size_text(most[key][1]), size_text(most[key][2])) for key in order]
    head = ("axis", "phase", "collective", "of", "a step", "sent by a rank", "beside work")
    return text_table(rows, head, right=(4, 5, 6))
