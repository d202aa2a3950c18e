"""``precision``: the type in which modules compute, and the loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes import BAD_VALUE, NOT_SUPPORTED, REPEATED, UNEXPECTED_ARGUMENT, UNSCALED
from ....grammar.diagnostics import Diagnostic, Label, Severity
from ....grammar.syntax import Word
from ...program.step_values import DYNAMIC, LossScale
from ..directive import Directive, Limit, Scope, argument

WHOLE, HALF = "fp32", "fp16"
TYPES = {WHOLE: "float32", "bf16": "bfloat16", HALF: "float16"}
"""The language's words for types."""
PLANNED = ("fp8",)
_LEAST, _MOST = 2.0**-24, 2.0**100
_SCALES: Limit = (lambda value: _LEAST <= value <= _MOST, "from 2^-24 to 2^100")


@dataclass(frozen=True)
class Precision(Directive):
    """The type in which modules compute: `bf16`, `fp16`, or `fp32`, which is the default. If several lines name a
    module, the last one counts.

    `WHERE` names modules, with all that is inside them; without it, the whole model is meant. These stay float32:
    weights, sums of gradients over microbatches and ranks, the optimizer's state, and the loss. Each weight is rounded
    once a step.

    In a `bf16` module, products, convolutions and attention take bfloat16 and give bfloat16. Sums, means, norms,
    softmax, losses, and `exp`, `log`, `pow`, `rsqrt` and the like take float32 and give float32. Any other operator
    takes the widest type of the activations that it reads. Values that are computed from weights and constants alone
    keep their type, until they meet activations. The results of a module are rounded to bfloat16, so values between
    modules, and messages, are half as large. If the model's code casts a narrow value to float32, the value stays
    float32. But a cast of a float32 value to float32 does nothing, and cannot be seen: to keep such a module in
    float32, write `precision fp32 on WHERE`.

    `fp16` does the same with float16, which has a short range: gradients below 6e-8 become zero. `loss_scale 1024`
    multiplies the loss by 1024 before backward, and divides gradients by 1024 before norm, clipping and update.
    `loss_scale dynamic` begins at 65536. If the norm of the gradients is not finite, the step is skipped (weights,
    optimizer and buffers stay as they were) and the scale is halved; after 2000 good steps in a row it is doubled.
    `torch.amp.GradScaler` has the same numbers. There is one loss scale for the whole model.
    """

    USAGE = "precision TYPE [on WHERE] [loss_scale SCALE]"
    LAYOUT = True
    ONCE = False
    LIMITS = (("loss_scale", _SCALES),)
    TRAINING = (("loss_scale", "scales gradients"),)

    type: str = argument(lambda line: line.text("type"))
    where: tuple[Word, ...] = argument(lambda line: line.words("on"))
    loss_scale: LossScale = argument(
        lambda line: DYNAMIC if line.text("loss_scale") else line.number("loss_scale", None)
    )

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from super().check(scope)
        label = Label(self.arguments.span("type"))
        if self.type in PLANNED:
            yield Diagnostic(NOT_SUPPORTED, f"`{self.type}` is not supported yet", label, help="write `precision bf16`")
        elif self.type not in TYPES:
            help_ = "write `precision bf16`, `precision fp16` or `precision fp32`"
            yield Diagnostic(BAD_VALUE, f"`{self.type}` is not a precision", label, help=help_)
        lines = scope.all(Precision)
        scaled = [line for line in lines if line.loss_scale is not None]
        if self.loss_scale is not None:
            yield from self._check_scale(scaled[0])
        elif scope.trains and not scaled and self is next((line for line in lines if line.type == HALF), None):
            message = "small gradients of float16 become zero without a loss scale"
            help_ = "write `precision fp16 loss_scale dynamic`, or `precision bf16`, which needs none"
            yield Diagnostic(UNSCALED, message, label, help=help_, severity=Severity.WARNING)

    def _check_scale(self, first: Precision) -> Iterator[Diagnostic]:
        label = Label(self.arguments.span("loss_scale"))
        if self.type != HALF:
            message, help_ = f"`{self.type}` has no `loss_scale`", "remove it: its range is that of float32"
            yield Diagnostic(UNEXPECTED_ARGUMENT, message, label, help=help_)
        elif self.loss_scale != first.loss_scale:
            related = (Label(first.arguments.span("loss_scale"), "given here first"),)
            message = "a plan has one loss scale"
            yield Diagnostic(REPEATED, message, label, related, help="write it in one of the lines, or the same in all")
