"""Opened plans: the names of a plan that size its mesh, given back to the search, with the ways to need less memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from parc.compiler.plan.plan import MESH, Plan, read_plan
from parc.compiler.program.blocks import block_of, starred
from parc.compiling.driver import task_lines
from parc.compiling.plan_capture import make_model
from parc.grammar.parse import parse
from parc.grammar.source import Source
from parc.grammar.substitute import LET
from parc.grammar.syntax import Setting, Var

_BATCH_AXIS = "dp"
_LET = re.compile(rf"^({LET}\b[^#\n]*[^#\s])(.*)$", re.MULTILINE)


def with_open_sizes(source: Source, folder: Path, ranks: int, node: int) -> Source:
    """Return a plan in which the names that size the mesh are open: the axis of data parallelism is what the ranks
    leave, others go up to a node. Where it has no lines of theirs, levels of ZeRO are open too, and whether its blocks
    are recomputed.

    Raises:
        PlanError: it is no plan, or has open names already.
    """
    plan = read_plan(source)
    statements, _ = parse(source)
    axes = (axis for line in statements if line.verb.text == MESH for phrase in line.phrases for axis in phrase.items)
    named = {
        axis.value.name: axis.name.text for axis in axes if isinstance(axis, Setting) and isinstance(axis.value, Var)
    }
    sizes = " | ".join(str(2**power) for power in range(20) if 2**power <= min(ranks, node))
    added, lines = "", list[str]()
    if not plan.zero and _BATCH_AXIS in named.values():
        added += ", zero=0 | 1 | 2 | 3"
        lines.append(f"zero      $zero over {_BATCH_AXIS}")
    blocks = Counter(starred(name) for name in _modules(plan, folder) if block_of(name) == name)
    if not plan.recompute and blocks:
        added += f", again=none | {blocks.most_common(1)[0][0]}"
        lines.append("recompute $again")
    text = source.text
    for name, axis in named.items():
        text = re.sub(rf"\b{name}=\d+", f"{name}={'?' if axis == _BATCH_AXIS else sizes}", text, count=1)
    text = _LET.sub(lambda match: f"{match[1]}{added}{match[2]}", text, count=1)
    return Source(source.name, "\n".join([text.rstrip("\n"), *lines, ""]), path=source.path)


def _modules(plan: Plan, folder: Path) -> Iterator[str]:
    """Yield the names of a model's modules."""
    recorded = make_model(plan, task_lines(plan), folder)
    yield from (name for name, _ in recorded.module.named_modules())
