"""``vocab``: embedding tables and heads split by their vocabulary."""

from __future__ import annotations

from ..layouts import SplitWeights


class Vocab(SplitWeights):
    """Splits the vocabulary of embedding tables and of linear heads over an axis.

    Lookup, projection and loss then never hold whole logits. With `pad` the vocabulary need not divide: 50257
    entries over 4 ranks become 50260, of which 3 are no tokens. `WHERE` names modules, or weights.
    """

    USAGE = "vocab WHERE over AXIS [pad]"
