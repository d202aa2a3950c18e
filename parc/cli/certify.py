"""``parc certify``: a build proved equal to its unsharded program, by a checker that shares no code with parc."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from certificate import VERSION
from certificate.step import certify
from certificate.text import Refused
from parc.cli.terminal import say, show
from parc.grammar.codes import NOT_CERTIFIED
from parc.grammar.diagnostics import Diagnostic


def certify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("build", metavar="DIR", type=Path)
    parser.description = (
        "Prove that all roles of a build together compute what programs/model.py says: the loss, every gradient, their "
        "norm, and what the model returns. The checker reads the build's texts alone; `python -m certificate DIR` is "
        "the same without parc."
    )


def certify_command(args: argparse.Namespace) -> int:
    """Print what is proved of each role. Return 5 where a build is not proved."""
    start = time.perf_counter()
    try:
        proof = certify(args.build)
    except Refused as refused:
        message, *notes = str(refused).splitlines()
        show([Diagnostic(NOT_CERTIFIED, message, help=_way_out(args.build), notes=tuple(notes[:_MOST_NOTES]))])
        return 5
    for line in proof.lines:
        say(line)
    say(f"{args.build}: certified by version {VERSION} in {time.perf_counter() - start:.1f} s")
    return 0


def _way_out(path: Path) -> str:
    """Return advice on a build that is not proved: a file may have changed since it was written.

    Raises:
        BuildError: there is no build.
    """
    from parc.compiler.build.build import BuildError
    from parc.compiler.build.directory import MANIFEST, again, read_build
    from parc.compiler.build.folders import current
    from parc.grammar.nearest import listed

    altered: list[str] = []
    if not (current(path) / MANIFEST).is_file():
        read_build(path)
    try:
        read_build(path, altered=altered, custom="named")
    except BuildError as error:
        if not altered:
            return f"{error}; {again(path)}"
    return f"{listed(altered)} changed since the build was written: {again(path)}" if altered else _HELP


_HELP = "`parc verify` tests its numbers; if these hold, a rule is missing: please report the build and this message"
_MOST_NOTES = 12
