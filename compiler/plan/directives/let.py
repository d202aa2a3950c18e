"""``let``: names for values."""

from __future__ import annotations

from ..directive import Directive


class Let(Directive):
    """Gives names to values; `$name` elsewhere stands for the value, and `-D name=value` replaces it.

    A value is a number, a word, a string or a range, and may use names of earlier lines. A name that nothing uses is a
    warning.

    Several values, `tp = 1 | 2 | 4`, leave the name open, and so does `dp = ?`, which is what the ranks of a mesh
    leave. `parc plan` chooses the values that make a step fastest; all other commands need one value, as `-D tp=2`
    gives it. An open name may stand where the layout is said, in `mesh`, `stage`, `schedule`, `zero`, `recompute`,
    `sequence`, `context`, `precision`, `view`, `bucket`, `prefetch`, `node`, `offload`, `compress`, `hierarchical` and
    the arguments of `include`, and not in what is trained. Most of these lines have a word that turns them off:
    `zero 0`, `over none`, `recompute none`, `chunks 1`.
    """

    USAGE = "let NAME=VALUE, ..."
    ONCE = False
