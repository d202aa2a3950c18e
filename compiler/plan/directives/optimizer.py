"""``optimizer``: the updates of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes_language import BAD_VALUE, MISSING_STATEMENT, UNEXPECTED_ARGUMENT
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.nearest import did_you_mean, listed
from ....grammar.syntax import Word
from ....grammar.usage import Arguments
from ...program.optimizers import NOT_BY_ENTRY, OPTIMIZERS, OptimizerRow, kept_slots
from ..directive import NOT_NEGATIVE, Directive, Literal, Scope, argument, check_unique, read_literals
from .steps import Steps

_CLAUSES = tuple(dict.fromkeys(clause for row in OPTIMIZERS.values() for clause in row.clauses))
"""The clauses that not every optimizer takes."""


@dataclass(frozen=True)
class Optimizer(Directive):
    """The optimizer that updates parameters, one of `torch.optim` with its meaning and defaults: `adamw`, `sgd`,
    `adam`, `nadam`, `radam`, `adamax`, `adagrad`, `adadelta` or `rmsprop`. They update each entry by itself, so a rank
    updates its part of a split parameter. Others of torch do not, and are refused.

    `clip` bounds the global norm of the gradients. `betas`, `eps`, `momentum` and `nesterov` are those of optimizers
    that have them; further arguments stand in parentheses: `optimizer rmsprop (alpha=0.95, centered=true) lr 1e-3`.
    `decay off on WHERE`: parameters, or modules with all of theirs, that `weight_decay` leaves alone.

    `lr 3e-4` is the rate of every step. `lr cosine 3e-4` and `lr linear 3e-4` begin at it, fall by half a cosine or a
    line to the rate that `to` gives (else 0), and stay there. They reach it at step `over`, or without that at the last
    of the plan's `steps`, also if `parc run --steps` trains for another number. `lr wsd 3e-4 fall N` stays at it, and
    falls in a line in the last N of these steps (warmup, stable, decay). `warmup N` rises to the rate in the N
    steps before: step n of them has n/N of it.
    """

    USAGE = (
        "optimizer NAME [ARGS] lr RATE [warmup N] [to X] [over N] [fall N] [weight_decay X] [decay off on WHERE]"
        " [clip X] [betas PAIR] [eps X] [momentum X] [nesterov]"
    )

    LIMITS = (
        *((name, NOT_NEGATIVE) for name in ("lr", "weight_decay", "eps", "momentum", "warmup", "to", "fall")),
        ("clip", (lambda value: value > 0, "above 0")),
        ("betas", (lambda value: 0 <= value < 1, "from 0 to below 1")),
    )

    name: str = argument(lambda given: given.text("name"))
    values: tuple[tuple[str, Literal], ...] = argument(lambda given: read_literals(given.bindings("args")))
    lr: float = argument(lambda given: float(given.number("lr", 0)))
    shape: str = argument(lambda given: given.text("lr", "constant"))  # or "cosine", "linear", "wsd"
    warmup: int = argument(lambda given: int(given.number("warmup", 0)))
    to: float = argument(lambda given: float(given.number("to", 0)))
    over: int | None = argument(lambda given: int(given.number("over", 0)) if "over" in given else None)
    fall: int = argument(lambda given: int(given.number("fall", 0)))
    no_decay: tuple[Word, ...] = argument(lambda given: given.words("decay off on"))
    weight_decay: float = argument(lambda given: float(given.number("weight_decay", _row(given).weight_decay)))
    clip: float | None = argument(lambda given: float(given.number("clip", 0)) if "clip" in given else None)
    betas: tuple[float, ...] = argument(lambda given: tuple(map(float, given.numbers("betas"))) or (0.9, 0.999))
    eps: float = argument(lambda given: float(given.number("eps", _row(given).eps)))
    momentum: float = argument(lambda given: float(given.number("momentum", 0)))
    nesterov: bool = argument(lambda given: "nesterov" in given)

    @property
    def moments(self) -> int:
        """The number of state tensors of each parameter."""
        return len(kept_slots({"name": self.name, "momentum": self.momentum, "arguments": dict(self.values)}))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        if self.name not in OPTIMIZERS:
            help_ = did_you_mean(self.name, OPTIMIZERS, f"there are {listed([*OPTIMIZERS])}")
            message = f"no optimizer is called `{self.name}`"
            if (reason := NOT_BY_ENTRY.get(self.name.lower())) is not None:
                message = f"`{self.name}` {reason}, and a rank has parts of parameters"
                help_ = f"choose one that updates each entry by itself: {listed([*OPTIMIZERS])}"
            yield Diagnostic(BAD_VALUE, message, Label(self.arguments.span("name")), help=help_)
        for clause in _CLAUSES if self.name in OPTIMIZERS else ():
            if clause in self.arguments and clause not in OPTIMIZERS[self.name].clauses:
                message = f"`{self.name}` has no `{clause}`"
                owners = [f"`{name}`" for name, row in OPTIMIZERS.items() if clause in row.clauses]
                help_ = f"remove it: `{clause}` is a clause of {', '.join(owners)}"
                yield Diagnostic(UNEXPECTED_ARGUMENT, message, Label(self.arguments.span(clause)), help=help_)
        yield from self._check_values()
        yield from super().check(scope)
        yield from self._check_rate(scope)
        if self.nesterov and self.name == "sgd" and self.momentum <= 0:
            message = "`nesterov` needs a momentum"
            yield Diagnostic(BAD_VALUE, message, Label(self.arguments.span("nesterov")), help="add `momentum 0.9`")

    def _check_values(self) -> Iterator[Diagnostic]:
        """Find errors of the arguments in parentheses."""
        known = OPTIMIZERS[self.name].arguments if self.name in OPTIMIZERS else {}
        bindings = self.arguments.bindings("args")
        yield from check_unique(tuple(binding.name for binding in bindings), "argument")
        for binding, (name, value) in zip(bindings, self.values, strict=True):
            label = Label(binding.span)
            if self.name in OPTIMIZERS and name not in known:
                own = f"in parentheses it takes {listed([*known])}" if known else "it takes none in parentheses"
                help_ = f"write `{name} {value}` without parentheses" if name in _CLAUSES + _COMMON else own
                message = f"`{self.name}` has no argument `{name}`"
                yield Diagnostic(UNEXPECTED_ARGUMENT, message, label, help=help_)
            elif name in known and not _fits(value, known[name]):
                wanted = "`true` or `false`" if known[name] is bool else "a number, not below 0"
                yield Diagnostic(BAD_VALUE, f"`{name}` is {wanted}", label, help=f"remove it, or write {wanted}")

    def _check_rate(self, scope: Scope) -> Iterator[Diagnostic]:
        """Find errors of the learning rate's course over the steps."""
        if self.shape == "constant":
            for clause in ("to", "over", "fall"):
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
        if ("fall" in self.arguments) != (self.shape == "wsd"):
            clause = "lr" if self.shape == "wsd" else "fall"
            message = "`lr wsd` has no `fall`" if self.shape == "wsd" else f"`lr {self.shape}` falls in all steps"
            help_ = "add `fall 100`, the number of its last steps" if self.shape == "wsd" else "remove `fall`"
            yield Diagnostic(BAD_VALUE, message, Label(self.arguments.span(clause)), help=help_)
        elif over is not None and self.warmup < over < self.warmup + self.fall:
            message = f"the rate rises in {self.warmup} steps and falls in {self.fall}, and its last step is {over}"
            help_ = "let it fall in fewer steps, or end later"
            yield Diagnostic(BAD_VALUE, message, Label(self.arguments.span("fall")), help=help_)
        if over is not None and over <= self.warmup:
            span = self.arguments.span("over" if self.over is not None else "lr")
            message = f"the rate's last step is {over}, and its warmup has {self.warmup}"
            yield Diagnostic(BAD_VALUE, message, Label(span), help="end the rate's fall after its warmup")


_COMMON = ("lr", "weight_decay", "clip")


def _row(given: Arguments) -> OptimizerRow:
    return OPTIMIZERS.get(given.text("name"), OPTIMIZERS["sgd"])


def _fits(value: Literal, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
