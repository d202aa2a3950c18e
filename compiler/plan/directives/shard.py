"""``shard``: the placement of a tensor, the primitive of all placements."""

from __future__ import annotations

from ..layouts import Fix


class Shard(Fix):
    """Places values on every axis of the mesh: split where the layout says so, whole on the others.

    Values are parameters, inputs, and those inside the model: `out(M)` is what operators of the module `M` make for
    others, `in(M)` what they read of others. Where there are several, a number chooses, as in `out(M, 1)`. Such lines
    come after all others, wherever they stand: weights determine what split layers make.

    A split value that a product needs whole is gathered, and in backward again. With `keep gathered` backward keeps it
    gathered: fewer messages, more memory.
    """

    USAGE = "shard VALUES LAYOUT [keep gathered]"
