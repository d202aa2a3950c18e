"""What ``forbid`` and ``expect`` lines ask for: numbers of collectives in modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..grammar.codes_language import BAD_VALUE
from ..grammar.diagnostics import Diagnostic, Label
from ..grammar.nearest import did_you_mean, listed
from ..grammar.source import Span
from ..grammar.syntax import Word
from ..grammar.usage import Arguments
from .directive import Scope

ANY = "any"
OPS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("all_reduce", "row_max", "all_reduce_among"),
    "all_gather": ("all_gather",),
    "reduce_scatter": ("reduce_scatter",),
    "all_to_all": ("all_to_all",),
}
"""What a line may name, and the collectives of programs that it means; a row's maximum is an all-reduce
too, and so is a sum among some stages."""
PHASES = ("forward", "backward", "step")


@dataclass(frozen=True, slots=True)
class Promise:
    """How many collectives a microbatch's forward and backward (or one phase) run in each of some modules."""

    count: int
    op: Word
    where: tuple[Word, ...]
    axis: Word | None
    phase: Word | None
    span: Span

    def means(self, op: str, axes: tuple[str, ...], phase: str) -> bool:
        """Whether a collective is one of those that the line speaks of."""
        phases = ("forward", "backward") if self.phase is None else (self.phase.text,)
        named = self.op.text == ANY or op in OPS[self.op.text]
        return named and phase in phases and (self.axis is None or self.axis.text in axes)


def read_promise(arguments: Arguments, count: int) -> Promise:
    """The promise of a line's arguments."""
    op = arguments.word("op")
    assert op is not None
    return Promise(
        count, op, arguments.words("in"), arguments.word("over"), arguments.word("during"), arguments.statement.span
    )


def check_promise(promise: Promise, scope: Scope) -> Iterator[Diagnostic]:
    """What is wrong with a promise, whatever the model is."""
    names = (*OPS, ANY)
    if promise.op.text not in names:
        help_ = did_you_mean(promise.op.text, names, f"there are {listed(names)}")
        message = f"no collective is called `{promise.op.text}`"
        yield Diagnostic(BAD_VALUE, message, Label(promise.op.span), help=help_)
    if promise.axis is not None:
        yield from scope.check_axis(promise.axis)
    if promise.phase is not None and promise.phase.text not in PHASES:
        message = f"a step has no phase `{promise.phase.text}`"
        yield Diagnostic(BAD_VALUE, message, Label(promise.phase.span), help=f"phases are {listed(PHASES)}")
