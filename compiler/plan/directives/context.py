"""``context``: a sequence that is split over an axis everywhere, and attention across its parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes_language import BAD_VALUE, REPEATED
from ....grammar.codes_placement import CONFLICT
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.nearest import did_you_mean, listed
from ....grammar.syntax import Word
from ..directive import Directive, Scope, argument
from .input import Input

METHODS = ("gather", "ring", "zigzag", "ulysses")


@dataclass(frozen=True)
class Context(Directive):
    """Splits a sequence over an axis (context parallelism): every input with the dim `NAME`, and by propagation every
    activation. Weights are as without the line; their gradients are summed over the axis. Positions and masks are those
    of the whole sequence, so a rank computes the same numbers as one device does for its part.

    Only attention needs other parts. `using` says how the attention of the modules `WHERE` gets them:

    `gather`: every rank gathers keys and values of the whole sequence, in backward again.

    `ring`: keys and values of one rank after the other come around while a rank computes with those that it has; in
    backward their gradients follow them. No rank ever holds keys of the whole sequence.

    `zigzag`: the same, and of 2 n parts of the sequence rank i has part i and part 2 n - 1 - i. Under a causal mask the
    ranks of a plain ring have unequal work: here it is equal.

    `ulysses`: all-to-alls split heads in place of the sequence before attention, and back behind it. The ranks must
    divide the heads of keys that a rank has.

    Two lines for one dim split it over two axes, the first outermost: `ring` across nodes, `ulysses` inside.
    """

    USAGE = "context WHERE dim NAME over AXIS using TYPE"
    ONCE = False

    where: tuple[Word, ...] = argument(lambda given: given.words("where"))
    dim: Word = argument(lambda given: given.word("dim"))
    axis: Word = argument(lambda given: given.word("over"))
    method: str = argument(lambda given: given.text("using"))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from scope.check_axis(self.axis)
        if self.method not in METHODS:
            help_ = did_you_mean(self.method, METHODS, f"there are {listed(METHODS)}")
            label = Label(self.arguments.span("using"))
            yield Diagnostic(BAD_VALUE, f"attention does not work across ranks by `{self.method}`", label, help=help_)
        dims = {dim: None for line in scope.all(Input) for dim in line.dims if isinstance(dim, str)}
        if self.dim.text not in dims:
            help_ = did_you_mean(self.dim.text, [*dims], f"inputs have {listed([*dims])}")
            yield Diagnostic(BAD_VALUE, f"no input has a dim `{self.dim.text}`", Label(self.dim.span), help=help_)
        for line in scope.all(Context):
            if line is self:
                return
            if line.axis.text == self.axis.text:
                message = f"a sequence is split over `{self.axis.text}` already"
                related = (Label(line.axis.span, "given here first"),)
                help_ = "name modules of both in one line, or take another axis"
                yield Diagnostic(REPEATED, message, Label(self.axis.span), related, help=help_)
                return
            if line.dim.text == self.dim.text and "ulysses" not in (line.method, self.method):
                message = f"keys along `{self.dim.text}` would come by `{line.method}` and by `{self.method}`"
                related = (Label(line.arguments.span("using"), "given here first"),)
                help_ = "split one dim over two axes with `using ulysses` in one of the lines, or over one axis"
                yield Diagnostic(CONFLICT, message, Label(self.arguments.span("using")), related, help=help_)
                return
