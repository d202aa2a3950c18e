"""``recompute``: modules whose values backward makes again instead of keeping them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes_placement import TWO_SIZES
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.syntax import Word
from ..directive import Directive, Scope, argument


@dataclass(frozen=True)
class Recompute(Directive):
    """Makes the values inside modules again in backward, from what the modules read, instead of keeping them
    (activation checkpointing). Gradients are the same to the bit: dropout draws the same numbers.

    `recompute blocks.*` keeps of every block only what it reads (full); `recompute blocks.[0..31:2]` does so in every
    second block (strided). `recompute blocks.*.mlp` makes again what is inside the MLPs, from what is kept around them.
    Of lines that name a module the last counts.

    `keep` names operators whose results are kept all the same: `products` (of matrices, and convolutions), `attention`,
    `random` (masks of dropout), `collectives`, or an operator by its own name, as `linear`. With `keep products,
    attention` only cheap operators run twice: norms, masks, what a module computes entry by entry. `keep products` has
    attention run again too, Megatron-LM's selective recomputation. `keep collectives` sends nothing twice: without it,
    the collectives inside run again where what they make is needed.

    `fit 60GB` chooses for each block by itself: it keeps what it would without a line, it makes all but products again
    (selective), or everything (full). Of all choices with which no rank needs more memory than the size, as estimated
    from the programs, the line takes one that computes least twice. The first blocks of a stage are made again before
    later ones. The report says what was chosen for the ranks of each stage, and what it costs.

    A block is the largest unit: it keeps what it reads, also where that came from another stage. A recomputed block
    reads its weights once for both, so that with `zero 3` its backward gathers them once. Without a line backward makes
    again what costs next to nothing: views, casts, copies, operators on single entries.
    """

    USAGE = "recompute WHERE [keep OPS] | WHERE fit SIZE"
    ONCE = False

    where: tuple[Word, ...] = argument(lambda given: given.words("where"))
    keep: tuple[Word, ...] = argument(lambda given: given.words("keep"))

    fit: int | None = argument(lambda given: given.number("fit", None))
    """The bytes of a rank into which a step is to fit; None where the line is no choice."""

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from super().check(scope)
        first = next(line for line in scope.all(Recompute) if line.fit is not None or line is self)
        if self.fit is not None and first is not self:
            help_ = "name the modules of both in one line: it chooses among all of them"
            message = "a second line of recomputation says what a rank should fit into"
            yield Diagnostic(
                TWO_SIZES, message, Label(self.arguments.span("fit")), (Label(first.span, "this is the first"),),
                help=help_,
            )  # fmt: skip
