"""``optimizer``: how parameters are updated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from ...grammar.codes_language import BAD_VALUE, UNEXPECTED_ARGUMENT
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.nearest import did_you_mean, listed
from ...grammar.usage import Arguments
from ..directive import Directive, Scope, check_number

# The clauses that each optimizer takes beside `lr`, `weight_decay` and `clip`.
OPTIMIZERS: dict[str, tuple[str, ...]] = {"adamw": ("betas", "eps"), "sgd": ("momentum", "nesterov")}


@dataclass(frozen=True)
class Optimizer(Directive):
    """How parameters are updated: `adamw` or `sgd`, with the meaning and defaults of `torch.optim`.

    `clip` bounds the global norm of the gradients. `betas` and `eps` are AdamW's, `momentum` and `nesterov` SGD's.
    """

    USAGE = "optimizer NAME lr X [weight_decay X] [clip X] [betas PAIR] [eps X] [momentum X] [nesterov]"

    name: str
    lr: float
    weight_decay: float
    clip: float | None
    betas: tuple[float, float]
    eps: float
    momentum: float
    nesterov: bool

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        name = arguments.word("name")
        assert name is not None

        def number(key: str, default: float) -> float:
            value = arguments.number(key)
            return default if value is None else float(value)

        clip = arguments.number("clip")
        betas = arguments.numbers("betas") or (0.9, 0.999)
        return cls(
            arguments,
            name=name.text,
            lr=number("lr", 0.0),
            weight_decay=number("weight_decay", 0.01 if name.text == "adamw" else 0.0),
            clip=None if clip is None else float(clip),
            betas=(float(betas[0]), float(betas[1])),
            eps=number("eps", 1e-8),
            momentum=number("momentum", 0.0),
            nesterov="nesterov" in arguments,
        )

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
        for name in ("lr", "weight_decay", "eps"):
            yield from check_number(self.arguments, name, lambda value: value >= 0, "0 or more")
        yield from check_number(self.arguments, "clip", lambda value: value > 0, "above 0")
        yield from check_number(self.arguments, "betas", lambda value: 0 <= value < 1, "from 0 to below 1")
        yield from check_number(self.arguments, "momentum", lambda value: value >= 0, "0 or more")
        if self.nesterov and self.name == "sgd" and self.momentum <= 0:
            message = "`nesterov` needs a momentum"
            yield Diagnostic(BAD_VALUE, message, Label(self.arguments.span("nesterov")), help="add `momentum 0.9`")
