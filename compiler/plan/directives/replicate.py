"""``replicate``: tensors that are whole on every rank."""

from __future__ import annotations

from ..layouts import Fix


class Replicate(Fix):
    """Places values whole on every rank, as `shard V [_, _]` does for a value of two dims."""

    USAGE = "replicate VALUES"
