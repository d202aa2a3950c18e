"""``zero``: training state sharded over ranks that compute with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes import BAD_VALUE
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.syntax import Word
from ..directive import Directive, Scope, argument
from .node import check_levels

LEVELS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Zero(Directive):
    """Stores the training state in parts over an axis whose ranks all compute with the same weights (ZeRO, FSDP).

    Level 1 splits the optimizer's state: each rank updates its part of each parameter, and once a step all ranks gather
    the new parameters, block by block beside the first forward. Level 2 splits gradients too: as soon as the backward
    of a block is done, its gradients are summed into the ranks' parts. Level 3 splits the parameters as well: forward
    and backward gather the weights of a block just before they use them, and free them after. Level 0 does nothing, and
    so does an axis of size 1.

    `within node` splits only over the ranks of the axis that share a node (hybrid sharding, HSDP): gathers stay inside
    nodes, and across nodes only the parts of gradients are summed.

    Weights that are gathered and freed together are a unit: a numbered module (`layers.3`), or each module that `unit`
    names. A module inside two units belongs to the inner one. `unit layers.*.attn, layers.*.mlp` gathers one half of a
    layer after the other, in less memory and more messages. A named unit shares no parameter with the rest of the
    model.

    A parameter is split along its first dim that is a multiple of the ranks. `WHERE` names modules, with all their
    parameters, or parameters; without it, all are meant. Losses, gradients and checkpoints are the same at every level.
    """

    USAGE = "zero LEVEL over AXIS [within node] [unit WHERE] [on WHERE]"
    LAYOUT = True
    TRAINING = (("", "stores the state of training in parts"),)
    INSTEAD = " (`column`, `row`, `vocab`, `experts`, `shard` and `stage` split weights)"
    ONCE = False

    level: int = argument(lambda line: int(line.number("level", 0)))
    axis: Word = argument(lambda line: line.word("over"))
    within: bool = argument(lambda line: "within node" in line)
    units: tuple[Word, ...] = argument(lambda line: line.words("unit"))
    where: tuple[Word, ...] = argument(lambda line: line.words("on"))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from scope.check_axis(self.axis, of_views=True)
        if self.arguments.number("level", 0) not in LEVELS:
            label = Label(self.arguments.span("level"))
            help_ = "write `zero 1`, `zero 2` or `zero 3`; `zero 0` is none"
            yield Diagnostic(BAD_VALUE, f"there is no level {self.level} of ZeRO", label, help=help_)
        if self.within:
            yield from check_levels(scope, self.axis, Label(self.arguments.span("within node")))
