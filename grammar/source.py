"""A text under analysis and the pieces of it that messages point at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Source:
    """A named text: a plan file, or the value of one ``-D``."""

    name: str
    text: str

    def line_text(self, number: int) -> str:
        """The text of line ``number`` (from 1), without its newline; empty beyond the end."""
        lines = self._lines
        return lines[number - 1] if 0 < number <= len(lines) else ""

    def line_of(self, offset: int) -> int:
        """The number (from 1) of the line that holds ``offset``."""
        return self.text.count("\n", 0, max(offset, 0)) + 1

    @cached_property
    def _lines(self) -> tuple[str, ...]:
        return tuple(self.text.split("\n"))


@dataclass(frozen=True, slots=True)
class Span:
    """The characters ``start`` to ``end`` (exclusive) of a source."""

    source: Source
    start: int
    end: int

    @property
    def line(self) -> int:
        """Line number, from 1."""
        return self.source.line_of(self.start)

    @property
    def column(self) -> int:
        """Column number in characters, from 1."""
        return self.start - (self.source.text.rfind("\n", 0, self.start) + 1) + 1

    @property
    def text(self) -> str:
        """The spanned characters."""
        return self.source.text[self.start : self.end]

    def __str__(self) -> str:
        return f"{self.source.name}:{self.line}:{self.column}"

    def __repr__(self) -> str:
        return f"Span({self})"

    def to(self, other: Span) -> Span:
        """The span from the start of this one to the end of ``other``."""
        return Span(self.source, min(self.start, other.start), max(self.end, other.end))
