"""``optimizer``: the updates of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ....grammar.codes import BAD_VALUE, MISSING_STATEMENT, UNEXPECTED_ARGUMENT
from ....grammar.diagnostics import Diagnostic, Label, PlanError
from ....grammar.nearest import did_you_mean, listed
from ....grammar.syntax import Word
from ....grammar.usage import Arguments
from ...program.optimizers import NOT_BY_ENTRY, OPTIMIZERS, OptimizerRow, kept_slots
from ..directive import NOT_NEGATIVE, ONE_OR_MORE, Directive, Literal, Scope, argument, read_literals
from ..rates import LIMITS, RATE_TABLE, OptimizerGroup, Rates, rates_of, untaken
from .steps import Steps


@dataclass(frozen=True)
class Optimizer(Directive):
    """The optimizer that updates parameters, one of `torch.optim` with its meaning and defaults: `adamw`, `sgd`,
    `adam`, `nadam`, `radam`, `adamax`, `adagrad`, `adadelta` or `rmsprop`. They update each entry by itself, so a rank
    updates its part of a split parameter. Others of torch do not, and are refused.

    `clip` bounds the global norm of the gradients. `betas`, `eps`, `momentum` and `nesterov` are those of optimizers
    that have them; further arguments stand in parentheses: `optimizer rmsprop (alpha=0.95, centered=true) lr 1e-3`.

    `optimizer on WHERE`, a further line, gives other arguments to some parameters, or to modules with all of theirs:
    `optimizer on head.* lr 1e-4`, `optimizer on **.bias, **.norm* weight_decay 0`. Each argument is that of the last
    line that names the parameter and has it. The rate of a group keeps its ratio to the rate of the first line in every
    step.

    `lr 3e-4` is the rate of every step. `lr cosine 3e-4` and `lr linear 3e-4` begin at it, fall by half a cosine or a
    line to the rate that `to` gives (else 0), and stay there. They reach it at step `over`, or without that at the last
    of the plan's `steps`, also if `parc run --steps` trains for another number. `lr wsd 3e-4 fall N` stays at it, and
    falls in a line in the last N of these steps (warmup, stable, decay). `warmup N` rises to the rate in the N
    steps before: step n of them has n/N of it.

    `lr table [1 0, 100 3e-4, 1000 3e-5]` gives the rates of some steps, counted from 1. Between two of them the rate
    moves in a line; before the first and after the last it stays. `lr table "rates.txt"` reads such rows from a file
    beside the plan, one a line, as `100 3e-4`; a build keeps them. A group's ratio is that to the table's largest rate.
    """

    USAGE = (
        "optimizer NAME [ARGS] lr RATE [warmup N] [to X] [over N] [fall N] [weight_decay X] [clip X] [betas PAIR]"
        " [eps X] [momentum X] [nesterov]"
        " | [ARGS] on WHERE [lr RATE] [weight_decay X] [betas PAIR] [eps X] [momentum X] [nesterov]"
    )

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("schedule", "scheduler", "lr_scheduler", "cosine", "decay"), "lr cosine 3e-4 warmup 100 to 3e-5"
        ),
        "linear": "lr linear 3e-4 warmup 100",
        "constant": "lr 3e-4",
        "wsd": "lr wsd 3e-4 warmup 100 fall 200",
        **dict.fromkeys(("min_lr", "lr_min", "eta_min"), "lr cosine 3e-4 to 3e-5"),
        **dict.fromkeys(("max_norm", "max_grad_norm", "clip_grad_norm"), "clip 1.0"),
    }

    LIMITS = (
        *LIMITS,
        *((name, NOT_NEGATIVE) for name in ("warmup", "to")),
        ("fall", ONE_OR_MORE),
        ("clip", (lambda value: value > 0, "above 0")),
    )

    name: str = argument(lambda line: line.text("name"))
    values: tuple[tuple[str, Literal], ...] = argument(lambda line: read_literals(line.bindings("args")))
    table: Rates = argument(lambda line: _table(line))
    shape: str = argument(lambda line: _shape(line))  # or "cosine", "linear", "wsd", "table"
    warmup: int = argument(lambda line: int(line.number("warmup", 0)))
    to: float = argument(lambda line: float(line.number("to", 0)))
    over: int | None = argument(lambda line: int(line.number("over", 0)) if "over" in line else None)
    fall: int = argument(lambda line: int(line.number("fall", 0)))
    weight_decay: float = argument(lambda line: float(line.number("weight_decay", _row(line).weight_decay)))
    clip: float | None = argument(lambda line: float(line.number("clip", 0)) if "clip" in line else None)
    betas: tuple[float, ...] = argument(lambda line: tuple(map(float, line.numbers("betas"))) or (0.9, 0.999))
    eps: float = argument(lambda line: float(line.number("eps", _row(line).eps)))
    momentum: float = argument(lambda line: float(line.number("momentum", 0)))
    nesterov: bool = argument(lambda line: "nesterov" in line)

    @classmethod
    def form(cls, arguments: Arguments) -> type[Directive]:
        return OptimizerGroup if "on" in arguments else cls

    @classmethod
    def none(cls, arguments: Arguments) -> Optimizer:
        """Return the placeholder of a plan for inference, which updates nothing. ``arguments`` are those of the line at
        which messages point."""
        return cls(
            arguments, "sgd", (), (), "constant", warmup=0, to=0.0, over=None, fall=0, weight_decay=0.0, clip=None,
            betas=(0.9, 0.999), eps=OPTIMIZERS["sgd"].eps, momentum=0.0, nesterov=False,
        )  # fmt: skip

    @property
    def lr(self) -> float:
        """The peak rate: of a table the largest."""
        return max((rate for _, rate in self.table), default=float(self.arguments.number("lr", 0)))

    @property
    def moments(self) -> int:
        """The number of state tensors of each parameter."""
        return len(self._kept(dict(self.values)))

    def _kept(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        return kept_slots({"name": self.name, "momentum": self.momentum, "arguments": arguments})

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        if self.name not in OPTIMIZERS:
            help_ = did_you_mean(self.name, OPTIMIZERS, f"there are {listed([*OPTIMIZERS])}")
            message = f"no optimizer is called `{self.name}`"
            if (reason := NOT_BY_ENTRY.get(self.name.lower())) is not None:
                message = f"`{self.name}` {reason}, and a rank has parts of parameters"
                help_ = f"choose an optimizer that updates each entry separately: {listed([*OPTIMIZERS])}"
            yield Diagnostic(BAD_VALUE, message, Label(self.arguments.span("name")), help=help_)
        else:
            yield from untaken(self.arguments, self.name)
            for group in scope.all(OptimizerGroup):
                yield from untaken(group.arguments, self.name)
                yield from self._check_group(group)
        yield from super().check(scope)
        yield from self._check_rate(scope)
        if self.nesterov and self.name == "sgd" and self.momentum <= 0:
            message = "`nesterov` needs a momentum"
            yield Diagnostic(BAD_VALUE, message, Label(self.arguments.span("nesterov")), help="add `momentum 0.9`")

    def _check_group(self, group: OptimizerGroup) -> Iterator[Diagnostic]:
        """Yield errors for arguments of a group that conflict with the optimizer's own line."""
        values = dict(self.values)
        for name, value in group.given.items():
            if self._kept({**values, name: value}) != self._kept(values):
                message = f"a group with another `{name}` would keep other state than the rest"
                span = group.arguments.span(name if name in group.arguments else "args")
                related = (Label(self.span, "the optimizer"),)
                help_ = (
                    "all parameters must keep the same tensors: write it on the optimizer's own line, or leave it out"
                )
                yield Diagnostic(BAD_VALUE, message, Label(span), related, help=help_)
        if "lr" in group.arguments and not self.lr and (self.table or self.arguments.numbers("lr")):
            message, label = "the group's rate has no ratio to a rate of 0", Label(group.arguments.span("lr"))
            related = (Label(self.arguments.span("lr"), "the optimizer's"),)
            yield Diagnostic(BAD_VALUE, message, label, related, help="give the optimizer's own line a rate above 0")

    def _check_rate(self, scope: Scope) -> Iterator[Diagnostic]:
        """Yield errors of the learning-rate schedule."""
        yield from self._check_table()
        if self.shape in ("constant", RATE_TABLE):
            rate = "a constant rate" if self.shape == "constant" else "a table of rates"
            help_ = (
                "remove it: the table has every rate" if self.shape == RATE_TABLE else f"write `lr cosine {self.lr:g}`"
            )
            for clause in ("to", "over", "fall", "warmup")[: 4 if self.shape == RATE_TABLE else 3]:
                if clause in self.arguments:
                    label = Label(self.arguments.span(clause))
                    yield Diagnostic(UNEXPECTED_ARGUMENT, f"{rate} has no `{clause}`", label, help=help_)
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
            message = f"the rate rises for {self.warmup} steps and falls for {self.fall}, but its last step is {over}"
            help_ = "write a smaller `fall`, or a larger `over`"
            yield Diagnostic(BAD_VALUE, message, Label(self.arguments.span("fall")), help=help_)
        if over is not None and over <= self.warmup:
            span = self.arguments.span("over" if self.over is not None else "lr")
            message = f"the rate's last step is {over}, but its warmup has {self.warmup} steps"
            yield Diagnostic(BAD_VALUE, message, Label(span), help="end the rate's fall after its warmup")

    def _check_table(self) -> Iterator[Diagnostic]:
        """Yield errors of a table of rates, and of one without the word `table`."""
        span = self.arguments.span("lr")
        try:
            if self.shape == RATE_TABLE and not rates_of(self.arguments.statement):
                help_ = 'write `lr table [1 0, 100 3e-4]`, or `lr table "rates.txt"`'
                yield Diagnostic(BAD_VALUE, "`lr table` has no table", Label(span), help=help_)
        except PlanError as error:
            yield from error.diagnostics
        if self.shape != RATE_TABLE and not self.arguments.numbers("lr"):
            message = f"`lr{f' {self.shape}' * (self.shape != 'constant')}` takes a number"
            yield Diagnostic(BAD_VALUE, message, Label(span), help="a table of rates is written after `lr table`")


def _shape(arguments: Arguments) -> str:
    return next((item.text for item in arguments.items("lr") if isinstance(item, Word)), "constant")


def _row(arguments: Arguments) -> OptimizerRow:
    return OPTIMIZERS.get(arguments.text("name"), OPTIMIZERS["sgd"])


def _table(arguments: Arguments) -> Rates:
    try:
        return rates_of(arguments.statement)
    except PlanError:  # `check` finds it again
        return ()
