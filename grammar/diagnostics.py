"""Error codes, diagnostics that have one, and the one form in which diagnostics are printed."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from .source import Span


@dataclass(frozen=True, slots=True)
class Code:
    """An error code, whose page in ``errors.md`` says what it means."""

    name: str


MAX_LINE = 160  # longer source lines are cut to a window around the underlined text


class Severity(StrEnum):
    """Errors stop a build; warnings and notes do not."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Label:
    """A place in a source, and the words about it there."""

    span: Span
    text: str = ""


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One message: a code, one terse sentence, its place, related places, and a way out."""

    code: Code
    message: str
    primary: Label | None = None
    related: tuple[Label, ...] = ()
    help: str = ""
    notes: tuple[str, ...] = ()
    severity: Severity = Severity.ERROR

    @property
    def is_error(self) -> bool:
        """True where this message stops a build."""
        return self.severity is Severity.ERROR


class PlanError(Exception):
    """The error of a plan, model or files of the user; it carries every diagnostic found."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__(self.diagnostics)

    def __str__(self) -> str:
        return "\n\n".join(map(render, self.diagnostics))

    def __repr__(self) -> str:
        return f"PlanError({str(self)!r})"


def render(diagnostic: Diagnostic) -> str:
    """Return the diagnostic as plain text, without a final newline.

    >>> from .codes import UNEVEN_SHARD
    >>> from .source import Source
    >>> span = Span(Source("gpt.parc", "mesh tp=4\\nvocab head over tp"), 16, 20)
    >>> print(render(Diagnostic(UNEVEN_SHARD, "50257 rows do not divide by tp=4", Label(span, "(50257, 768)"))))
    error[P0107]: 50257 rows do not divide by tp=4
     --> gpt.parc:2:7
    2 | vocab head over tp
      |       ^^^^ (50257, 768)
    """
    return "\n".join(map(_printable, _rendered_lines(diagnostic)))


def _rendered_lines(diagnostic: Diagnostic) -> Iterator[str]:
    yield f"{diagnostic.severity}[{diagnostic.code.name}]: {diagnostic.message}"
    primary = diagnostic.primary
    includes = [Label(span, "included here") for span in primary.span.includes] if primary else []
    labels = [*([primary] if primary else []), *includes, *diagnostic.related]
    gutter = max((len(str(label.span.line)) for label in labels), default=0)
    for label in labels:
        first = label is primary
        arrow = "-->" if first else ":::"
        yield f"{' ' * gutter}{arrow} {label.span}"
        if not label.span.source.is_option:
            yield from _excerpt(label, gutter, "^" if first else "-")
    for note in diagnostic.notes:
        first_line, *rest = note.split("\n")
        yield f"{' ' * gutter} = note: {first_line}"
        yield from (f"{' ' * gutter}   {line}" for line in rest)
    if diagnostic.help:
        yield f"help: {diagnostic.help}"


def _excerpt(label: Label, gutter: int, mark: str) -> Iterator[str]:
    """Return the source line of a label, and its underline."""
    span = label.span
    text = _printable(span.source.line_text(span.line))
    start = span.column - 1
    stop = max(min(start + span.end - span.start, len(text)), start + 1)
    shift = 0
    if len(text) > MAX_LINE:
        shift = max(0, start - MAX_LINE // 2)
        text = text[shift : shift + MAX_LINE]
        start, stop = start - shift, min(stop - shift, MAX_LINE)
    pad, underline = _columns(text[:start]), max(_columns(text[start:stop]), 1)
    yield f"{span.line:>{gutter}} | {text.rstrip()}"
    yield f"{' ' * gutter} | {' ' * pad}{mark * underline} {label.text}".rstrip()


def _printable(text: str) -> str:
    """Return a text with one-column replacements for the characters that a terminal could misread."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c in "\t\r" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _columns(text: str) -> int:
    """Return the columns that the text takes in a terminal."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) != 0 for c in text)
