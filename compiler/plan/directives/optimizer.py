"""``optimizer``: the updates of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes_language import BAD_VALUE, MISSING_STATEMENT, UNEXPECTED_ARGUMENT
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.nearest import did_you_mean, listed
from ....grammar.syntax import Word
from ..directive import NOT_NEGATIVE, Directive, Scope, argument
from .steps import Steps

# The clauses that each optimizer takes beside `lr`, `weight_decay` and `clip`.
OPTIMIZERS: dict[str, tuple[str, ...]] = {"adamw": ("betas", "eps"), "sgd": ("momentum", "nesterov")}


@dataclass(frozen=True)
class Optimizer(Directive):
    """The optimizer that updates parameters: `adamw` or `sgd`, with the meaning and defaults of `torch.optim`.

    `clip` bounds the global norm of the gradients. `betas` and `eps` are AdamW's, `momentum` and `nesterov` SGD's.
    `decay off on WHERE`: parameters, or modules with all of theirs, that `weight_decay` leaves alone.

    `lr 3e-4` is the rate of every step. `lr cosine 3e-4` and `lr linear 3e-4` begin at it, fall by half a cosine or a
    line to the rate that `to` gives (else 0), and stay there. They reach it at step `over`, or without that at the last
    of the plan's `steps`, also if `parc run --steps` trains for another number. `warmup N` rises to the rate in the N
    steps before: step n of them has n/N of it.
    """

    USAGE = (
        "optimizer NAME lr RATE [warmup N] [to X] [over N] [weight_decay X] [decay off on WHERE] [clip X]"
        " [betas PAIR] [eps X] [momentum X] [nesterov]"
    )

    LIMITS = (
        *((name, NOT_NEGATIVE) for name in ("lr", "weight_decay", "eps", "momentum", "warmup", "to")),
        ("clip", (lambda value: value > 0, "above 0")),
        ("betas", (lambda value: 0 <= value < 1, "from 0 to below 1")),
    )

    name: str = argument(lambda given: given.text("name"))
    lr: float = argument(lambda given: float(given.number("lr", 0)))
    shape: str = argument(lambda given: given.text("lr", "constant"))  # or "cosine", "linear"
    warmup: int = argument(lambda given: int(given.number("warmup", 0)))
    to: float = argument(lambda given: float(given.number("to", 0)))
    over: int | None = argument(lambda given: int(given.number("over", 0)) if "over" in given else None)
    no_decay: tuple[Word, ...] = argument(lambda given: given.words("decay off on"))
    weight_decay: float = argument(
        lambda given: float(given.number("weight_decay", 0.01 if given.text("name") == "adamw" else 0))
    )
    clip: float | None = argument(lambda given: float(given.number("clip", 0)) if "clip" in given else None)
    betas: tuple[float, ...] = argument(lambda given: tuple(map(float, given.numbers("betas"))) or (0.9, 0.999))
    eps: float = argument(lambda given: float(given.number("eps", 1e-8)))
    momentum: float = argument(lambda given: float(given.number("momentum", 0)))
    nesterov: bool = argument(lambda given: "nesterov" in given)

    @property
    def moments(self) -> int:
        """The number of state tensors of each parameter."""
        return 2 if self.name == "adamw" else int(self.momentum > 0)

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        if self.name not in OPTIMIZERS:
            help_ = did_you_mean(self.name, OPTIMIZERS, f"there are {listed(OPTIMIZERS)}")
            message = f"no optimizer is called `{self.name}`"
            yield Diagnostic(BAD_VALUE, message, Label(self.arguments.span("name")), help=help_)
        for owner, clauses in OPTIMIZERS.items():
            for clause in clauses:
                if owner != self.name and self.name in OPTIMIZERS and clause in self.arguments:
                    message = f"`{self.name}` has no `{clause}`"
                    help_ = f"remove it: `{clause}` is a clause of `{owner}`"
                    yield Diagnostic(UNEXPECTED_ARGUMENT, message, Label(self.arguments.span(clause)), help=help_)
        yield from super().check(scope)
        yield from self._check_rate(scope)
        if self.nesterov and self.name == "sgd" and self.momentum <= 0:
            message = "`nesterov` needs a momentum"
            yield Diagnostic(BAD_VALUE, message, Label(self.arguments.span("nesterov")), help="add `momentum 0.9`")

    def _check_rate(self, scope: Scope) -> Iterator[Diagnostic]:
        """Find errors of the learning rate's course over the steps."""
        if self.shape == "constant":
            for clause in ("to", "over"):
                if clause in self.arguments:
                    message = f"a constant rate has no `{clause}`"
                    label = Label(self.arguments.span(clause))
                    yield Diagnostic(UNEXPECTED_ARGUMENT, message, label, help=f"write `lr cosine {self.lr:g}`")
            return
        steps = scope.one(Steps)
        over = self.over if self.over is not None else steps.value if steps is not None else None
        if over is None and "steps" not in scope.broken:
            message = f"`lr {self.shape}` has no last step"
            label = Label(self.arguments.span("lr"))
            yield Diagnostic(MISSING_STATEMENT, message, label, help="add `over 1000`, or a line `steps 1000`")
        if over is not None and over <= self.warmup:
            span = self.arguments.span("over" if self.over is not None else "lr")
            message = f"the rate's last step is {over}, and its warmup has {self.warmup}"
            yield Diagnostic(BAD_VALUE, message, Label(span), help="end the rate's fall after its warmup")
