"""``sequence``: sequence parallelism of the activations between split layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.diagnostics import Diagnostic
from ....grammar.syntax import Word
from ..directive import Directive, Scope, argument
from ..layouts import KEEP_GATHERED
from .input import check_dim

NO_AXIS = "none"


@dataclass(frozen=True)
class Sequence(Directive):
    """Splits what modules read and return along the sequence, over an axis of tensor parallelism (Megatron's sequence
    parallelism). Norms, dropout and residuals between the split layers then work on a part of each sequence.

    `WHERE` names blocks, as `model.layers.*`. The line stands for `shard out(M) [...]` and `shard in(M) [...]` of each
    of them; the values before and after them follow. An all-reduce after a layer becomes a reduce-scatter there and an
    all-gather before the next layer: the same number of bytes. Gradients of the norms' weights and of biases are summed
    over the axis once a step.

    The sequence is the dim that comes from a dim of the inputs other than `B`. If there are several such dims, `dim`
    names one. Its size must be a multiple of the ranks.

    Backward gathers the inputs of split layers again, so that between forward and backward each rank keeps only its
    part: 1.25 times as many bytes are sent. With `keep gathered` they are kept as gathered, and no more is sent than
    without the line.

    `over none` does nothing; so a family can be included with or without it: `(tp=8, sequence=tp)`.
    """

    USAGE = "sequence WHERE over AXIS [dim NAME] [keep gathered]"
    LAYOUT = True
    ONCE = False

    where: tuple[Word, ...] = argument(lambda line: line.words("where"))
    axis: Word = argument(lambda line: line.word("over"))
    dim: Word | None = argument(lambda line: line.word("dim"))
    gathered: bool = argument(lambda line: KEEP_GATHERED in line)

    @property
    def idle(self) -> bool:
        """True where the line is `over none`."""
        return self.axis.text == NO_AXIS

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        if not self.idle:
            yield from scope.check_axis(self.axis)
        if self.dim is not None:
            yield from check_dim(scope, self.dim)
