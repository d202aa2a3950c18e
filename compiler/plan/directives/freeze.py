"""``freeze``: parameters that are not trained."""

from __future__ import annotations

from dataclasses import dataclass

from ....grammar.syntax import Word
from ..directive import Directive, argument


@dataclass(frozen=True)
class Freeze(Directive):
    """Parameters that are not trained: they get no gradient, no optimizer state, and no communication of either.

    `WHERE` names modules, with all their parameters, or parameters. Parameters that the model itself does not train
    (with `requires_grad` false) are frozen without a line.
    """

    USAGE = "freeze WHERE"
    TRAINING = (("", "says what an update leaves alone"),)
    ONCE = False

    where: tuple[Word, ...] = argument(lambda line: line.words("where"))
