"""``shard``: the placement of a tensor, the primitive of all placements."""

from __future__ import annotations

from ..layouts import Fix


class Shard(Fix):
    """Places parameters or inputs on every axis of the mesh: split where the layout says so, whole on the others."""

    USAGE = "shard VALUES LAYOUT"
