"""``context``: a sequence that is split over an axis everywhere, and attention across its parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes import CONFLICT, REPEATED
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.syntax import Word
from ..directive import Directive, Scope, argument, check_known
from .input import check_dim

METHODS = ("gather", "ring", "zigzag", "ulysses")


@dataclass(frozen=True)
class Context(Directive):
    """Splits sequences over an axis (context parallelism): every input that has the dim `NAME`, and so every
    activation. Weights are placed as without the line; their gradients are summed over the axis. Positions and masks
    are those of the whole sequence, so each rank computes for its part the same numbers as one device does.

    Only attention needs the other parts of the sequence. `using` says how the attention in the modules `WHERE` gets
    them:

    `gather`: every rank gathers the keys and values of the whole sequence, and again in backward.

    `ring`: keys and values go from rank to rank, one part at a time, while each rank computes with the part that it
    has. In backward their gradients travel with them. No rank ever holds the keys of the whole sequence.

    `zigzag`: a ring with equal work. The sequence is cut into 2 n parts for n ranks, and rank i gets part i and part 2
    n - 1 - i. In a plain ring with a causal mask, the rank of the last part has most to compute.

    `ulysses`: before attention an all-to-all gives each rank some heads of the whole sequence; after it, another one
    gives each rank its part of the sequence back. The number of KV heads on a rank must be a multiple of the ranks.

    Two lines for one dim split it over two axes, the first line outermost: `ring` across nodes, `ulysses` inside
    them.
    """

    USAGE = "context WHERE dim NAME over AXIS using TYPE"
    LAYOUT = True
    ONCE = False

    where: tuple[Word, ...] = argument(lambda line: line.words("where"))
    dim: Word = argument(lambda line: line.word("dim"))
    axis: Word = argument(lambda line: line.word("over"))
    method: str = argument(lambda line: line.text("using"))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from scope.check_axis(self.axis)
        message = f"attention does not work across ranks by `{self.method}`"
        yield from check_known(self.arguments.word("using"), METHODS, message)
        yield from check_dim(scope, self.dim)
        for line in scope.before(self):
            if line.axis.text == self.axis.text:
                message = f"a sequence is split over `{self.axis.text}` already"
                related = (Label(line.axis.span, "given here first"),)
                help_ = "name the modules of both in one line, or use another axis"
                yield Diagnostic(REPEATED, message, Label(self.axis.span), related, help=help_)
                return
            if line.dim.text == self.dim.text and "ulysses" not in (line.method, self.method):
                message = f"two lines give `{self.dim.text}` two methods: `{line.method}` and `{self.method}`"
                related = (Label(line.arguments.span("using"), "given here first"),)
                help_ = "split one dim over two axes with `using ulysses` in one of the lines, or over one axis"
                yield Diagnostic(CONFLICT, message, Label(self.arguments.span("using")), related, help=help_)
                return
