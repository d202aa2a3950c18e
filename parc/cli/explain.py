"""``parc explain``: an error code; or a line, a message, a module or the memory of a build, with its cause and cost."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parc.cli.plan_arguments import is_plan
from parc.cli.terminal import print_json, say, stages, text_table
from parc.grammar.codes import code_pages
from parc.grammar.nearest import did_you_mean

if TYPE_CHECKING:
    from parc.explaining.explain import Explanation
    from parc.explaining.sides import Side
    from parc.page.facts import PlanLine


def explain_options(parser: argparse.ArgumentParser) -> None:
    of = "a code as in error[P0107], of which all are listed without it; or a build, or a plan"
    parser.add_argument("of", metavar="CODE|BUILD|PLAN", nargs="?", help=of)
    what = "of a build: line:18 or FILE:18, no:3 or ROLE:no:3, a module, memory, time"
    parser.add_argument("what", metavar="WHAT", nargs="?", help=what)
    without = "of a line: compile the plan without it, and say what moves"
    parser.add_argument("--without", action="store_true", help=without)
    imports = "with --without: import the build's model, which is code"
    parser.add_argument("--import-model", action="store_true", help=imports)
    parser.add_argument("--cluster", metavar="C", help="seconds on a cluster by name, or the path of a file")
    parser.add_argument("--json", action="store_true", help="of a build: the facts as JSON on stdout")


def explain_command(args: argparse.Namespace) -> int:
    """Print the explanation."""
    if args.what is not None:
        return _explain_build(args, Path(args.of))
    if args.of is None:
        print("\n".join(f"{name}  {page.title}" for name, page in code_pages().items()))
        return 0
    name = args.of.strip("[]").upper()
    if (number := name.removeprefix("P")).isdecimal():
        name = f"P{number.lstrip('0').zfill(4)}"
    if name in code_pages():
        print(code_pages()[name].text, end="")
        return 0
    if Path(args.of).exists():
        say(f"parc explain {args.of}: say what, as `line:18`, `no:3`, `memory`, `time`, or a module")
        return 2
    hint = did_you_mean(name, list(code_pages()), "`parc explain` lists all")
    say(f"there is no code `{args.of}`; {hint}")
    return 1


def _explain_build(args: argparse.Namespace, path: Path) -> int:
    from parc.cli.diff import side_at
    from parc.explaining.explain import Explainer, UnknownWhat

    side = side_at(path, {}, args.cluster)
    explainer = Explainer(side)
    try:
        explanation = explainer.explain(args.what)
        if args.without:
            return _show_without(args, side, explainer.lines_of(args.what))
    except UnknownWhat as unknown:
        say(f"parc explain: {unknown}")
        say(f"help: {unknown.help}")
        return 1
    print_explanation(explanation, args.what, args.json)
    return 0


def print_explanation(found: Explanation, what: str, as_json: bool) -> None:
    """Print an explanation as words, or as JSON."""
    if as_json:
        print_json({"what": what, "title": found.title, "says": [list(row) for row in found.rows], **found.facts})
        return
    width = max((len(name) for name, _ in found.rows), default=0) + 2
    print(found.title)
    print("\n".join(f"  {name:{width}}{text}" for name, text in found.rows))
    if found.table:
        print("\n" + text_table(found.table, found.head, right=found.right))


def _show_without(args: argparse.Namespace, side: Side, lines: Sequence[PlanLine]) -> int:
    """Print what moves in a plan without some of its lines."""
    if not (args.import_model or is_plan(Path(args.of))):
        target = side.facts.build.manifest["model"]["callable"]
        say(f"parc explain: `--without` compiles the build's plan, which imports its model, `{target}`")
        say(f"help: parc explain {args.of} {args.what} --without --import-model")
        return 2
    from parc.cli.diff import print_comparison
    from parc.explaining.differences import compare_sides
    from parc.explaining.sides import on_cluster, with_and_without

    with stages() as progress:
        left, right = (on_cluster(one, args.cluster) for one in with_and_without(side, lines, progress))
    print_comparison(compare_sides(left, right), args.json)
    return 0
