"""``parc certify``: a build proved equal to its unsharded program, by a checker that shares no code with parc."""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
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
        from parc.compiler.build.directory import again
        from parc.grammar.nearest import listed

        message, *notes = str(refused).splitlines()
        altered = _altered(args.build)
        help_ = f"{listed(altered)} changed since the build was written: {again(args.build)}" if altered else _HELP
        show([Diagnostic(NOT_CERTIFIED, message, help=help_, notes=tuple(notes[:_MOST_NOTES]))])
        return 5
    for line in proof.lines:
        say(line)
    say(f"{args.build}: certified by version {VERSION} in {time.perf_counter() - start:.1f} s")
    return 0


def _altered(path: Path) -> list[str]:
    """Return the files of a build that are not as they were written.

    Raises:
        BuildError: there is no build.
    """
    from parc.compiler.build.build import BuildError
    from parc.compiler.build.directory import MANIFEST, read_build
    from parc.compiler.build.folders import current

    altered: list[str] = []
    if not (current(path) / MANIFEST).is_file():
        read_build(path)
    with suppress(BuildError):  # texts that cannot be read, of which the checker has said more
        read_build(path, altered=altered, custom="named")
    return altered


_HELP = "`parc verify` tests its numbers; if these hold, a rule is missing: please report the build and this message"
_MOST_NOTES = 12
