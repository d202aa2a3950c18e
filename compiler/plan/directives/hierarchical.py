"""``hierarchical``: sums and gathers in two levels, inside nodes and across them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes_language import REPEATED
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.syntax import Word
from ..directive import Directive, Scope, argument
from .node import check_levels


@dataclass(frozen=True)
class Hierarchical(Directive):
    """Makes sums, gathers and exchanges of tokens over an axis in two levels, inside nodes and across them; needs a
    `node` line.

    An all-reduce over the whole axis becomes a reduce-scatter among the ranks of a node, an all-reduce of their parts
    across nodes and an all-gather inside; a reduce-scatter goes inside first, an all-gather across first. So every rank
    sends its own part to other nodes. Sums of values that no dim cuts evenly, such as single numbers, stay as they are.

    Tokens go to their experts inside the node first, each to the rank with its expert's place there, and then across;
    they come back the other way round. So a rank sends messages to one rank of each other node.
    """

    USAGE = "hierarchical over AXIS"
    ONCE = False

    axis: Word = argument(lambda given: given.word("over"))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from scope.check_axis(self.axis, of_views=True)
        yield from check_levels(scope, self.axis, Label(self.axis.span), both=True)
        for line in scope.all(Hierarchical):
            if line is self:
                return
            if line.axis.text == self.axis.text:
                message = f"sums over `{self.axis.text}` are in two levels already"
                related = (Label(line.axis.span, "given here first"),)
                yield Diagnostic(REPEATED, message, Label(self.axis.span), related, help="remove one of the lines")
                return
