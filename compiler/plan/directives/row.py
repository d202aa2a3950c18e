"""``row``: linear layers split by their inputs."""

from __future__ import annotations

from ..layouts import SplitWeights


class Row(SplitWeights):
    """Splits the inputs of linear layers over an axis: each rank multiplies its part of the inputs, and the results are
    summed over the ranks.

    The bias stays whole. With `pad` the number of inputs need not be a multiple of the ranks, as in `column`. `WHERE`
    names modules, or weights.
    """

    USAGE = "row WHERE over AXIS [pad]"
