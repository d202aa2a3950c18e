"""``parc diff``: what moved between two builds or plans: placements, messages and memory, by line of the plan."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from parc.cli.plan_arguments import add_defines, is_plan
from parc.cli.terminal import print_json, say, stages, text_table

if TYPE_CHECKING:
    from parc.explaining.differences import Comparison
    from parc.explaining.sides import Side


def diff_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="BUILD", type=Path, help="a build, or a plan, which is compiled without checks")
    parser.add_argument("b", metavar="OTHER", type=Path, nargs="?", help="another one; without it the plan with the -D")
    parser.add_argument("--cluster", metavar="C", help="seconds on a cluster by name, or the path of a file")
    parser.add_argument(
        "--trace", metavar="FILE", type=Path,
        help="a trace of a run of the build: each action's and wait's measured time beside the predicted, by role",
    )  # fmt: skip
    parser.add_argument(
        "--profile", metavar="DIR", type=Path, help="a profile of a run of the build: the same by line of the plan"
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON on stdout")
    add_defines(parser)


def diff_command(args: argparse.Namespace) -> int:
    """Print what moved from A to B."""
    if args.trace is not None or args.profile is not None:
        return _show_measured(args)
    plans = [is_plan(path) for path in (args.a, args.b or args.a)]
    if args.b is None and not (plans[0] and args.defines):
        say(
            "parc diff: name two builds or plans; or one plan, and the other values of its `let` names as -D NAME=VALUE"
        )
        return 2
    if args.defines and not any(plans):
        say("parc diff: -D is for plans; a build has its values already")
        return 2
    defines = dict(args.defines)
    left = side_at(args.a, {} if args.b is None else defines, args.cluster)
    right = side_at(args.b or args.a, defines, args.cluster)
    from parc.explaining.differences import compare_sides

    print_comparison(compare_sides(left, right), args.json)
    return 0


def _show_measured(args: argparse.Namespace) -> int:
    """Print what a run measured beside what the clock predicts."""
    if args.b is not None or is_plan(args.a) or (args.trace is not None and args.profile is not None):
        say("parc diff: `--trace` and `--profile` each go with one build, the one that ran")
        return 2
    from parc.compiler.clock.cluster import ClusterError
    from parc.explaining.measured import LESS, ForeignFile, profile_rows, trace_rows
    from parc.step_time import NO_CLUSTER, seconds_text

    side = side_at(args.a, {}, args.cluster)
    if side.step is None:
        raise ClusterError("what is predicted depends on the cluster", NO_CLUSTER)
    try:
        rows = trace_rows(args.trace, side.step) if args.trace else profile_rows(args.profile, side.step)
    except ForeignFile as error:
        say(f"error: {error}")
        say(f"help: {error.help}")
        return 1
    if args.json:
        print_json({"cluster": side.step.cluster.name, "rows": [asdict(row) for row in rows]})
        return 0
    texts = {str(line.root): " ".join(line.text.split()) for line in side.facts.lines}
    table = [(row.role, row.name, row.kind, row.count, seconds_text(row.measured), seconds_text(row.predicted),
              f"{row.predicted / row.measured - 1:+.0%}" if row.measured and row.predicted else "",
              texts.get(row.name, "") if args.profile else "") for row in rows]  # fmt: skip
    head = ("role", "plan line" if args.profile else "action", "", "a step", "measured", "predicted", "error", "")
    print(text_table(table, head, right=(3, 4, 5, 6)))
    say(f"note: {LESS}")
    return 0


def side_at(path: Path, defines: dict[str, str], cluster: str | None) -> Side:
    """Read a build, or compile a plan without checks; priced on a cluster, or on that of its plan."""
    if cluster is not None:
        from parc.compiler.clock.cluster import find_cluster

        find_cluster(cluster)  # what is wrong with it is said before a plan is compiled
    if is_plan(path):
        with stages() as progress:
            progress("loading torch")
            from parc.explaining.sides import on_cluster, side_of_plan

            return on_cluster(side_of_plan(path, defines, progress), cluster)
    from parc.explaining.sides import on_cluster, side_of_build

    return on_cluster(side_of_build(path), cluster)


def print_comparison(found: Comparison, as_json: bool) -> None:
    """Print a difference as words, or as JSON."""
    from parc.explaining.differences import line_rows, number_rows, rewritten_rows, side_text

    if as_json:
        print_json(found.facts)
        return
    print("\n".join(f"{mark} {side_text(side)}" for mark, side in zip("-+", found.sides, strict=True)))
    print("".join(f"note: {note}\n" for note in found.notes))
    print(text_table(number_rows(found), ("a rank, in a step", "left", "right", "change"), right=(1, 2, 3)))
    if rows := rewritten_rows(found):
        print("\nthe plans differ:\n" + "\n".join(rows))
    moved = [one for one in found.lines if one.moves]
    for one in moved:
        print("\n" + "\n".join(line_rows(one)))
    if not moved:
        print("\nplacements and messages are the same")
