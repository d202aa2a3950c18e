"""The text of a build's programs for a page: each function once, and an anchor for each of its lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from parc.compiler.build.build import Build, program_file
from parc.compiler.layout.collectives import COLLECTIVES
from parc.compiler.program.actions import ACTIONS, FORWARD
from parc.compiler.program.program import Function, Program

_NUMBERS = re.compile(r"(?<=[A-Za-z][._])\d+|(?<=message=)\d+")
"""The numbers in names of values, parameters and modules, and those of messages."""


@dataclass
class ListedFunction:
    """A function as a page shows it: its text, the place of its first row in a file, and the files that have the same
    text, but for numbers in names."""

    number: int
    function: Function
    action: str
    start: int
    rows: list[str]
    files: list[str] = field(default_factory=list)
    exact: bool = True
    """True where all these files have the text to the letter."""
    letter: str = "L"
    """The first letter of anchors, which another list of functions on the same page does not have."""

    @property
    def marked(self) -> set[int]:
        """The rows, from 1, that are collectives."""
        return {_first_row(self.function) + at for at, line in enumerate(self.function.lines)
                if line.op in COLLECTIVES and COLLECTIVES[line.op].communicates}  # fmt: skip

    def anchor(self, row: int = 0) -> str:
        """Return the anchor of a row, from 1, or of the function."""
        return f"{self.letter}{self.number}.{row}" if row else f"{self.letter}{self.number}"


class Listing:
    """The distinct functions of a build's programs, in the order of a step. The captured graph is not in it. Anchors
    begin with a ``letter``."""

    def __init__(self, build: Build, letter: str = "L") -> None:
        self.functions: list[ListedFunction] = []
        self._of: dict[tuple[str, str], ListedFunction] = {}
        alike: dict[tuple[str, str], ListedFunction] = {}
        kinds = list(ACTIONS)
        for program in sorted(build.files(), key=lambda program: kinds.index(program.action)):
            file = program_file(program)
            head, *texts = build.text(program).replace("\n\n\ndef ", "\n\0def ").split("\0")
            row = head.count("\n") + 3
            for function, text in zip(program.functions, texts, strict=True):
                rows = text.rstrip("\n").split("\n")
                key = program.action, _NUMBERS.sub("", text)
                if (listed := alike.get(key)) is None:
                    listed = ListedFunction(len(alike), function, program.action, row, rows, letter=letter)
                    alike[key] = listed
                    self.functions.append(listed)
                listed.files.append(file)
                listed.exact = listed.exact and listed.rows == rows
                self._of[file, function.name] = listed
                row += text.count("\n") + 2

    def anchor(self, program: Program, function: Function, index: int) -> str:
        """Return the anchor of a function's line; of its `return` if there are no more than ``index`` lines. Where
        another function has the same text but for numbers in names, it is the anchor of that one's line."""
        return self._of[program_file(program), function.name].anchor(_first_row(function) + index)

    def forward_anchor(self, module: str, name: str, index: int) -> str:
        """Return the anchor of a line of the function ``name`` of a forward; of a main function, which each stage has,
        that of the first line of a module. It is "" if there is none."""
        named = [one for one in self.functions if (one.action, one.function.name) == (FORWARD, name)]
        for listed in named:
            lines = listed.function.lines
            if len(named) == 1:
                return listed.anchor(_first_row(listed.function) + index)
            found = next((at for at, line in enumerate(lines) if line.origin.module == module), None)
            if found is not None:
                return listed.anchor(_first_row(listed.function) + found)
        return ""


def _first_row(function: Function) -> int:
    """Return the row, from 1, of a function's first line: behind `def`, the parameters and `):`."""
    return len(function.parameters) + 3
