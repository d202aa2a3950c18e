"""The syntax tree of a plan: frozen statements and items, which compare equal wherever they stand in the text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias

from .source import Span

UNITS: dict[str, tuple[str, float]] = {
    "": ("", 1),
    "B": ("B", 1),
    "KB": ("B", 10**3),
    "MB": ("B", 10**6),
    "GB": ("B", 10**9),
    "TB": ("B", 10**12),
    "KiB": ("B", 2**10),
    "MiB": ("B", 2**20),
    "GiB": ("B", 2**30),
    "TiB": ("B", 2**40),
    "s": ("s", 1),
    "ms": ("s", 1e-3),
}


def size_text(count: float) -> str:
    """Return bytes as text for a reader.

    >>> size_text(512), size_text(1536), size_text(3 * 2**30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def size_in_both(count: int) -> str:
    """Return bytes in powers of 1000, as devices are sold, and in those of 1024, as memory is counted.

    >>> size_in_both(80 * 10**9), size_in_both(64 * 2**30), size_in_both(640)
    ('80 GB (74.5 GiB)', '68.7 GB (64.0 GiB)', '640 B')
    """
    if count < 1000:
        return size_text(count)
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{round(count / 1000**power, 1):g} {'KMGT'[power - 1]}B ({size_text(count)})"


@dataclass(frozen=True, slots=True)
class Word:
    """A name, a dotted path, or a pattern of paths."""

    text: str
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Number:
    """A number as written, with its glued unit."""

    text: str
    span: Span = field(compare=False, repr=False)

    @property
    def unit(self) -> str:
        """``"B"`` for bytes, ``"s"`` for seconds, empty without a unit."""
        return UNITS[self._suffix][0]

    @property
    def value(self) -> int | float:
        """An int if the text is one (times its unit), else a float; in bytes or seconds if it has a unit."""
        digits = self.text[: len(self.text) - len(self._suffix)]
        factor = UNITS[self._suffix][1]
        if digits.lstrip("-").isdigit():
            return int(digits) * factor
        scaled = float(digits) * factor
        return int(scaled) if self.unit == "B" and math.isfinite(scaled) and scaled.is_integer() else scaled

    @property
    def is_integer(self) -> bool:
        """True where the number is a plain whole number, without a unit."""
        return self.text.lstrip("-").isdigit()

    @property
    def _suffix(self) -> str:
        return self.text.lstrip("-+.0123456789eE")


@dataclass(frozen=True, slots=True)
class String:
    """Text in double quotes; there are no escapes."""

    text: str
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Var:
    """``$name``: the value of a ``let`` or a ``-D``."""

    name: str
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Ellipsis:
    """``...``: the rest."""

    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Setting:
    """``name=value``."""

    name: Word
    value: Item
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class SplitItem:
    """``h/tp/cp=8``: a dim, or sub-dim, called h, of global size 8, split over tp and each part over cp."""

    name: Word | None
    axes: tuple[Word | Var, ...]
    size: Number | Var | None
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Range:
    """``low..high``, both included."""

    low: Number | Var
    high: Number | Var
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Open:
    """``1 | 2 | 4``: a value that is chosen later; without values, ``?``, it is what the ranks leave."""

    values: tuple[Item, ...]
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Call:
    """``name(argument, ...)``."""

    name: str
    arguments: tuple[Item, ...]
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Dim:
    """One entry of a layout."""

    items: tuple[Item, ...]
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Layout:
    """``[dim, ...]``."""

    dims: tuple[Dim, ...]
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Phrase:
    """Items joined by commas."""

    items: tuple[Item, ...]
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Group:
    """``(phrase phrase + phrase)``: terms joined by ``+``, each a row of phrases."""

    terms: tuple[tuple[Phrase, ...], ...]
    span: Span = field(compare=False, repr=False)


Item: TypeAlias = Word | Number | String | Var | Ellipsis | Setting | SplitItem | Range | Open | Call | Layout | Group


@dataclass(frozen=True, slots=True)
class Statement:
    """One line of a plan: a verb and its phrases. ``added`` are the phrases of each further term, after a ``+``."""

    verb: Word
    phrases: tuple[Phrase, ...]
    span: Span = field(compare=False, repr=False)
    added: tuple[tuple[Phrase, ...], ...] = ()


KIND_NAMES: dict[type, str] = {
    Word: "a word",
    Number: "a number",
    String: "a string",
    Var: "a name after `$`",
    Ellipsis: "`...`",
    Setting: "`name=value`",
    SplitItem: "a split",
    Range: "a range",
    Open: "a choice",
    Call: "a call",
    Layout: "a layout in `[]`",
    Group: "a group in `()`",
}
