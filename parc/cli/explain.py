"""``parc explain``: what an error code means, with an example and the way out."""

from __future__ import annotations

import argparse

from parc.cli.terminal import say
from parc.grammar.codes import CODES, explain
from parc.grammar.nearest import did_you_mean


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", metavar="CODE", help="as in error[P0107]")


def run(given: argparse.Namespace) -> int:
    """The code's page, on stdout."""
    name = given.code.strip("[]").upper()
    if name not in CODES:
        hint = did_you_mean(name, list(CODES), f"codes are {', '.join(sorted(CODES))}")
        say(f"there is no code `{given.code}`; {hint}")
        return 1
    print(explain(CODES[name]), end="")
    return 0
