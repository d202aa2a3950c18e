"""``zero``: the state of training stored in parts over ranks that compute alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes_language import BAD_VALUE
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.syntax import Word
from ..directive import Directive, Scope, argument
from .node import check_levels

LEVELS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Zero(Directive):
    """Stores the state of training in parts over an axis whose ranks each compute with whole weights (ZeRO, FSDP).

    Level 1 splits the optimizer's state: every rank updates its part of each parameter, and once a step the ranks
    gather them. Level 2 splits gradients too: every backward sums a block's gradients into the ranks' parts, as soon as
    the block is done. Level 3 splits the parameters as well: forward and backward gather those of a block just before
    they use them, and free them after. Level 0 is none of this, as is an axis of size 1.

    `within node` splits only over those ranks of the axis that share a node (hybrid sharding, HSDP): gathers stay
    inside nodes, and what crosses them are sums of the parts of gradients.

    What is gathered and freed together is a unit: a numbered module (`layers.3`), or each module that `unit` names. A
    module inside two units belongs to the inner one. `unit layers.*.attn, layers.*.mlp` gathers halves of a layer one
    after the other, in less memory and more messages. A named unit has its parameters for itself.

    A parameter is split along its first dim that the ranks divide. `WHERE` names modules, with all their parameters, or
    parameters; without it, all are meant. Losses, gradients and checkpoints are the same at every level.
    """

    USAGE = "zero LEVEL over AXIS [within node] [unit WHERE] [on WHERE]"
    ONCE = False

    level: int = argument(lambda given: int(given.number("level", 0)))
    axis: Word = argument(lambda given: given.word("over"))
    within: bool = argument(lambda given: "within node" in given)
    units: tuple[Word, ...] = argument(lambda given: given.words("unit"))
    where: tuple[Word, ...] = argument(lambda given: given.words("on"))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from scope.check_axis(self.axis, of_views=True)
        if self.arguments.number("level", 0) not in LEVELS:
            label = Label(self.arguments.span("level"))
            help_ = "write `zero 1`, `zero 2` or `zero 3`; `zero 0` is none"
            yield Diagnostic(BAD_VALUE, f"there is no level {self.level} of ZeRO", label, help=help_)
        if self.within:
            yield from check_levels(scope, self.axis, Label(self.arguments.span("within node")))
