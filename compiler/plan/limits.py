"""Limits of ``forbid`` and ``expect`` lines: numbers of collectives in modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...grammar.codes_plan import BAD_VALUE
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.nearest import did_you_mean, listed
from ...grammar.syntax import Word
from ..program.actions import PHASES
from .directive import Directive, Scope, argument

ANY = "any"
COLLECTIVE_WORDS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("all_reduce", "row_max", "all_reduce_among"),
    "all_gather": ("all_gather", "all_gather_int8"),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter_int8"),
    "all_to_all": ("all_to_all",),
    "exchange": ("exchange",),
    "ring": ("ring_attention", "ring_attention_backward"),
}
"""The words of a line for collectives, and the collectives of programs that each means. A row's maximum is an
all-reduce too, and so is a sum among some stages."""


@dataclass(frozen=True)
class Promise(Directive):
    """A promise of how many collectives a microbatch's forward and backward (or one phase) run in each of some
    modules."""

    ONCE = False

    count: int = argument(lambda given: int(given.number("n", 0)))
    op: Word = argument(lambda given: given.word("op"))
    where: tuple[Word, ...] = argument(lambda given: given.words("in"))
    axis: Word | None = argument(lambda given: given.word("over"))
    phase: Word | None = argument(lambda given: given.word("during"))

    def means(self, op: str, axes: tuple[str, ...], phase: str) -> bool:
        """Return whether a collective is one of those that the line speaks of."""
        phases = ("forward", "backward") if self.phase is None else (self.phase.text,)
        named = self.op.text == ANY or op in COLLECTIVE_WORDS[self.op.text]
        return named and phase in phases and (self.axis is None or self.axis.text in axes)

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from super().check(scope)
        names = (*COLLECTIVE_WORDS, ANY)
        if self.op.text not in names:
            help_ = did_you_mean(self.op.text, names, f"there are {listed(names)}")
            message = f"no collective is called `{self.op.text}`"
            yield Diagnostic(BAD_VALUE, message, Label(self.op.span), help=help_)
        if self.axis is not None:
            yield from scope.check_axis(self.axis, of_views=True)
        if self.phase is not None and self.phase.text not in PHASES:
            message = f"a step has no phase `{self.phase.text}`"
            yield Diagnostic(BAD_VALUE, message, Label(self.phase.span), help=f"phases are {listed(PHASES)}")
