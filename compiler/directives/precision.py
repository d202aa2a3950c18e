"""``precision``: the type in which is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from ...grammar.codes_language import BAD_VALUE, NOT_SUPPORTED
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.usage import Arguments
from ..directive import Directive, Scope

SUPPORTED = ("fp32",)
PLANNED = ("bf16", "fp16", "fp8")


@dataclass(frozen=True)
class Precision(Directive):
    """The type in which is computed: `fp32`, the only one now and the default."""

    USAGE = "precision TYPE"

    type: str

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        word = arguments.word("type")
        assert word is not None
        return cls(arguments, word.text)

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        label = Label(self.arguments.span("type"))
        if self.type in PLANNED:
            message = f"`{self.type}` is not supported yet"
            yield Diagnostic(NOT_SUPPORTED, message, label, help="write `precision fp32`")
        elif self.type not in SUPPORTED:
            yield Diagnostic(BAD_VALUE, f"`{self.type}` is not a precision", label, help="write `precision fp32`")
