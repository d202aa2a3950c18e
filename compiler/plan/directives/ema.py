"""``ema``: averages of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes import BAD_VALUE
from ....grammar.diagnostics import Diagnostic, Label
from ..directive import ONE_OR_MORE, Directive, Scope, argument


@dataclass(frozen=True)
class Ema(Directive):
    """An exponential moving average of the weights: after a step, `average = X average + (1 - X) weight`.

    The average starts as the initial weights. With `every N` it changes only after each N-th step. Each rank keeps the
    averages of its own parts of the trained weights beside the optimizer's state; with `offload optimizer` they are in
    files or on the host too. Checkpoints hold them. `parc export --ema` writes them, `state_dict(ema=True)` returns
    them, and inside `with session.averaged():` a session computes with them.
    """

    USAGE = "ema X [every N]"
    TRAINING = (("", "averages the weights of steps"),)
    INSTEAD = " (`parc export --ema` writes averages, which `init from` reads)"
    LIMITS = (("every", ONE_OR_MORE),)

    decay: float = argument(lambda line: float(line.number("x", 0)))
    every: int = argument(lambda line: int(line.number("every", 1)))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from super().check(scope)
        if not 0 < self.decay < 1:
            message = f"each step keeps a share of the average, and {self.decay:g} is not a share"
            help_ = "write a number between 0 and 1, as `ema 0.999`"
            yield Diagnostic(BAD_VALUE, message, Label(self.arguments.span("x")), help=help_)
