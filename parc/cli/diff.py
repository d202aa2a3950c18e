"""``parc diff``: what moved between two builds or plans: placements, messages and memory, by line of the plan."""

from __future__ import annotations

import argparse
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
    parser.add_argument("--json", action="store_true", help="the same as JSON on stdout")
    add_defines(parser)


def diff_command(args: argparse.Namespace) -> int:
    """Print what moved from A to B."""
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


def side_at(path: Path, defines: dict[str, str], cluster: str | None) -> Side:
    """Read a build, or compile a plan without checks; priced on a cluster, or on that of its plan."""
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
