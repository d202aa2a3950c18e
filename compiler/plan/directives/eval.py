"""``eval``: programs that evaluate the model, and when a run does."""

from __future__ import annotations

from dataclasses import dataclass

from ..directive import Directive


@dataclass(frozen=True)
class Eval(Directive):
    """The build also has programs that evaluate the model: forward only, with the model in `eval()`. There is no
    dropout, and BatchNorm uses its running statistics. `session.evaluate(batch)` runs them.

    They are made and checked as the programs of a step are, from a capture of their own, and lie on the ranks as these
    do. The model in `eval()` may read fewer parameters than in training, but no others. A plan without this line has no
    such programs, and builds in less time.
    """

    USAGE = "eval"
