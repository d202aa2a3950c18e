"""``forbid``: a promise that there is no such collective."""

from __future__ import annotations

from ..plan import Promise


class Forbid(Promise):
    """A promise that a build keeps or is refused: no such collective in these modules, with all that is inside them.

    `OP` is `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `exchange` (of experts) or `any`. With `over`
    only collectives over that axis count. Without `during` forward and backward count; with it, one phase: `forward`,
    `backward`, or `step`, where gradients are summed once a step. `**` is the whole model.
    """

    USAGE = "forbid OP in WHERE [over AXIS] [during NAME]"
