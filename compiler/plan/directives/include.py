"""``include``: the lines of another file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.diagnostics import Diagnostic
from ..directive import Directive, Scope, argument, check_unique


@dataclass(frozen=True)
class Include(Directive):
    """Stands for the lines of another file, relative to this one, or of a family that parc ships: `"parc:llama"`.

    The file has names of its own: arguments replace the values of its `let`s, and it sees none of this plan's names. A
    line that a plan may have once stands in one of the files. Its `mesh` line names the axes that it needs, with their
    sizes. The plan's own `mesh` must agree with it, and gets the axes that it lacks. Names of other files (`model`,
    `data`, `init`) count from the plan's folder, wherever they stand.

    Families place a model's weights for tensor parallelism over `tp`: `parc:bert`, `parc:gemma3`, `parc:gpt2`,
    `parc:llama`, `parc:olmo2`, `parc:phi3`, `parc:t5` and `parc:vit`. Those of experts place these over `ep` too:
    `parc:mixtral`, `parc:qwen3-moe`, `parc:deepseek-v3` and `parc:gpt-oss`. families.md lists the models that each
    serves. `parc show PLAN --expand` shows the placements.
    """

    USAGE = "include FILE [ARGS]"
    ONCE = False

    file: str = argument(lambda given: given.text("file"))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from check_unique(tuple(binding.name for binding in self.arguments.bindings("args")), "argument")
