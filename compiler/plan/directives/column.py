"""``column``: linear layers split by their outputs."""

from __future__ import annotations

from ..layouts import SplitWeights


class Column(SplitWeights):
    """Splits the outputs of linear layers, weight and bias, over an axis: every rank has a part of the outputs.

    `rows` says what the outputs consist of where several weights are fused: `rows (3 h/tp d)` are three times heads
    times head size, and every rank gets its heads of all three; `rows (2 f/tp)` are two halves, each split;
    `rows (h/tp d + g/tp d + g/tp d)` are heads of queries, and fewer of keys and of values. With `pad` the outputs (or
    that sub-dim of them) need not divide: entries that the model does not have are added; a `row` line that takes them
    says `pad` too. `WHERE` names modules, or weights.

    Heads of keys and values that are fewer than the ranks, and divide them, are kept by several ranks each: such an
    axis is seen as two, `tp_0` and `tp_1`, and `over tp` means both.
    """

    USAGE = "column WHERE over AXIS [rows DIMS] [pad]"
