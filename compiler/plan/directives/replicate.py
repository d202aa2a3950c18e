"""``replicate``: tensors that are whole on every rank."""

from __future__ import annotations

from ..layouts import Fix


class Replicate(Fix):
    """Places values whole on every rank: `shard V [...]` of all whole dims."""

    USAGE = "replicate VALUES"
