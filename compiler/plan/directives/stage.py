"""``stage``: the cuts of a model into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ....grammar.codes import NO_SCHEDULE, REPEATED, STAGE_AXIS
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.syntax import Call, Item, Number, Word
from ..directive import Directive, Scope, argument
from ..layouts import Fix, SplitWeights

BALANCED = "balanced over"


@dataclass(frozen=True)
class Stage(Directive):
    """Cuts the model into the stages of a pipeline, which run on the ranks along an axis. The `schedule` line says in
    which order.

    `before M` begins a stage at the first operator of module `M`; `after out(M)` begins one behind its last operator. A
    name or pattern makes a cut at each module that it matches, in the order in which the model runs them. Several lines
    add up, in any order. `balanced` chooses the cuts: the busiest rank has as few operations as possible in all
    its stages; among such choices, the fullest rank needs the least memory, with as many microbatches of each stage as
    the schedule keeps; among those, stages are as even as possible. This is exact where each rank has one stage.

    Stages are numbered from 0. An axis of p ranks with v chunks on each rank has p x v stages, so there is one cut
    fewer than that; stage k runs on the ranks with number k modulo p, or where the schedule says. Stages may be of
    unequal size; an embedding or a head may be a stage of its own. Nothing else can be placed over this axis. Over an
    axis of size 1 there are no stages.
    """

    USAGE = "stage before WHERE over AXIS | after OUTPUTS over AXIS | balanced over AXIS"
    LAYOUT = True
    ONCE = False

    axis: Word = argument(lambda line: line.word("over") or line.word(BALANCED))
    before: tuple[Word, ...] = argument(lambda line: line.words("before"))
    after: tuple[Word, ...] = argument(lambda line: tuple(_outputs(line.items("after"))))
    balanced: bool = argument(lambda line: BALANCED in line)

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from scope.check_axis(self.axis)
        first = scope.one(Stage)
        if first is not None and self is not first:
            yield from self._check_beside(first)
            return
        yield from self._check_placements(scope)
        if "schedule" not in scope.verbs:
            help_ = "add a line: `schedule 1f1b microbatches 8`"
            yield Diagnostic(NO_SCHEDULE, "stages have no schedule", Label(self.span), help=help_)

    def _check_beside(self, first: Stage) -> Iterator[Diagnostic]:
        """Find lines that cannot hold together."""
        if self.axis.text != first.axis.text:
            related = (Label(first.axis.span, "the axis of other cuts"),)
            message = f"stages are over `{first.axis.text}` and over `{self.axis.text}`"
            yield Diagnostic(STAGE_AXIS, message, Label(self.axis.span), related, help="name one axis in all lines")
        if self.balanced or first.balanced:
            related = (Label(first.span, "cuts are given here too"),)
            message = "`balanced` chooses all cuts: no other line gives any"
            help_ = "remove `stage balanced`, or the other `stage` lines"
            yield Diagnostic(REPEATED, message, Label(self.span), related, help=help_)

    def _check_placements(self, scope: Scope) -> Iterator[Diagnostic]:
        """Find placements of other lines on the axis of stages."""
        for other in scope.directives:
            for word in other.axes if isinstance(other, SplitWeights | Fix) else ():
                if word.text == self.axis.text:
                    related = (Label(self.axis.span, "the axis of stages"),)
                    message = f"`{word.text}` is the axis of stages: nothing is split over it"
                    help_ = "split over another axis of the mesh: the ranks along this one hold different stages"
                    yield Diagnostic(STAGE_AXIS, message, Label(word.span), related, help=help_)


def _outputs(calls: Iterable[Item]) -> Iterator[Word]:
    """Return the names in ``out(…)``; a number counts as a name."""
    for call in calls:
        for name in call.arguments if isinstance(call, Call) else ():
            if isinstance(name, Word | Number):
                yield Word(name.text, name.span)
