"""``include``: the lines of another file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.diagnostics import Diagnostic
from ..directive import Directive, Scope, argument, check_unique


@dataclass(frozen=True)
class Include(Directive):
    """Stands for the lines of another file: a path relative to this one, or a family that parc ships, such as
    `"parc:llama"`.

    The other file has names of its own. Arguments replace the values of its `let` lines, and it sees no names of this
    plan. A line that a plan may have only once is in one of the files. The file's `mesh` line names the axes that
    it needs, with their sizes: sizes of axes that this plan has too must be the same, and other axes are added. Paths
    in `model`, `data` and `init` lines count from the folder of the plan, whichever file they stand in.

    Families place a model's weights for tensor parallelism over `tp`: `parc:bert`, `parc:gemma3`, `parc:gpt2`,
    `parc:llama`, `parc:olmo2`, `parc:phi3`, `parc:t5` and `parc:vit`. Families with experts place these over `ep` too:
    `parc:mixtral`, `parc:qwen3-moe`, `parc:deepseek-v3` and `parc:gpt-oss`. families.md lists the models of each. `parc
    show PLAN --expand` shows the placements.
    """

    USAGE = "include FILE [ARGS]"
    LAYOUT = True
    ONCE = False

    file: str = argument(lambda line: line.text("file"))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from check_unique(tuple(binding.name for binding in self.arguments.bindings("args")), "argument")
