"""``recompute``: modules whose activations backward recomputes instead of keeping them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes import TWO_SIZES
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.syntax import Word
from ..directive import Directive, Scope, argument

NO_MODULE = "none"


@dataclass(frozen=True)
class Recompute(Directive):
    """Computes the values inside modules a second time in backward, from what the modules read, instead of keeping them
    (activation checkpointing). Gradients are the same to the bit; dropout draws the same numbers.

    `recompute blocks.*` keeps only what each block reads (full recomputation). `recompute blocks.[0..31:2]` does so for
    every second block. `recompute blocks.*.mlp` computes what is inside the MLPs again, from the values around them,
    which are kept. If several lines name a module, the last one counts.

    `keep` names operators whose results are kept all the same: `products` (of matrices, and convolutions), `attention`,
    `random` (dropout masks), `collectives`, or an operator by its own name, as `linear`. With `keep products,
    attention` only cheap operators run twice: norms, masks, and what a module computes entry by entry. With `keep
    products` attention runs twice too; that is Megatron-LM's selective recomputation. With `keep collectives` nothing
    is sent twice; without it, collectives inside the modules run again if backward needs their results.

    `fit 60GB` lets parc choose for each block: recompute nothing, everything but products (selective), or everything
    (full). It takes a choice that computes least twice, among those with which no rank needs more memory than this
    size, as estimated from the programs. The first blocks of a stage are recomputed before later ones. The report says
    what was chosen for the ranks of each stage, and what it costs.

    `recompute none` does nothing; so a `let` can choose it: `let again = none | model.layers.*`.

    A block is the largest unit: it keeps what it reads, also values from another stage. With `zero 3` a recomputed
    block gathers its weights once for its second forward and its backward together. Without a `recompute` line,
    backward still recomputes what costs next to nothing: views, casts, copies, and operators on single entries.
    """

    USAGE = "recompute WHERE [keep OPS] | WHERE fit SIZE"
    LAYOUT = True
    TRAINING = (("", "saves memory of a backward"),)
    ONCE = False

    where: tuple[Word, ...] = argument(lambda line: line.words("where"))
    keep: tuple[Word, ...] = argument(lambda line: line.words("keep"))

    fit: int | None = argument(lambda line: line.number("fit", None))
    """The bytes of a rank into which a step must fit; None without `fit`."""

    @property
    def idle(self) -> bool:
        """True where the line is `recompute none`."""
        return [word.text for word in self.where] == [NO_MODULE]

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from super().check(scope)
        first = next(line for line in scope.all(Recompute) if line.fit is not None or line is self)
        if self.fit is not None and first is not self:
            message, related = "two `recompute` lines have `fit`", (Label(first.span, "this is the first"),)
            help_ = "name the modules of both in one line: that line then chooses among all of them"
            yield Diagnostic(TWO_SIZES, message, Label(self.arguments.span("fit")), related, help=help_)
