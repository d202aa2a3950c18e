"""``compress``: gradients that are summed over an axis in fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes_language import BAD_VALUE
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.nearest import did_you_mean, listed
from ....grammar.syntax import Word
from ..directive import Directive, Scope, argument

FORMATS = ("fp16", "int8")


@dataclass(frozen=True)
class Compress(Directive):
    """Sums gradients over an axis in fewer bytes, once a step. The rounding error of each gradient is kept on its rank
    and added to the gradient of the next step (error feedback), so that it is not lost.

    `fp16` sums gradients as float16. `int8` sends whole numbers of 8 bits, with one power of two for each block of 256
    entries. Each rank receives its part of the gradient from all ranks, adds these in float32, rounds the sum, and
    sends it to all ranks. Two kinds of gradients are not compressed: those of which no dim is a multiple of the ranks,
    and those in float64. `WHERE` names modules, with all their parameters, or parameters; without it, all are meant.

    `compress` needs gradients that are summed once a step; `zero 2` and `zero 3` over the same axis sum in every
    backward instead, and are refused. With `zero 1 … within node` only the sum across nodes is compressed. Each rank
    keeps a float32 tensor of the size of each gradient. A checkpoint holds these tensors for every rank. If a run
    resumes with another size of the axis, they are shared out equally.
    """

    USAGE = "compress gradients over AXIS using TYPE [on WHERE]"
    TRAINING = (("", "sums gradients"),)
    ONCE = False

    axis: Word = argument(lambda given: given.word("gradients over"))
    format: str = argument(lambda given: given.text("using"))
    where: tuple[Word, ...] = argument(lambda given: given.words("on"))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from scope.check_axis(self.axis)
        if self.format not in FORMATS:
            help_ = did_you_mean(self.format, FORMATS, f"there are {listed(FORMATS)}")
            label = Label(self.arguments.span("using"))
            yield Diagnostic(BAD_VALUE, f"gradients are not sent as `{self.format}`", label, help=help_)
