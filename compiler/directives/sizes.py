"""``sizes``: the sizes of the inputs' dims, fixed or in a range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...grammar.codes_language import BAD_VALUE, WRONG_KIND
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.source import Span
from ...grammar.syntax import Binding, Item, Number, Range, Word
from ..directive import Directive, Scope, argument, check_unique

LARGEST = 1 << 40
"""Entries of a dim, and of an input: a step of a trillion tokens is ten thousand times the largest that are trained."""
MOST_CHOICES = 1 << 20
"""Sizes of one range: lengths to a million, one by one."""


@dataclass(frozen=True, slots=True)
class SizeRange:
    """The sizes ``low``, ``low + step``, ... up to ``high``; a fixed size has ``low == high``."""

    low: int
    high: int
    step: int = 1

    @property
    def fixed(self) -> bool:
        return self.low == self.high

    @property
    def problem(self) -> str:
        """Why there are no such sizes, "" if there are."""
        if self.low < 1:
            return f"a size of {self.low}: sizes are 1 or more"
        if self.step < 1:
            return f"a step of {self.step}: steps are 1 or more"
        if self.high < self.low:
            return f"the range ends at {self.high}, below its start {self.low}"
        if self.high % self.step or self.low % self.step:
            return f"the step {self.step} does not divide {self.low} and {self.high}"
        if self.high > LARGEST:
            return f"a size of {self.high}: sizes go to {LARGEST:,}"
        if (self.high - self.low) // self.step >= MOST_CHOICES:
            return f"the range has {(self.high - self.low) // self.step + 1:,} sizes, over {MOST_CHOICES:,}"
        return ""

    @property
    def values(self) -> range:
        return range(self.low, self.high + 1, self.step)

    def nearest(self, size: int) -> tuple[int, ...]:
        """The sizes next to one that is none of them, below and above."""
        below = max((self.low, min(size, self.high) // self.step * self.step))
        return (below,) if not self.low < size < self.high else (below, below + self.step)

    def __str__(self) -> str:
        if self.fixed:
            return str(self.low)
        return f"{self.low}..{self.high}" + (f" by {self.step}" if self.step != 1 else "")


@dataclass(frozen=True)
class Sizes(Directive):
    """The sizes of the inputs' dims: `B=32`, or a range `S=128..4096 by 128` that one build serves.

    `B` is the batch of one optimizer step, over all data ranks and microbatches. Of a range, every batch may have its
    own size: `session.step(batch)` takes it from the batch, `parc run --sizes B=16,S=512` reads the plan's data at it,
    and without it at the largest. The model must be one program at all of them.
    """

    USAGE = "sizes NAME=SIZE, ..."

    ranges: tuple[tuple[str, SizeRange], ...] = argument(lambda given: _read(given.items("name"))[0])

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from _read(self.arguments.items("name"))[1]
        yield from check_unique(tuple(binding.name for binding in self.arguments.bindings("name")), "size")


def _read(items: tuple[Item, ...]) -> tuple[tuple[tuple[str, SizeRange], ...], tuple[Diagnostic, ...]]:
    """The sizes that make sense, and what is wrong with the others."""
    ranges: list[tuple[str, SizeRange]] = []
    errors: list[Diagnostic] = []
    rest = list(items)
    while rest:
        item = rest.pop(0)
        if not isinstance(item, Binding):
            errors.append(_error("sizes are `NAME=SIZE`", item.span))
            continue
        step: Number | None = None
        span = item.span
        if rest and isinstance(rest[0], Word) and rest[0].text == "by":
            span = span.to(rest.pop(0).span)
            if rest and isinstance(rest[0], Number):
                step = rest.pop(0)
                span = span.to(step.span) if step is not None else span
            else:
                errors.append(_error("`by` has no step", span))
        ends = _ends(item.value)
        if ends is None or (step is not None and not step.is_integer):
            errors.append(_error("a size is a whole number or a range of them", span))
            continue
        size = SizeRange(*ends, 1 if step is None else int(step.value))
        problem = "a fixed size has no step" if step and not isinstance(item.value, Range) else size.problem
        if not size.fixed and not item.name.text.isidentifier():
            errors.append(_error(f"programs cannot name `{item.name.text}`, which has a range", item.name.span))
            continue
        if problem:
            help_ = "write `S=256`, or a range that its step divides, as `S=128..4096 by 128`"
            errors.append(Diagnostic(BAD_VALUE, problem, Label(span), help=help_))
        else:
            ranges.append((item.name.text, size))
    return tuple(ranges), tuple(errors)


def _ends(value: Item) -> tuple[int, int] | None:
    ends = (value.low, value.high) if isinstance(value, Range) else (value, value)
    numbers = [int(end.value) for end in ends if isinstance(end, Number) and end.is_integer]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


def _error(message: str, span: Span) -> Diagnostic:
    return Diagnostic(WRONG_KIND, message, Label(span), help="write `B=32, S=128..4096 by 128`")
