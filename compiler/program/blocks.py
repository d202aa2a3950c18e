"""Blocks: the numbered modules of a model."""

from __future__ import annotations

import re

_BLOCK = re.compile(r"((?:[^.]+\.)*?\d+)(?:\.|$)")


def block_of(module: str) -> str | None:
    """Return the outermost numbered module on a path: ``layers.3`` for ``layers.3.mlp.up``."""
    match = _BLOCK.match(module)
    return match[1] if match else None
