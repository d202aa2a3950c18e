"""``expect``: a promise about the number of collectives."""

from __future__ import annotations

from ..directive import NOT_NEGATIVE
from ..plan import Promise


class Expect(Promise):
    """A promise that a build keeps or is refused: each of these modules has exactly so many collectives.

    `expect 4 all_reduce in blocks.*`: four in every block, with all that is inside it, counted over the forward and the
    backward of one microbatch. If a pattern matches a module and modules inside it, the outermost counts; `**` is the
    whole model. `OP`, `over` and `during` are those of `forbid`.
    """

    USAGE = "expect N OP in WHERE [over AXIS] [during NAME]"
    LIMITS = (("n", NOT_NEGATIVE),)
