"""``parc explain``: the meaning of an error code, with an example and the way out."""

from __future__ import annotations

import argparse

from parc.cli.terminal import say
from parc.grammar.codes import code_pages
from parc.grammar.nearest import did_you_mean


def explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", metavar="CODE", nargs="?", help="as in error[P0107]; without it all are listed")


def explain_command(args: argparse.Namespace) -> int:
    """Print the code's page, or the titles of all codes."""
    if args.code is None:
        print("\n".join(f"{name}  {page.title}" for name, page in code_pages().items()))
        return 0
    name = args.code.strip("[]").upper()
    if (number := name.removeprefix("P")).isdecimal():
        name = f"P{number.lstrip('0').zfill(4)}"
    if name not in code_pages():
        hint = did_you_mean(name, list(code_pages()), "`parc explain` lists all")
        say(f"there is no code `{args.code}`; {hint}")
        return 1
    print(code_pages()[name].text, end="")
    return 0
