"""``vocab``: embedding tables and heads split by their vocabulary."""

from __future__ import annotations

from ..layouts import SplitWeights


class Vocab(SplitWeights):
    """Splits the vocabulary of embedding tables and of linear heads over an axis.

    No rank ever holds the logits of the whole vocabulary: lookup, projection and loss work on parts. With `pad` the
    vocabulary need not be a multiple of the ranks: 50257 entries over 4 ranks become 50260, of which 3 are no tokens.
    `WHERE` names modules, or weights.
    """

    USAGE = "vocab WHERE over AXIS [pad]"
