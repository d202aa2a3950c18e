"""``row``: linear layers split by their inputs."""

from __future__ import annotations

from ..layouts import SplitWeights


class Row(SplitWeights):
    """Splits the inputs of linear layers over an axis: every rank has a part of the sum, added up after.

    The bias stays whole. With `pad` the inputs need not divide, as in `column`. `WHERE` names modules, or weights.
    """

    USAGE = "row WHERE over AXIS [pad]"
