"""Templates: programs for all sizes of a ranged plan.

Numbers that depend on sizes are expressions in braces, as in an f-string: ``f32[{B/2}/dp, {S}, 64]``, ``full([{S}],
{1.0/(B*S)})``. The text stays in Python's syntax, and programs have no other braces. Bound to sizes, a template is an
ordinary program for the one strict reader.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from itertools import zip_longest

from ..layout.mesh import Mesh
from ..program.binding import STORED, Binding
from ..program.program import Fault, Origin
from .polynomials import Polynomial, Ranges, Sizes, constraint, fit, is_whole

_BRACES = re.compile(r"\{([^{}\s]+)\}")
_SHARDED_BRACES = re.compile(r"\{([^{}\s]+)\}((?:/[A-Za-z_]\w*)*)")
_TEXT_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.])")
_REAL = re.compile(r"1\.0([*/])\((.+)\)")


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression in braces: a whole number, or, with ``kind`` ``*`` or ``/``, a floating one such as
    ``1.0/(B*S)``."""

    size: Polynomial
    kind: str = ""

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str) -> Expression:
        """Read the text of ``str``.

        Raises:
            ValueError: the text is not exactly one of ``str``.
        """
        match = _REAL.fullmatch(text)
        return cls(Polynomial.parse(text)) if match is None else cls(Polynomial.parse(match[2]), match[1])

    def __str__(self) -> str:
        return f"1.0{self.kind}({self.size})" if self.kind else str(self.size)

    def at(self, sizes: Sizes) -> str:
        """Return the number in the text of a program.

        Raises:
            ValueError: it should be a whole number, and is not.
        """
        value = self.size.at(sizes)
        if not self.kind and value.denominator != 1:
            raise ValueError(f"`{self}` is {value} for {sizes_text(sizes)}")
        return repr(float(1 / value if self.kind == "/" else value)) if self.kind else str(value)


def _expressions(text: str) -> set[Expression]:
    """Return the expressions in braces in a text."""
    return {Expression.parse(words) for words in _BRACES.findall(text)}


def sizes_text(sizes: Mapping[str, object]) -> str:
    """Return sizes as text: ``B=8, S=128..512 by 128``."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


class Misfit(Exception):
    """The error of programs at several sizes that do not form one template: a line of ``file`` has these ``rows`` at
    two ``points``. ``numbers``: they differ only in a number, for which no polynomial of the sizes was found.
    """

    def __init__(self, file: str, points: tuple[Sizes, Sizes], rows: tuple[str, str], numbers: bool = False) -> None:
        super().__init__(f"{file}: `{rows[0].strip()}` at {sizes_text(points[0])}, `{rows[1].strip()}` at "
                         f"{sizes_text(points[1])}")  # fmt: skip
        self.file, self.points, self.rows, self.numbers = file, points, rows, numbers

    @property
    def origin(self) -> Origin:
        origins = [_text_and_origin(row)[1] for row in self.rows]
        return Origin.parse(next(filter(None, origins))) if any(origins) else Origin()


@dataclass(frozen=True)
class Template:
    """Texts of programs by file name, for all sizes of ``ranges``."""

    ranges: Ranges
    texts: Mapping[str, str]

    @classmethod
    def read(cls, ranges: Ranges, texts: Mapping[str, str]) -> Template:
        """Read the texts of a template.

        Raises:
            ValueError: the text in some braces is not one that parc writes.
        """
        for name, text in texts.items():
            try:
                expressions = _expressions(text)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            for words in expressions:
                if not words.size.names or words.size.names - ranges.keys():
                    raise ValueError(f"{name}: `{words}` is of no size that has a range")
        return cls(ranges, texts)

    @classmethod
    def merge(cls, ranges: Ranges, points: Sequence[Sizes], files: Sequence[Mapping[str, str]]) -> Template:
        """Return the template of programs compiled at several sizes: ``files`` has the texts by name for each of
        ``points``.

        Raises:
            Misfit: the programs differ in more than numbers, or in numbers that no polynomial of the sizes gives.
        """
        for other, point in zip(files[1:], points[1:], strict=True):
            for name in [name for name in {**files[0], **other} if name not in files[0] or name not in other]:
                rows = ("a program", "nothing") if name in files[0] else ("nothing", "a program")
                raise Misfit(name, (points[0], point), rows)
        fitted: dict[tuple[str, ...], str | None] = {}
        texts = {}
        for name in files[0]:
            every = zip_longest(*(file[name].split("\n") for file in files), fillvalue="")
            texts[name] = "\n".join(_merged_row(row, name, ranges, points, fitted) for row in every)
        return cls(ranges, texts)

    def expressions(self) -> set[Expression]:
        """Return all expressions in the texts."""
        return set().union(*map(_expressions, self.texts.values()))

    def at(self, sizes: Sizes) -> dict[str, str]:
        """Return the texts of the programs at these sizes.

        Raises:
            ValueError: an expression is no whole number for these sizes.
        """

        @cache
        def bound(words: str) -> str:
            return Expression.parse(words).at(sizes)

        return {name: _BRACES.sub(lambda braces: bound(braces[1]), text) for name, text in self.texts.items()}

    def misfit(self, sizes: Sizes, compiled: Mapping[str, str]) -> Misfit | None:
        """Return the first difference of programs compiled at some sizes from the template at these sizes, beside the
        row at the largest sizes.

        Raises:
            ValueError: an expression is no whole number for these sizes.
        """
        bound, largest = self.at(sizes), {name: size.high for name, size in self.ranges.items()}
        at_largest = self.at(largest)
        for name in {**bound, **compiled}:
            texts = [texts.get(name, "").split("\n") for texts in (bound, compiled, at_largest)]
            for row, other, first in zip_longest(*texts, fillvalue=""):
                if row != other:
                    numbers = _without_numbers(row) == _without_numbers(other)
                    return Misfit(name, (largest, sizes), (first, other), numbers)
        return None

    def faults(self, mesh: Mesh) -> list[ShapeFault]:
        """Return the faults of sizes. No fault is a proof for all declared sizes: a rank's sizes are whole numbers, and
        tensors that a rank stores between steps do not depend on sizes."""
        by_message: dict[str, ShapeFault] = {}
        for name, text in self.texts.items():
            for row in text.split("\n"):
                for fault in _row_faults(name, row, self.ranges, mesh) if "{" in row else ():
                    by_message.setdefault(fault.message, fault)
        return list(by_message.values())


@dataclass(frozen=True, slots=True)
class ShapeFault:
    """A size that is not a whole number for all declared sizes, or (``divides`` is False) that must not depend on them.
    ``line`` is the plan's line that placed the value."""

    file: str
    value: str
    module: str
    line: int
    message: str
    divides: bool = True

    def fault(self) -> Fault:
        """Return the fault in the form of other checks."""
        return Fault("shapes", f"{self.file}: {self.value}", self.message)


def _merged_row(
    rows: Sequence[str], file: str, ranges: Ranges, points: Sequence[Sizes], fitted: dict[tuple[str, ...], str | None]
) -> str:
    """Return the template of one line from its texts at several sizes. ``fitted`` caches the texts of numbers."""
    first = rows[0]
    if _BRACES.search(first):
        raise Misfit(file, (points[0], points[0]), (first, first))
    if all(row == first for row in rows):
        return first
    forms = [_without_numbers(row) for row in rows]
    other = next((index for index, form in enumerate(forms) if form != forms[0]), None)
    if other is not None:
        raise Misfit(file, (points[0], points[other]), (first, rows[other]))
    heads = [_text_and_origin(row)[0] for row in rows]
    between = _TEXT_NUMBER.split(heads[0])
    merged = between[0]
    for rest, *numbers in zip(between[1:], *map(_TEXT_NUMBER.findall, heads), strict=True):
        key = tuple(numbers)
        if key not in fitted:
            fitted[key] = numbers[0] if len(set(numbers)) == 1 else _fitted_text(numbers, ranges, points)
        text = fitted[key]
        if text is None:
            at = next(index for index, number in enumerate(numbers) if number != numbers[0])
            raise Misfit(file, (points[0], points[at]), (first, rows[at]), numbers=True)
        merged += text + rest
    return merged + first[len(heads[0]) :]


def _text_and_origin(row: str) -> tuple[str, str]:
    """Split a line into its text and its origin, which does not depend on sizes."""
    head, bar, origin = row.rpartition(" | ")
    return (head, origin) if bar else (row, "")


def _without_numbers(row: str) -> tuple[str, str]:
    head, origin = _text_and_origin(row)
    return _TEXT_NUMBER.sub("#", head), origin


def _fitted_text(numbers: Sequence[str], ranges: Ranges, points: Sequence[Sizes]) -> str | None:
    """Return the text in the template for a number with these texts at these sizes, or None if no polynomial fits."""
    whole = [re.fullmatch(r"-?\d+", number) is not None for number in numbers]
    if all(whole):
        sizes = fit(points, [Fraction(number) for number in numbers], ranges)
        return None if sizes is None else f"{{{sizes}}}"
    if any(whole) or 0.0 in map(float, numbers):
        return None
    for kind in "*/":
        exact = [Fraction(number) if kind == "*" else 1 / Fraction(number) for number in numbers]
        # texts are rounded: take the nearest fraction of small denominator, which `at` must round to the text again
        sizes = fit(points, [value.limit_denominator(1000) for value in exact], ranges)
        if sizes is not None:
            expression = Expression(sizes, kind)
            if [expression.at(point) for point in points] == list(numbers):
                return f"{{{expression}}}"
    return None


def _row_faults(file: str, row: str, ranges: Ranges, mesh: Mesh) -> Iterator[ShapeFault]:
    head, origin = _text_and_origin(row)
    at = Origin.parse(origin) if origin else Origin()
    value = re.split(r" = |: ", row.strip())[0]
    _, _, text = row.partition("  # ") if not origin else ("", "", "")
    if text and (binding := Binding.parse(text)).kind in STORED:
        message = f"the {binding.words} would have other shapes at other sizes"
        yield ShapeFault(file, value, "", 0, message, divides=False)
        return
    for match in _SHARDED_BRACES.finditer(head):
        expression = Expression.parse(match[1])
        axes = match[2].split("/")[1:]
        ways = math.prod(mesh.size(axis) for axis in axes)
        part = Polynomial.of({monomial: factor / ways for monomial, factor in expression.size.terms})
        if not expression.kind and not is_whole(part, ranges):
            way = constraint(part, ranges) or "choose other sizes, or split another dim"
            over = f", split over {', '.join(f'`{axis}`' for axis in axes)}, does not divide by {ways}"
            message = f"{expression}{over if axes else ' is not always a whole number'}: {way}"
            yield ShapeFault(file, value, at.module, at.plan, message)
