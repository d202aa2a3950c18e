"""``init``: the files of initial weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes import BAD_VALUE
from ....grammar.diagnostics import Diagnostic, Label
from ..directive import Directive, Scope, argument


@dataclass(frozen=True)
class Init(Directive):
    """Weights to begin with: the safetensors files of a folder, relative to the plan's, by the model's own names.

    Every tensor of the model's state must be there once, in one file or spread over many, and no other; tied weights
    may stand under any of their names. A rank reads the parts that it holds and no more. Types may differ where the
    conversion is exact (bfloat16 to float32); `rounded` allows those that round. Without this line weights are what the
    model's code makes them, drawn from `seed`.
    """

    USAGE = "init from FILE [rounded]"

    folder: str = argument(lambda line: line.text("from"))
    rounded: bool = argument(lambda line: "rounded" in line)

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        if not self.folder.strip():
            span = self.arguments.span("from")
            yield Diagnostic(BAD_VALUE, "the folder has no name", Label(span), help='write as `init from "weights"`')
