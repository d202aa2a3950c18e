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
    """Sums gradients over an axis in fewer bytes, once a step. What rounding leaves of a gradient on a rank is kept
    there and added to the next step's gradient (error feedback), so that nothing is lost for long.

    `fp16` sums them as float16. `int8` sends whole numbers of 7 bits and a sign, with one power of two for each block
    of 256 entries: every rank gets its part of all ranks, adds in float32, rounds its sum again and sends it to all.
    Gradients along no dim of which the ranks divide, and float64, stay as they are. `WHERE` names modules, with all
    their parameters, or parameters; without it, all are meant.

    It needs gradients that are summed once a step: `zero 2` and `zero 3` over the axis sum in every backward. Where
    `zero 1` shards within nodes, the sum inside a node stays as it is. Every rank keeps a float32 tensor of each
    gradient's size. A checkpoint holds it for every rank; under another size of the axis it is divided equally over the
    ranks.
    """

    USAGE = "compress gradients over AXIS using TYPE [on WHERE]"
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
