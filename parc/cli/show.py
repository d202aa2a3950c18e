"""``parc show``: the contents of a build, as tables, as JSON, or one program as text; or its plan in primitives."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from parc.cli.plan_arguments import add_defines, is_plan, plan_at, plan_or_example, positive_number, work_costs
from parc.cli.terminal import print_json, say, stages, text_table
from parc.compiler.build.output_files import FileKind, check_file, write_whole
from parc.compiler.program.actions import FORWARD
from parc.grammar.bounded import real_path
from parc.grammar.scratch import scratch
from parc.grammar.syntax import size_text
from parc.report_words import in_words

if TYPE_CHECKING:
    from parc.compiler.build.build import Build
    from parc.compiler.clock.cluster import Cluster
    from parc.compiler.plan.plan import Plan
    from parc.compiler.program.roles import Role

_LONGEST = 120
"""The characters of a role's actions above which they are not listed, unless all are asked for."""

_PAGE = FileKind(
    "a page of parc's", re.compile(rb'(?s)\s*<!DOCTYPE html>.{,400}<meta name="generator" content="parc">')
)
_PICTURE = FileKind("a picture of parc's", re.compile(rb'<svg [^>]*>\n<rect class="ground" width="100%" height="100%"'))


def show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="DIR|PLAN", type=Path, help="a build, or a plan that is built for this alone")
    parser.add_argument("--role", metavar="R", help="show a role's programs as text, e.g. stage0")
    parser.add_argument("--action", metavar=FORWARD, help="one action's program, such as SCALE, F, B or REDUCE")
    parser.add_argument(
        "--evaluation", action="store_true", help="with --role or --action: of the programs that evaluate the model"
    )
    parser.add_argument(
        "--list", action="store_true", help="the modules that a plan's lines can name, with their weights"
    )
    parser.add_argument(
        "--expand", action="store_true", help="the plan with every placement as `shard` or `replicate` of names"
    )
    parser.add_argument(
        "--import-model", action="store_true", help="with --expand of a build: import its model, which is code"
    )
    parser.add_argument("--pipeline", action="store_true", help="the timeline of a step: who does what when")
    parser.add_argument(
        "--costs", metavar="F=4,I=5,W=3[,B=8]", type=work_costs,
        help="with --pipeline: the time of one action of each kind of work, of any stage; B is I + W if not given",
    )  # fmt: skip
    parser.add_argument("--svg", metavar="FILE", type=Path, help="with --pipeline: draw it into a file")
    parser.add_argument("--time", action="store_true", help="the time of a step on a cluster, and where it goes")
    parser.add_argument("--cluster", metavar="C", help="with --time or --html: a cluster by name, or a file's path")
    parser.add_argument("--tokens", metavar="N", type=positive_number, help="with --time: days and GPU hours for them")
    parser.add_argument("--compile", action="store_true", help="with --time: as `parc run --compile` runs it")
    parser.add_argument("--html", metavar="FILE", type=Path, help="everything as one page for a browser")
    parser.add_argument("--all", action="store_true", help="every collective, action and program, none folded")
    parser.add_argument("--json", action="store_true", help="everything as JSON on stdout")
    add_defines(parser)


def show_command(args: argparse.Namespace) -> int:
    """Print tables of parameters, communication and programs, or the text of programs."""
    if args.defines and not is_plan(args.target):
        say("parc show: -D is for plans; a build has its values already")
        return 2
    if args.expand:
        return _print_expanded(args)
    if not args.time and (args.tokens or args.compile or (args.cluster and not args.html)):
        say("parc show: `--cluster`, `--tokens` and `--compile` are for `--time`; `--cluster` is for `--html` too")
        return 2
    if args.costs and not (args.pipeline or args.svg):
        say("parc show: `--costs` is for `--pipeline`")
        return 2
    if not is_plan(args.target):
        return _show_build(args, args.target)
    if args.list:
        plan_or_example(args, args.target)
    if args.time:  # what is wrong with the cluster is said before the plan is built
        _cluster_of(args, plan_at(args, args.target), real_path(args.target).parent)
    with scratch("show") as folder:
        from parc.cli.build import build_plan

        outcome = build_plan(args, args.target, folder / "build")
        return outcome if isinstance(outcome, int) else _show_build(args, folder / "build")


def _print_expanded(args: argparse.Namespace) -> int:
    """Print a plan, or that of a build, in primitives."""
    if is_plan(args.target):
        path, folder = args.target, real_path(args.target).parent
        plan = plan_at(args, path)
    else:
        from parc.compiler.build.directory import read_build

        build = read_build(args.target, custom="named")
        if not args.import_model:
            target = build.manifest["model"]["callable"]
            say(f"parc show: `--expand` compiles the build's plan, which imports its model, `{target}`")
            say(f"help: parc show {args.target} --expand --import-model")
            return 2
        plan, folder = plan_at(args, args.target / "plan.parc"), build.folder
    with stages() as progress:
        progress("loading torch")
        from parc.compiling.driver import compile_plan
        from parc.desugar import desugar

        text = desugar(compile_plan(plan, folder, progress=progress))
    print(text, end="")
    return 0


def _show_build(args: argparse.Namespace, path: Path) -> int:
    from parc.compiler.build.directory import read_build
    from parc.tables import folded_programs, group_rows, module_rows, parameter_rows, parameter_table, program_table

    build = read_build(path, custom="named")
    if moved := build.moved():
        say(f"note: {moved}")
    if args.time:
        return _show_time(args, build)
    if args.html:
        return _write_page(args, build)
    if args.role or args.action:
        if args.evaluation:
            from parc.runtime.session.evaluation import evaluation_of

            build = evaluation_of(build)
        return _show_programs(args, build)
    if args.list:
        print(text_table(module_rows(build), ("module", "", "weights"), right=(1,)))
        return 0
    if args.pipeline or args.svg:
        return _show_timeline(args, build)
    axes = dict(build.programs[FORWARD].mesh.declared.axes)  # in their order, which JSON's sorted keys have lost
    report = {**build.report, "mesh": axes}
    parameters = parameter_table(build)
    programs = program_table(build)
    if args.json:
        actions = {name: [str(action) for action in role.actions] for name, role in build.roles.items()}
        print_json({**report, "parameter_table": parameters, "programs": programs, "actions": actions})
        return 0
    from parc.cli.build import report_text

    print(report_text(report))
    for name, role in build.roles.items():
        print(f"{'actions':13}{name}: {_actions_text(role, args.all)}")
    print()
    head = ("parameters", "", "type", "placement", "plan line", "a rank")
    print(text_table(parameter_rows(parameters, build.report.get("placed", {})), head, right=(1, 5)) + "\n")
    split = [kind for row in parameters for kind in row["placement"].values() if kind not in ("I", "R")]
    print("".join(f"{sentence}\n" for sentence in in_words(split)))
    if groups := group_rows(build):
        print(text_table(groups, ("optimizer groups", "parameters", ""), right=(1,)) + "\n")
    print((_every_collective(build) if args.all else _collectives(build)) + "\n")
    keys = ("role", "action", "file", "lines", "collectives")
    lines = [tuple(program[key] for key in keys) for program in programs] if args.all else folded_programs(programs)
    print(text_table(lines, ("role", "action", "program", "lines", "collectives"), right=(3, 4)))
    return 0


def _cluster_of(args: argparse.Namespace, plan: Plan, folder: Path) -> Cluster:
    """Return the cluster of the command line, or of the plan.

    Raises:
        ClusterError: there is none, or its file is wrong.
    """
    from parc.compiler.clock.cluster import ClusterError
    from parc.step_time import NO_CLUSTER, cluster_of

    if (cluster := cluster_of(plan, folder, args.cluster)) is None:
        raise ClusterError("`--time` needs a cluster", NO_CLUSTER)
    return cluster


def _show_time(args: argparse.Namespace, build: Build) -> int:
    """Print the time of a step on a cluster, the waits, and the most expensive lines of the plan."""
    from parc.compiler.clock.lines import Habits
    from parc.report import plan_of
    from parc.step_time import memory_words, plan_line_rows, price, step_json, time_rows

    plan = plan_of(build)
    step = price(build, plan, _cluster_of(args, plan, build.folder), Habits(compiled=args.compile))
    if args.json:
        print_json(step_json(step, args.tokens))
        return 0
    for name, text in time_rows(step, args.tokens):
        print(f"{name:13}{text}")
    written = zip(build.texts["plan.parc"].splitlines(), build.report["written"], strict=True)
    texts = {one["line"]: " ".join(text.split()) for text, one in written}
    print("\n" + text_table(plan_line_rows(step, texts), ("plan line", "time", "", ""), right=(0, 1, 2)))
    for text in memory_words(step):
        say(f"note: {text}")
    return 0


def _write_page(args: argparse.Namespace, build: Build) -> int:
    """Write the page of a build, with times if the command or the plan names a cluster."""
    from parc.page.page import page_of
    from parc.report import plan_of
    from parc.runtime.ranks.faults import writing
    from parc.step_time import cluster_of, price

    file: Path = args.html
    with writing(file):
        check_file(file, _PAGE)
    plan = plan_of(build)
    cluster = cluster_of(plan, build.folder, args.cluster)
    text = page_of(build, None if cluster is None else price(build, plan, cluster))
    with writing(file):
        write_whole(file, text)
    say(f"wrote {file} ({size_text(len(text.encode()))})")
    return 0


def _show_timeline(args: argparse.Namespace, build: Build) -> int:
    """Print or draw the timeline of a step: each box is as long as its floating-point operations, or its costs."""
    from rich.console import Console

    from parc.compiler.schedules.timeline import draw, paint, peak_live, svg, time_slot
    from parc.page.facts import timeline_of, waits_of
    from parc.report_words import floor_words, schedule_words
    from parc.runtime.ranks.faults import writing

    timeline = timeline_of(build, args.costs)
    share = {role: timeline.idle_share(role) for role in timeline.spans}
    title = schedule_words({**build.report, "idle": share})
    if args.svg:
        with writing(args.svg):
            check_file(args.svg, _PICTURE)
            write_whole(args.svg, svg(timeline, title, "" if args.costs else "%"))
        axis = build.report["pipeline"].get("axis", "")
        ranks = f", on {build.programs[FORWARD].mesh.size(axis)} ranks of `{axis}`" if axis else ""
        say(f"drew {args.svg}: {title}{ranks}")
        return 0
    if args.json:
        roles = {role: [{"action": str(span.action), "start": span.start, "end": span.end} for span in spans]
                 for role, spans in timeline.spans.items()}  # fmt: skip
        print_json({
            **build.report["pipeline"], "flops": timeline_of(build).makespan, "makespan": timeline.makespan,
            "idle": {role: timeline.idle(role) for role in roles} if args.costs else share, "idle_share": share,
            "floor": timeline.floor, "waits": waits_of(build), "roles": roles,
            "live": {role: peak_live([span.action for span in spans]) for role, spans in timeline.spans.items()},
        })  # fmt: skip
        return 0
    console = Console(highlight=False, soft_wrap=True)
    costs = ", ".join(f"{kind}={cost:g}" for kind, cost in (args.costs or {}).items())
    print(f"{title}; boxes are as long as their {f'costs, {costs}' if costs else 'work'}")
    if console.is_terminal:
        console.print(paint(timeline, time_slot(timeline), width=console.width), end="")
    else:
        print(draw(timeline, time_slot(timeline)))
    if len(timeline.spans) > 1:
        print(floor_words(timeline, in_percent=not costs))
        print("".join(f"{sentence}\n" for sentence in waits_of(build)), end="")
    return 0


def _show_programs(args: argparse.Namespace, build: Build) -> int:
    mine = build.roles[args.role].programs.values() if args.role in build.roles else build.files()
    of_role = [p for p in mine if args.role in build.roles or args.role in (None, p.role)]
    chosen = [program for program in of_role if args.action in (None, program.action)]
    if not chosen:
        known = ", ".join(f"{program.role} {program.action}" for program in build.files())
        roles = f"; roles are {', '.join(build.roles)}" if len(build.roles) > 1 else ""
        say(f"parc show: no such program; there are {known}{roles}")
        return 2
    print("\n\n".join(build.text(program).rstrip("\n") for program in chosen))
    return 0


def _actions_text(role: Role, all_of_them: bool) -> str:
    """Return a role's actions in order, or where to see them if they are many."""
    text = " ".join(map(str, role.actions))
    if all_of_them or len(text) <= _LONGEST:
        return text
    return f"{len(role.actions)}; `--pipeline` draws them, `--all` lists them"


def _collectives(build: Build) -> str:
    """Return the table of a step's collectives; equal ones of folded modules, and of several roles, share a row."""
    from parc.page.facts import PageFacts
    from parc.report_words import modules_text, unit_of

    facts, several = PageFacts(build), len(build.roles) > 1
    rows = [
        (f"{one.entry['role']}:{one.entry['number']}" if several else one.entry["number"], one.entry["op"],
         one.entry["axis"], one.entry["phase"], one.sent.count, size_text(one.sent.bytes),
         one.entry["dtype"], one.entry["carries"], "hidden" if one.entry["hidden"] else "exposed",
         modules_text(one.modules) or "-", one.entry["line"] or "-")
        for one in facts.messages
    ]  # fmt: skip
    unit = f"tensors a {unit_of(build.report)}"
    head = ["no.", "collective", "axis", "phase", unit, "sent by a rank", "dtype", "of", "time", "module", "plan line"]
    return text_table(rows, head, right=[0, 4, 5, 10])


def _every_collective(build: Build) -> str:
    """Return the table of every collective of every role."""
    from parc.report_words import unit_of

    entries, several = build.report.get("communication", ()), len(build.roles) > 1
    rows = [
        (*[e["role"]] * several, e["number"], e["message"], e["op"], e["axis"], e["phase"], e["count_per_step"],
         size_text(e["wire_bytes"]), e["dtype"], e["carries"], "hidden" if e["hidden"] else "exposed",
         e["module"] or "-", e["line"] or "-")
        for e in entries
    ]  # fmt: skip
    unit = f"a {unit_of(build.report)}"
    head = ["no.", "message", "collective", "axis", "phase", unit, "sent each time", "dtype", "of", "time", "module",
            "plan line"]  # fmt: skip
    return text_table(rows, ["role"] * several + head, right=[at + several for at in (0, 1, 5, 6, 11)])
