"""``shard``: the placement of a tensor, the primitive of all placements."""

from __future__ import annotations

from ..layouts import Fix


class Shard(Fix):
    """Places values on every axis of the mesh: split where the layout says so, whole on the other axes.

    Values are parameters, inputs, and values inside the model. `out(M)` is what the operators of module `M` make for
    others, and `in(M)` what they read of others. If there are several such values, a number chooses, as in `out(M, 1)`.
    Lines about values inside the model count after all other lines, wherever they stand: weights decide what split
    layers make.

    If a product needs a split value whole, it is gathered, and gathered again in backward. With `keep gathered` it is
    kept as gathered for backward: fewer messages, more memory.

    If a value is whole here and what makes it is split, it is gathered where it is made: with `column w over tp` and
    `shard out(w) [_, _]` each rank multiplies its columns, ranks gather the outputs, and in backward each rank takes
    its part of their gradient and sends nothing. If all readers take the parts that their ranks have, nothing is sent
    at all. Weights are never gathered for that; `zero 3` is the line for it.
    """

    USAGE = "shard VALUES LAYOUT [keep gathered]"
