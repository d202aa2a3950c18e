"""Precision: the modules that a plan computes in a narrow type, the operators that never compute in one, and the words
by which a plan names operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .recompute import in_modules
from .rules import facts


def base_name(op: str) -> str:
    """Return an operator's name without namespace and overload: ``softmax`` for ``aten.softmax.int``."""
    return op.split(".")[1] if "." in op else op


def is_sensitive(op: str, *, backward: bool = False) -> bool:
    """Return whether an operator never takes a narrow type: a forward operator, or with ``backward`` its derivative."""
    row = facts(op)
    return row.precision in ("sensitive", "loss") and row.backward == backward


def is_narrow(dtype: torch.dtype) -> bool:
    """Return whether a floating type has fewer bytes than float32, and so rounds what float32 holds."""
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class PrecisionLine:
    """One ``precision`` line, its pattern resolved: a type, the modules (with all inside them), and its number."""

    dtype: torch.dtype
    modules: tuple[str, ...]
    line: int = 0

    def holds(self, module: str) -> bool:
        """Return whether a module is one of the line's, or inside one; ``*`` in its path is any number."""
        return in_modules(module, self.modules)


PrecisionRegions = tuple[PrecisionLine, ...]
"""A plan's lines in order: the last line that holds for a module counts."""


def regions(lines: Iterable[tuple[str, Sequence[str], int]]) -> PrecisionRegions:
    """Return lines from the names of their types, their modules and their numbers."""
    return tuple(PrecisionLine(getattr(torch, name), tuple(modules), line) for name, modules, line in lines)


def line_at(lines: PrecisionRegions, module: str) -> PrecisionLine | None:
    """Return the line by which a module computes in a narrow type, or None."""
    last = next((line for line in reversed(lines) if line.holds(module)), None)
    return last if last is not None and is_narrow(last.dtype) else None


def may_narrow(lines: PrecisionRegions, module: str, dtype: torch.dtype) -> bool:
    """Return whether a module's operators may round to a narrow type; of blocks ``layers.*``, whether those of any
    may."""
    if "*" in module.split("."):
        return is_narrow(dtype) and any(line.dtype == dtype and line.holds(module) for line in lines)
    line = line_at(lines, module)
    return line is not None and line.dtype == dtype


@dataclass(frozen=True, slots=True)
class Rounding:
    """The permissions to round what the model computes: the plan's lines, and the type in which microbatches' gradients
    are added, which is their own where that is not narrow."""

    lines: PrecisionRegions = ()
    sums: torch.dtype = torch.float32
    sent: frozenset[tuple[str, str]] = frozenset()
    """The formats in which gradients travel between ranks, each with its axis."""


def words_for(op: str) -> frozenset[str]:
    """Return the words by which a plan names an operator: its name, that of the operator for which it stands, and its
    family."""
    row, name = facts(op), base_name(op)
    words = {name, base_name(row.stands_for)} if row.stands_for else {name}
    if "attention" in name:
        words.add("attention")
    elif row.precision == "product":
        words.add("products")
    if row.law:
        words.add("random")
    return frozenset(words)
