"""Source texts, and the spans of them that messages point at."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """A named text: a plan file; a file that one includes (``included`` is the line that does); or the value of a
    ``-D``, which has no lines and whose name is the whole option."""

    name: str
    text: str
    included: Span | None = None
    path: Path | None = field(default=None, compare=False)

    @classmethod
    def option(cls, name: str, value: str) -> Source:
        """Return one ``-D`` as a source."""
        return cls(f"-D {name}={value}", value)

    @property
    def is_option(self) -> bool:
        return self.name.startswith("-D ")

    def line_text(self, number: int) -> str:
        """Return the text of line ``number`` (from 1), without its newline."""
        return self.span_of(number).text

    def line_of(self, offset: int) -> int:
        """Return the number (from 1) of the line that holds ``offset``."""
        return bisect_right(self._starts, max(offset, 0))

    def span_of(self, number: int) -> Span:
        """Return the span of line ``number`` (from 1)."""
        ends = [*self._starts, len(self.text) + 1]
        return Span(self, ends[number - 1], ends[number] - 1)

    @cached_property
    def _starts(self) -> list[int]:
        """The offsets at which lines begin."""
        return [0, *(at + 1 for at, character in enumerate(self.text) if character == "\n")]


@dataclass(frozen=True, slots=True)
class Span:
    """The characters ``start`` to ``end`` (exclusive) of a source."""

    source: Source
    start: int
    end: int

    @property
    def line(self) -> int:
        """The line number, from 1."""
        return self.source.line_of(self.start)

    @property
    def column(self) -> int:
        """The column number in characters, from 1."""
        return self.start - (self.source.text.rfind("\n", 0, self.start) + 1) + 1

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    @property
    def includes(self) -> Iterator[Span]:
        """The lines by which the text came into the plan, innermost first."""
        span = self.source.included
        while span is not None:
            yield span
            span = span.source.included

    @property
    def root(self) -> Span:
        """The place in the plan itself: the outermost line by which the text came into it."""
        return next(reversed([self, *self.includes]))

    def __str__(self) -> str:
        return self.source.name if self.source.is_option else f"{self.source.name}:{self.line}:{self.column}"

    def to(self, other: Span) -> Span:
        """Return the span from the start of this one to the end of ``other``."""
        return Span(self.source, min(self.start, other.start), max(self.end, other.end))
