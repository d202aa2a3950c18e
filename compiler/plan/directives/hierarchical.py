"""``hierarchical``: sums and gathers in two levels, inside nodes and across them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes import REPEATED
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.syntax import Word
from ..directive import Directive, Scope, argument
from .node import check_levels


@dataclass(frozen=True)
class Hierarchical(Directive):
    """Does sums, gathers and exchanges of tokens over an axis in two levels, inside nodes and across them. It needs a
    `node` line.

    An all-reduce over the whole axis becomes three collectives: a reduce-scatter among the ranks of a node, an
    all-reduce of each part across nodes, and an all-gather inside the node. A reduce-scatter goes inside nodes first,
    then across; an all-gather goes across first, then inside. So each rank sends only its own part to other nodes.
    If no dim of a value divides, as in a single number, the value is summed in one level. Where `compress` names the
    axis, what travels across nodes is compressed.

    Tokens on the way to their experts go inside the node first, to the rank that has the same place in its node as the
    expert has in its own; then across. They come back the other way round. So each rank exchanges messages with one
    rank of each other node.
    """

    USAGE = "hierarchical over AXIS"
    LAYOUT = True
    ONCE = False

    axis: Word = argument(lambda line: line.word("over"))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from scope.check_axis(self.axis, of_views=True)
        yield from check_levels(scope, self.axis, Label(self.axis.span), both=True)
        for line in scope.before(self):
            if line.axis.text == self.axis.text:
                message = f"sums over `{self.axis.text}` are in two levels already"
                related = (Label(line.axis.span, "given here first"),)
                yield Diagnostic(REPEATED, message, Label(self.axis.span), related, help="remove one of the lines")
                return
