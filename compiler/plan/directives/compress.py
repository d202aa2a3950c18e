"""``compress``: gradients that are summed over an axis in fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.diagnostics import Diagnostic
from ....grammar.syntax import Word
from ..directive import Directive, Scope, argument, check_known

FORMATS = ("fp16", "int8")


@dataclass(frozen=True)
class Compress(Directive):
    """Sums gradients over an axis in fewer bytes, once a step. The rounding error of each gradient is kept on its rank
    and added to the gradient of the next step (error feedback), so that it is not lost.

    `fp16` sums gradients as float16. `int8` sends whole numbers of 8 bits, with one power of two for each block of 256
    entries. Each rank receives its part of the gradient from all ranks, adds these in float32, rounds the sum, and
    sends it to all ranks. Gradients of which no dim is a multiple of the ranks, single numbers, and gradients in
    float64 are not compressed. `WHERE` names modules, with all their parameters, or parameters; without it, all are
    meant.

    With `hierarchical` over the same axis, and with `zero … within node`, sums are exact inside nodes, and only those
    across nodes are compressed. The sums start in the last backward of a step, and travel beside work.

    `compress` needs gradients that are summed across nodes once a step; `zero 2` and `zero 3` over the whole axis sum
    in every backward instead, and are refused. Each rank keeps a float32 tensor of the size of what it rounds: of each
    gradient, or of its part of one if sums inside nodes come first. A checkpoint holds these tensors for every rank. If
    a run resumes with another number of ranks or nodes, they are shared out equally.
    """

    USAGE = "compress gradients over AXIS using TYPE [on WHERE]"
    LAYOUT = True
    TRAINING = (("", "sums gradients"),)
    ONCE = False

    axis: Word = argument(lambda line: line.word("gradients over"))
    format: str = argument(lambda line: line.text("using"))
    where: tuple[Word, ...] = argument(lambda line: line.words("on"))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from scope.check_axis(self.axis)
        yield from check_known(self.arguments.word("using"), FORMATS, f"gradients are not sent as `{self.format}`")
