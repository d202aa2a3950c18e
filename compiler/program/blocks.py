"""Blocks: the modules of a model that programs call as functions. They are those that a plan names as units, else
numbered ones."""

from __future__ import annotations

import re
from collections.abc import Collection

from ..ops.rules import facts
from .program import Program

_NUMBERED = re.compile(r"((?:[^.]+\.)*?\d+)(?:\.|$)")


def block_of(module: str, units: Collection[str] = ()) -> str | None:
    """Return the block that a path lies in: the innermost of ``units`` around it, else the outermost numbered module.

    >>> block_of("layers.3.mlp.up")
    'layers.3'
    >>> block_of("layers.3.mlp.up", {"layers.3.mlp"})
    'layers.3.mlp'
    """
    unit = innermost(module, units)
    match = _NUMBERED.match(module) if unit is None else None
    return match[1] if match else unit


def innermost(module: str, units: Collection[str]) -> str | None:
    """Return the innermost of some modules that a path lies in, or None."""
    name = module
    while name not in units and name:
        name = name.rpartition(".")[0]
    return name if name in units else None


def starred(module: str) -> str:
    """Return a module's name with a star for each number: ``layers.*.mlp`` for ``layers.3.mlp``."""
    return ".".join("*" if word.isdigit() else word for word in module.split("."))


def complete(module: str, block: str) -> str:
    """Complete a starred name by the block whose call it is part of: ``layers.*.mlp`` called as ``layers.3`` is
    ``layers.3.mlp``."""
    names, known = module.split("."), block.split(".")
    return ".".join(known[at] if name == "*" and at < len(known) else name for at, name in enumerate(names))


def working(program: Program) -> frozenset[str]:
    """Return the names of a program's functions that have a product or an attention, which messages can overlap."""
    return frozenset(
        function.name
        for function in program.functions
        if any(facts(line.op).precision == "product" for line in function.lines)
    )
