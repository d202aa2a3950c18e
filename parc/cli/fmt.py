"""``parc fmt``: a plan file in its one canonical text."""

from __future__ import annotations

import argparse
from pathlib import Path

from parc.cli.terminal import say


def fmt_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plans", metavar="PLAN", type=Path, nargs="+", help="files to rewrite in place")
    parser.add_argument("--check", action="store_true", help="rewrite nothing; exit with 1 where a file would change")


def fmt_command(args: argparse.Namespace) -> int:
    """Rewrite and name files that are not canonical. A malformed file is left as it is."""
    from parc.compiler.build.output_files import write_whole
    from parc.compiler.plan.include import read_source
    from parc.grammar.format import format_source

    texts = [format_source(read_source(path)) for path in args.plans]
    changed = 0
    for path, text in zip(args.plans, texts, strict=True):
        if text.encode() == path.read_bytes():  # a source's text has lost a byte order mark and other ends of lines
            continue
        changed += 1
        if not args.check:
            write_whole(path, text)
        say(f"{path} {'would change' if args.check else 'rewritten'}")
    return int(args.check and changed > 0)
