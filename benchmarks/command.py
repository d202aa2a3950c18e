"""Commands of benchmarks: their arguments, and the tables that they print."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence


def command(main: Callable[..., int | None]) -> None:
    """Call a benchmark's ``main`` with the words of the command line, and exit with the status that it returns.

    Its parameters are the arguments, which have defaults; ``*words`` takes all that are left, and parameters by keyword
    alone are options.
    """
    about, signature = sys.modules[main.__module__].__doc__, inspect.signature(main, eval_str=True)
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            parser.add_argument(name, nargs="*")
        elif parameter.kind is parameter.KEYWORD_ONLY:
            parser.add_argument(f"--{name}", type=parameter.annotation, default=parameter.default)
        else:
            parser.add_argument(name, nargs="?", type=parameter.annotation, default=parameter.default)
    call = signature.bind_partial()
    call.arguments = vars(parser.parse_args())
    sys.exit(main(*call.args, **call.kwargs))


class Table:
    """A table in Markdown that is printed row by row, as its numbers come. The first column is at least ``names`` wide,
    every other at least ``least``."""

    def __init__(self, *heads: str, names: int = 12, least: int = 9) -> None:
        self.lines: list[str] = []
        """The printed lines for a file, without the spaces that align them."""
        self.widths = [max(len(heads[0]), names), *(max(len(head), least) for head in heads[1:])]
        self.row(*heads)
        self._add(["---"] * len(heads), ["-" * self.widths[0], *("-" * (width - 1) + ":" for width in self.widths[1:])])

    def row(self, name: object, *cells: object) -> None:
        """Print one row: a name on the left of its column, and cells on the right of theirs."""
        texts = [str(cell).rjust(width) for cell, width in zip(cells, self.widths[1:], strict=True)]
        self._add([str(cell) for cell in (name, *cells)], [str(name).ljust(self.widths[0]), *texts])

    def _add(self, cells: Sequence[str], aligned: Sequence[str]) -> None:
        self.lines.append(f"| {' | '.join(cells)} |")
        print(f"| {' | '.join(aligned)} |", flush=True)
