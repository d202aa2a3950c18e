"""``column``: linear layers split by their outputs."""

from __future__ import annotations

from ..layouts import SplitWeights


class Column(SplitWeights):
    """Splits the outputs of linear layers over an axis, weight and bias: each rank computes a part of the outputs.

    `rows` is for a weight that holds several weights. It says what the outputs are, in their order. `rows (3 h/tp d)`:
    the weight stacks q, k and v; each has h heads of size d; each rank gets h/tp heads of q, of k and of v. `rows (2
    f/tp)`: it stacks two weights, such as gate and up; each rank gets f/tp outputs of each. `rows (h/tp d + g/tp d +
    g/tp d)`: h heads of q, then g heads of k, then g heads of v.

    If there are fewer heads of keys and values (KV heads) than ranks, several ranks hold the same KV head; the number
    of ranks must then be a multiple of the number of KV heads. parc sees such an axis as two, `tp_0` and `tp_1`; `over
    tp` means both.

    With `pad` the number of outputs, or of heads, need not be a multiple of the ranks: entries that the model does not
    have are added. A `row` line that reads these outputs says `pad` too. `WHERE` names modules, or weights.

    The outputs stay split for those who read them. `shard out(WHERE) [_, _]` gathers them.
    """

    USAGE = "column WHERE over AXIS [rows DIMS] [pad]"
