"""``expect``: a promise about the number of collectives."""

from __future__ import annotations

from ..directive import NOT_NEGATIVE
from ..limits import Promise


class Expect(Promise):
    """A promise that a build keeps or is refused: so many collectives in each of these modules.

    `expect 4 all_reduce in blocks.*`: four in every block with all that is inside it, counted over the forward and the
    backward of one microbatch. Of modules inside each other that a pattern matches, the outermost counts; `**` is the
    whole model. `OP`, `over` and `during` are those of `forbid`.
    """

    USAGE = "expect N OP in WHERE [over AXIS] [during NAME]"
    LIMITS = (("n", NOT_NEGATIVE),)
