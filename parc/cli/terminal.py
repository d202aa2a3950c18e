"""The output of commands: messages and progress on stderr, errors with their exit codes, tables as text."""

from __future__ import annotations

import json
import os
import platform
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from parc.grammar.codes import UNREADABLE
from parc.grammar.diagnostics import Diagnostic, PlanError, render

MOST_SHOWN = 100  # messages of one command


def say(text: str = "") -> None:
    """Print a line of words on stderr."""
    print(text, file=sys.stderr)


def show(diagnostics: Iterable[Diagnostic]) -> None:
    """Print diagnostics on stderr, with a blank line after each; if there are very many, only the first."""
    shown = tuple(diagnostics)
    for diagnostic in shown[:MOST_SHOWN]:
        say(render(diagnostic) + "\n")
    if len(shown) > MOST_SHOWN:
        say(f"and {len(shown) - MOST_SHOWN:,} more")


def print_json(value: Any) -> None:
    """Print data for other programs on stdout."""
    print(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False))


def show_error(error: BaseException) -> int | None:
    """Show an error that has an exit code, and return that; None for any other error."""
    if isinstance(error, PlanError):
        show(error.diagnostics)
        count = sum(diagnostic.is_error for diagnostic in error.diagnostics)
        if count > 1:
            say(f"{count} errors")
        return 1
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else error.filename
        message = f"`{name}` cannot be opened: {error.strerror[:1].lower()}{error.strerror[1:]}"
        show([Diagnostic(UNREADABLE, message, help="name a file or a folder that is there, and may be used")])
        return 1
    from parc.compiler.clock.cluster import ClusterError

    if isinstance(error, ClusterError):
        say(f"error: {error}")
        say(f"help: {error.help}")
        return 1
    if "torch" not in sys.modules:  # the errors below come from modules that need it
        return None
    from parc.compiler.build.build import BuildError
    from parc.grammar.codes import BAD_BUILD
    from parc.runtime.ranks.faults import RunError

    if isinstance(error, RunError):
        show([error.diagnostic()])
        return error.exit_code
    if isinstance(error, BuildError):
        show([Diagnostic(BAD_BUILD, str(error), help=error.help)])
        return 1
    return None


def show_fault(error: BaseException) -> int:
    """Show an unexpected error, a fault of parc's own, with the facts to report. Return the exit code."""
    from parc import __version__

    say("".join(traceback.format_exception(error)))
    torch = sys.modules.get("torch")
    versions = f"parc {__version__}, Python {platform.python_version()}"
    versions += f", torch {torch.__version__}" if torch is not None else ""
    say(f"parc failed: this is a fault of parc's own. Please report the lines above, with the plan and: {versions}")
    return 3


@contextmanager
def stages() -> Iterator[Any]:
    """Return a function that names the work in progress: a spinner on a terminal, silent elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("starting") as status:
        yield lambda text: status.update(text)


def text_table(rows: Sequence[Sequence[object]], head: Sequence[str], right: Sequence[int] = ()) -> str:
    """Return a table as text: columns under a head, of which those numbered in ``right`` are aligned to the right."""
    texts = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[at]) for row in texts) for at in range(len(head))]
    lines = []
    for row in texts:
        cells = [
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
