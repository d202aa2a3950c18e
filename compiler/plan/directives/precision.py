"""``precision``: the type in which modules compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes_language import BAD_VALUE, NOT_SUPPORTED
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.syntax import Word
from ..directive import Directive, Scope, argument

WHOLE = "fp32"
TYPES = {WHOLE: "float32", "bf16": "bfloat16"}
"""The language's words for types."""
PLANNED = ("fp16", "fp8")


@dataclass(frozen=True)
class Precision(Directive):
    """The type in which modules compute: `bf16`, or `fp32`, the default. Of lines that name a module the last counts.

    `WHERE` names modules, with all inside them; without it, the whole model. Weights, their gradients as they are
    summed over microbatches and ranks, the optimizer's state and the loss stay float32: every weight is rounded once a
    microbatch, on its way into a product.

    In a `bf16` module products, convolutions and attention take and give bfloat16. Sums, means, norms, softmax, losses,
    and `exp`, `log`, `pow`, `rsqrt` and their like take and give float32. Every other operator takes the widest type of
    the activations that it reads. Values computed from weights and constants alone keep their type, and adapt to the
    activations that they meet. The results of a module are rounded to bfloat16, so values between modules, and
    messages, are half as large. A value that the model itself casts from a narrower type to float32 stays float32. In a
    model of float32 a cast to float32 does nothing and leaves no trace: name its module in a line `precision fp32 on
    WHERE`.
    """

    USAGE = "precision TYPE [on WHERE]"
    ONCE = False

    type: str = argument(lambda given: given.text("type"))
    where: tuple[Word, ...] = argument(lambda given: given.words("on"))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        label = Label(self.arguments.span("type"))
        if self.type in PLANNED:
            yield Diagnostic(NOT_SUPPORTED, f"`{self.type}` is not supported yet", label, help="write `precision bf16`")
        elif self.type not in TYPES:
            help_ = "write `precision bf16` or `precision fp32`"
            yield Diagnostic(BAD_VALUE, f"`{self.type}` is not a precision", label, help=help_)
