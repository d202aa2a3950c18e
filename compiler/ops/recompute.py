"""Recomputation: the modules whose values backward recomputes, and the operators whose results are saved anyway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def in_modules(module: str, modules: Sequence[str]) -> bool:
    """Return whether a module is one of these, or inside one; ``*`` in its path is any number."""
    path = module.split(".") if module else []
    return any(_begins(path, name.split(".") if name else []) for name in modules)


def _begins(path: list[str], head: list[str]) -> bool:
    alike = (at == name or (at == "*" and name.isdigit()) for at, name in zip(path, head, strict=False))
    return len(path) >= len(head) and all(alike)


SENT_WORD = "collectives"
FAMILIES = {
    "products": "products of matrices and convolutions",
    "attention": "attention",
    "random": "random numbers, such as the masks of dropout",
    SENT_WORD: "what ranks send each other",
}
"""The words for several operators in a `keep` of the language, with their meanings."""


@dataclass(frozen=True, slots=True)
class RecomputeLine:
    """One ``recompute`` line, its pattern resolved: the modules, with all inside them, the words of operators whose
    results are saved all the same, and the line's number."""

    modules: tuple[str, ...]
    keep: frozenset[str]
    line: int = 0
    fit: int | None = None
    """The bytes of a rank for which the line chooses among policies; nothing is recomputed before it has chosen."""

    def holds(self, module: str) -> bool:
        """Return whether a module is one of the line's, or inside one."""
        return in_modules(module, self.modules)


def line_for(lines: Iterable[RecomputeLine], module: str) -> RecomputeLine | None:
    """Return the line that counts for a module, the last that holds for it; None also if that one has yet to choose."""
    last = next((line for line in reversed([*lines]) if line.holds(module)), None)
    return last if last is not None and last.fit is None else None
