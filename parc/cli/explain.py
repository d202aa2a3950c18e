"""``parc explain``: an error code; or a line, a message, a module or the memory of a build, with its cause and cost."""

from __future__ import annotations

import argparse
from pathlib import Path

from parc.cli.terminal import print_json, say, text_table
from parc.grammar.codes import code_pages
from parc.grammar.nearest import did_you_mean


def explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("of", metavar="CODE|BUILD", nargs="?", help="a code as in error[P0107], of which all are listed "
                        "without it; or a build")  # fmt: skip
    parser.add_argument("what", metavar="WHAT", nargs="?", help="of a build: line:18 or FILE:18, no:3 or ROLE:no:3, "
                        "a module, memory")  # fmt: skip
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
        say(f"parc explain {args.of}: say what, as `line:18`, `no:3`, `memory`, or a module")
        return 2
    hint = did_you_mean(name, list(code_pages()), "`parc explain` lists all")
    say(f"there is no code `{args.of}`; {hint}")
    return 1


def _explain_build(args: argparse.Namespace, path: Path) -> int:
    from parc.compiler.build.directory import read_build
    from parc.explaining.explain import Explainer, UnknownWhat
    from parc.page.facts import PageFacts

    explainer = Explainer(PageFacts(read_build(path, custom="named")))
    try:
        found = explainer.explain(args.what)
    except UnknownWhat as unknown:
        say(f"parc explain: {unknown}")
        say(f"help: {unknown.help}")
        return 1
    if args.json:
        print_json({"what": args.what, "title": found.title, "says": [list(row) for row in found.rows], **found.facts})
        return 0
    width = max((len(name) for name, _ in found.rows), default=0) + 2
    print(found.title)
    print("\n".join(f"  {name:{width}}{text}" for name, text in found.rows))
    if found.table:
        print("\n" + text_table(found.table, found.head, right=found.right))
    return 0
