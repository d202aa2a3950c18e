"""Opened plans: the names of a plan that size its mesh, given back to the search, with the ways to need less memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from parc.compiler.plan.plan import MESH, Plan, read_plan
from parc.compiler.program.blocks import block_of, starred
from parc.compiling.driver import task_lines
from parc.compiling.plan_capture import make_model
from parc.grammar.parse import parse
from parc.grammar.source import Source
from parc.grammar.substitute import LET
from parc.grammar.syntax import Number, Setting, Statement, Var, Word

_BATCH_AXIS = "dp"
_LET = re.compile(rf"^({LET}\b[^#\n]*[^#\s])(.*)$", re.MULTILINE)

_LEVELS, _COUNTS = "0 | 1 | 2 | 3", "1 | 2 | 4 | 8 | 16 | 32"
"""The values of an opened level of ZeRO, and of opened microbatches."""


def with_open_sizes(source: Source, folder: Path, ranks: int, node: int) -> Source:
    """Return a plan in which the names that size the mesh are open: the axis of data parallelism is what the ranks
    leave, others go up to a node. Names of the level of ZeRO and of microbatches are open too; where it has no line of
    theirs, levels of ZeRO, and whether its blocks are recomputed.

    Raises:
        PlanError: it is no plan, or has open names already.
    """
    plan = read_plan(source)
    statements, _ = parse(source)
    named = {axis.value.name: axis.name.text for axis in _settings(statements, MESH) if isinstance(axis.value, Var)}
    sizes = " | ".join(str(2**power) for power in range(20) if 2**power <= min(ranks, node))
    added, lines = "", list[str]()
    if not plan.zero and _BATCH_AXIS in named.values():
        added += f", zero={_LEVELS}"
        lines.append(f"zero      $zero over {_BATCH_AXIS}")
    blocks = Counter(starred(name) for name in _modules(plan, folder) if block_of(name) == name)
    if not plan.recompute and blocks:
        added += f", again=none | {blocks.most_common(1)[0][0]}"
        lines.append("recompute $again")
    opened = {name: "?" if axis == _BATCH_AXIS else sizes for name, axis in named.items()}
    opened |= dict(_steps(statements))
    text = source.text
    for let in sorted(_settings(statements, LET), key=lambda let: -let.span.start):
        span = let.value.span
        if let.name.text in opened and isinstance(let.value, Number):
            text = text[: span.start] + opened[let.name.text] + text[span.end :]
    text = _LET.sub(lambda match: f"{match[1]}{added}{match[2]}", text, count=1)
    return Source(source.name, "\n".join([text.rstrip("\n"), *lines, ""]), path=source.path)


def _steps(statements: Iterable[Statement]) -> Iterator[tuple[str, str]]:
    """Yield the names of levels of ZeRO and of microbatches, each with the values to choose from."""
    for line in statements:
        items = [item for phrase in line.phrases for item in phrase.items]
        for before, item in pairwise((line.verb, *items)):
            if isinstance(item, Var) and isinstance(before, Word) and before.text in ("zero", "microbatches"):
                yield item.name, _LEVELS if before.text == "zero" else _COUNTS


def _settings(statements: Iterable[Statement], verb: str) -> Iterator[Setting]:
    """Yield the pairs ``name=value`` of lines with a verb."""
    items = (item for line in statements if line.verb.text == verb for phrase in line.phrases for item in phrase.items)
    yield from (item for item in items if isinstance(item, Setting))


def _modules(plan: Plan, folder: Path) -> Iterator[str]:
    """Yield the names of a model's modules."""
    recorded = make_model(plan, task_lines(plan), folder)
    yield from (name for name, _ in recorded.module.named_modules())
