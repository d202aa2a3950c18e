"""``steps``: the length of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes_language import NO_EFFECT
from ....grammar.diagnostics import Diagnostic, Label, Severity
from ..directive import ONE_OR_MORE, Directive, argument


@dataclass(frozen=True)
class Steps(Directive):
    """The number of optimizer steps of a run. `parc run --steps` trains for another number, with the same learning
    rates.
    """

    USAGE = "steps N"
    LIMITS = (("n", ONE_OR_MORE),)

    value: int = argument(lambda given: int(given.number("n", 0)))

    def check_inference(self) -> Iterator[Diagnostic]:
        message = "`steps` has no effect in a plan without `loss` and `optimizer`, which trains nothing"
        yield Diagnostic(NO_EFFECT, message, Label(self.span), help="remove the line", severity=Severity.WARNING)
