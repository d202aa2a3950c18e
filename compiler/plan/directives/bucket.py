"""``bucket``: the size of messages of weights and gradients."""

from __future__ import annotations

from dataclasses import dataclass

from ..directive import Directive, argument

DEFAULT = 25_000_000


@dataclass(frozen=True)
class Bucket(Directive):
    """The largest message of weights or gradients, in bytes; `25MB` without this line.

    Several tensors share one message if they travel at the same moment, in the same direction and with the same type:
    the weights that a block reads, the gradients of a block, or all that is summed once a step. A message never holds
    tensors of two blocks, so that no block waits for another one. A tensor that is larger than the bucket is a message
    of its own.
    """

    USAGE = "bucket SIZE"
    LAYOUT = True

    size: int = argument(lambda line: int(line.number("size", DEFAULT)))
