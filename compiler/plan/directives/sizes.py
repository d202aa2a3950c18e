"""``sizes``: the sizes of the inputs' dims, fixed or in a range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes import BAD_VALUE, WRONG_KIND
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.source import Span
from ....grammar.syntax import Item, Number, Range, Setting, Word
from ...sizes.size_range import SizeRange
from ..directive import Directive, Scope, argument, check_unique


@dataclass(frozen=True)
class Sizes(Directive):
    """The sizes of the inputs' dims: `B=32`, or a range, `S=128..4096 by 128`, that one build serves.

    `B` is the batch of one optimizer step, over all data ranks and microbatches. With a range, every batch may have its
    own size. `session.step(batch)` takes the size from the batch. `parc run --sizes B=16,S=512` reads the plan's data
    at these sizes; without it, at the largest. The model must be one program at all sizes: it must not branch on them.
    """

    USAGE = "sizes NAME=SIZE, ..."

    ranges: tuple[tuple[str, SizeRange], ...] = argument(lambda line: _read_sizes(line.items("name"))[0])

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from _read_sizes(self.arguments.items("name"))[1]
        yield from check_unique(tuple(binding.name for binding in self.arguments.bindings("name")), "size")


def _read_sizes(items: tuple[Item, ...]) -> tuple[tuple[tuple[str, SizeRange], ...], tuple[Diagnostic, ...]]:
    """Return the valid sizes, and the errors of the others."""
    ranges: list[tuple[str, SizeRange]] = []
    errors: list[Diagnostic] = []
    rest = list(items)
    while rest:
        item = rest.pop(0)
        if not isinstance(item, Setting):
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
        ends = _range_ends(item.value)
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


def _range_ends(value: Item) -> tuple[int, int] | None:
    ends = (value.low, value.high) if isinstance(value, Range) else (value, value)
    numbers = [int(end.value) for end in ends if isinstance(end, Number) and end.is_integer]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


def _error(message: str, span: Span) -> Diagnostic:
    return Diagnostic(WRONG_KIND, message, Label(span), help="write `B=32, S=128..4096 by 128`")
