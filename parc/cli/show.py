"""``parc show``: the contents of a build, as tables, as JSON, or one program as text; or its plan in primitives."""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parc.cli.plan_arguments import add_defines, is_plan, read
from parc.cli.terminal import print_json, say, stages, text_table
from parc.compiler.program.actions import FORWARD
from parc.compiler.program.blocks import starred
from parc.grammar.syntax import size_text
from parc.placement_words import in_words

if TYPE_CHECKING:
    from parc.compiler.build.build import Build


def show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="DIR|PLAN", type=Path, help="a build, or a plan that is built for this alone")
    parser.add_argument("--role", metavar="R", help="show a role's programs as text, e.g. stage0")
    parser.add_argument("--action", metavar=FORWARD, help="one action's program, such as SCALE, F, B or REDUCE")
    parser.add_argument(
        "--list", action="store_true", help="the modules that a plan's lines can name, with their weights"
    )
    parser.add_argument(
        "--expand", action="store_true", help="the plan with every placement as `shard` or `replicate` of names"
    )
    parser.add_argument("--pipeline", action="store_true", help="the timeline of a step: who does what when")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="with --pipeline: draw it into a file")
    parser.add_argument("--json", action="store_true", help="everything as JSON on stdout")
    add_defines(parser)


def show_command(given: argparse.Namespace) -> int:
    """Print tables of parameters, communication and programs, or the text of programs."""
    if given.defines and not is_plan(given.target):
        say("parc show: -D is for plans; a build has its values already")
        return 2
    if given.expand:
        return _expand(given)
    if not is_plan(given.target):
        return _show(given, given.target)
    with tempfile.TemporaryDirectory(prefix="parc-show-") as folder:
        from parc.cli.build import make

        outcome = make(given, given.target, Path(folder) / "build")
        return outcome if isinstance(outcome, int) else _show(given, Path(folder) / "build")


def _expand(given: argparse.Namespace) -> int:
    """Print the plan in primitives; a build's own plan if a build is named."""
    if is_plan(given.target):
        path, folder = given.target, given.target.resolve().parent
        plan = read(given, path)
    else:
        from parc.compiler.build.directory import read_build

        build = read_build(given.target)
        plan, folder = read(given, given.target / "plan.parc"), build.folder
    with stages() as progress:
        progress("loading torch")
        from parc.compiling.driver import compile_plan
        from parc.desugar import desugar

        text = desugar(compile_plan(plan, folder, progress=progress))
    print(text, end="")
    return 0


def _show(given: argparse.Namespace, path: Path) -> int:
    from parc.compiler.build.directory import read_build

    build = read_build(path)
    if moved := build.moved():
        say(f"note: {moved}")
    if given.role or given.action:
        return _show_programs(given, build)
    if given.list:
        print(text_table(_modules(build), ("module", "", "weights"), right=(1,)))
        return 0
    if given.pipeline or given.svg:
        return _show_timeline(given, build)
    report = {
        **build.report,
        "mesh": dict(build.programs[FORWARD].mesh.declared.axes),
    }  # JSON's sorted keys lost their order
    parameters = _parameters(build)
    programs = _programs(build)
    if given.json:
        actions = {name: [str(action) for action in role.actions] for name, role in build.roles.items()}
        print_json({**report, "parameter_table": parameters, "programs": programs, "actions": actions})
        return 0
    from parc.cli.build import report_text

    print(report_text(report))
    for name, role in build.roles.items():
        print(f"{'actions':13}{name}: {' '.join(map(str, role.actions))}")
    print()
    head = ("parameters", "", "type", "placement", "plan line", "a rank")
    print(text_table(_folded(parameters, build.report.get("placed", {})), head, right=(1, 5)) + "\n")
    split = [kind for row in parameters for kind in row["placement"].values() if kind not in ("I", "R")]
    print("".join(f"{sentence}\n" for sentence in in_words(split)))
    if groups := _groups(build):
        print(text_table(groups, ("optimizer groups", "parameters", ""), right=(1,)) + "\n")
    print(_communication(build) + "\n")
    lines = [(p["role"], p["action"], p["file"], p["lines"], p["collectives"]) for p in programs]
    print(text_table(lines, ("role", "action", "program", "lines", "collectives"), right=(3, 4)))
    return 0


def _show_timeline(given: argparse.Namespace, build: Build) -> int:
    """Print a step's work, played with equal stages whose backward takes twice as long as their forward."""
    from rich.console import Console

    from parc.cli.build import schedule_words
    from parc.compiler.build.build import BuildError
    from parc.compiler.schedules.drawing import draw, paint, svg
    from parc.compiler.schedules.timeline import simulate
    from parc.runtime.faults import writing

    try:
        timeline = simulate({name: role.actions for name, role in build.roles.items()})
    except ValueError as error:  # only a changed `schedule.txt` holds such an order
        raise BuildError(f"`{build.folder / 'schedule.txt'}`: {error}") from None
    title = schedule_words(build.report["pipeline"])
    if given.svg:
        with writing(given.svg):
            given.svg.write_text(svg(timeline, title, "slots"), encoding="utf-8")
        axis = build.report["pipeline"].get("axis", "")
        ranks = f", on {build.programs[FORWARD].mesh.size(axis)} ranks of `{axis}`" if axis else ""
        say(f"drew {given.svg}: {title}{ranks}")
        return 0
    if given.json:
        roles = {role: [{"action": str(span.action), "start": span.start, "end": span.end} for span in spans]
                 for role, spans in timeline.spans.items()}  # fmt: skip
        print_json({**build.report["pipeline"], "slots": timeline.makespan, "roles": roles})
        return 0
    console = Console(highlight=False, soft_wrap=True)
    print(f"{title}; a slot is a forward, a backward two")
    if console.is_terminal:
        console.print(paint(timeline, width=console.width), end="")
    else:
        print(draw(timeline))
    return 0


def _show_programs(given: argparse.Namespace, build: Build) -> int:
    mine = build.roles[given.role].programs.values() if given.role in build.roles else build.files()
    of_role = [p for p in mine if given.role in build.roles or given.role in (None, p.role)]
    chosen = [program for program in of_role if given.action in (None, program.action)]
    if not chosen:
        known = ", ".join(f"{program.role} {program.action}" for program in build.files())
        roles = f"; roles are {', '.join(build.roles)}" if len(build.roles) > 1 else ""
        say(f"parc show: no such program; there are {known}{roles}")
        return 2
    print("\n\n".join(build.text(program).rstrip("\n") for program in chosen))
    return 0


def _parameters(build: Build) -> list[dict[str, Any]]:
    """Print each parameter with its global shape, its placement, and the bytes that a rank holds of it."""
    from parc.compiler.layout.placement import parse_type
    from parc.report import plan_of, seen_from

    plan, rows = plan_of(build), []
    for name, text in build.manifest["parameters"].items():
        type_, mesh = parse_type(text, build.mesh), seen_from(name, plan, build.mesh)
        placement: dict[str, str] = {}
        for axis in mesh.joined(mesh.names):
            parts = mesh.parts(axis)
            whole = type_.placement.as_one(parts, mesh)
            kinds = (
                {axis: whole}
                if whole is not None
                else {name: type_.placement[part] for part in parts for name in mesh.joined((part,))}
            )
            placement |= {name: str(kind) for name, kind in kinds.items()}
        size = math.prod(type_.local(mesh)) * type_.dtype.itemsize
        rows.append(
            {
                "name": name,
                "type": type_.text(mesh),
                "shape": list(type_.shape),
                "placement": placement,
                "local_bytes": size,
            }
        )
    return rows


def _modules(build: Build) -> list[tuple[object, ...]]:
    """Return rows of a table of the model's modules. Alike numbered modules share a row, with their count."""
    weights: dict[str, list[str]] = {}
    for program in build.files():
        for module in (line.origin.module for function in program.functions for line in function.lines):
            if "*" not in module and module not in build.manifest["parameters"]:
                weights.setdefault(module, [])
    for name, text in build.manifest["parameters"].items():
        module, _, own = name.rpartition(".")
        weights.setdefault(module, []).append(f"{own} {text}")
    for module in list(weights):
        parts = module.split(".")
        for count in range(1, len(parts)):
            weights.setdefault(".".join(parts[:count]), [])
    rows: dict[tuple[str, ...], list[str]] = {}
    modules = sorted(filter(None, weights), key=natural)
    for module in modules:
        rows.setdefault((starred(module), ", ".join(weights[module])), []).append(module)
    return [(pattern_of(names, modules), f"x{len(names)}" if len(names) > 1 else "", text)
            for (_, text), names in rows.items()]  # fmt: skip


def _folded(parameters: list[dict[str, Any]], lines: dict[str, str]) -> list[tuple[object, ...]]:
    """Return rows of a table. Alike parameters of numbered modules share a row, with their count."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in parameters:
        key = starred(row["name"]), row["type"], _placement(row["placement"]), lines.get(row["name"], "-")
        groups.setdefault(key, []).append(row)
    every = [row["name"] for row in parameters]
    return [(pattern_of([row["name"] for row in rows], every), f"x{len(rows)}" if len(rows) > 1 else "", type_,
             placement, line, size_text(sum(row["local_bytes"] for row in rows)))
            for (_, type_, placement, line), rows in groups.items()]  # fmt: skip


def _groups(build: Build) -> list[tuple[object, ...]]:
    """Return rows of a table of the optimizer's groups: what is set for each, its parameters' number and patterns."""
    line, frozen = build.manifest["optimizer"], {*build.manifest["frozen"]}
    trained = [name for name in build.manifest["parameters"] if name not in frozen]
    rows: list[tuple[object, ...]] = []
    for group in line["groups"]:
        alike: dict[str, list[str]] = {}
        for name in sorted({*group["parameters"]} - frozen, key=natural):
            alike.setdefault(starred(name), []).append(name)
        given = ", ".join(f"{name} {value}" for name, value in group["set"].items())
        names = ", ".join(pattern_of(names, trained) for names in alike.values())
        rows.append((given, sum(map(len, alike.values())), names))
    own = len(trained) - sum(int(str(row[1])) for row in rows)
    return [(f"lr {line['lr']}, weight_decay {line['weight_decay']}", own, "all others"), *rows] if rows else []


def pattern_of(names: Sequence[str], every: Sequence[str]) -> str:
    """Return the pattern of names that differ only in numbers, as a line of a plan may have it. It is `blocks.*.up` if
    these are all of ``every`` that it means, else `stem.{0,3}`."""
    columns = [sorted(set(words), key=natural) for words in zip(*(name.split(".") for name in names), strict=True)]
    kept = [words[0] if len(words) == 1 else "*" for words in columns]
    means = re.compile(r"\.".join(r"\d+" if word == "*" else re.escape(word) for word in kept))
    if len(list(filter(means.fullmatch, every))) == len(names):
        return ".".join(kept)
    return ".".join(_any_of(words) for words in columns)


def _any_of(words: Sequence[str]) -> str:
    """Return the part of a pattern that means these words: `[0..3]`, `{0,2,5}`."""
    if len(words) > 2 and [int(word) for word in words] == list(range(int(words[0]), int(words[-1]) + 1)):
        return f"[{words[0]}..{words[-1]}]"
    return words[0] if len(words) == 1 else "{" + ",".join(words) + "}"


def natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts numbers in dotted names by their size."""
    return [(word.isdigit(), int(word) if word.isdigit() else 0, word) for word in name.split(".")]


def _placement(kinds: dict[str, str]) -> str:
    split = [f"{axis}: {kind}" for axis, kind in kinds.items() if kind not in ("I", "R")]
    return ", ".join(split) or "whole"


def _communication(build: Build) -> str:
    entries = build.report.get("communication", ())
    several = len(build.roles) > 1
    rows = [
        (*[e["role"]] * several, e["number"], e["op"], e["axis"], e["phase"], e["count_per_step"],
         size_text(e["bytes"]), e["dtype"], e["carries"], "hidden" if e["hidden"] else "exposed", e["module"] or "-",
         e["line"] or "-")
        for e in entries
    ]  # fmt: skip
    head = ["no.", "collective", "axis", "phase", "a step", "bytes", "dtype", "of", "time", "module", "plan line"]
    return text_table(rows, ["role"] * several + head, right=[at + several for at in (0, 4, 5, 10)])


def _programs(build: Build) -> list[dict[str, Any]]:
    from parc.compiler.layout.collectives import COLLECTIVES

    rows = []
    for program in build.files():
        lines = [line for function in program.functions for line in function.lines]
        communicating = sum(line.op in COLLECTIVES and COLLECTIVES[line.op].communicates for line in lines)
        file = f"programs/{program.role}.{program.action}.py"
        rows.append({"role": program.role, "action": program.action, "file": file, "lines": len(lines),
                     "collectives": communicating})  # fmt: skip
    return rows
