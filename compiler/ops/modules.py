"""Modules of a model by their paths."""

from __future__ import annotations

from collections.abc import Sequence


def in_modules(module: str, modules: Sequence[str]) -> bool:
    """Return whether a module is one of these, or inside one; ``*`` in its path is any number."""
    path = module.split(".") if module else []
    return any(_begins(path, name.split(".") if name else []) for name in modules)


def _begins(path: list[str], head: list[str]) -> bool:
    alike = (at == name or (at == "*" and name.isdigit()) for at, name in zip(path, head, strict=False))
    return len(path) >= len(head) and all(alike)
