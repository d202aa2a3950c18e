"""``replicate``: tensors that are whole on every rank."""

from __future__ import annotations

from ..constraints import Fix


class Replicate(Fix):
    """Places parameters or inputs whole on every rank: `shard V [...]` of all whole dims."""

    USAGE = "replicate VALUES"
