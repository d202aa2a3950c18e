"""``bucket``: the size of messages of weights and gradients."""

from __future__ import annotations

from dataclasses import dataclass

from ..directive import Directive, argument

DEFAULT = 25_000_000


@dataclass(frozen=True)
class Bucket(Directive):
    """The most bytes of weights or gradients that travel in one message; `25MB` without a line.

    Tensors that start together, in one direction and one type, share a message: those that a block reads, the gradients
    of a block, or all that is gathered or summed once a step. A message never holds tensors of several blocks, so that
    no block waits for another one's. A tensor that is larger than the bucket is a message of its own.
    """

    USAGE = "bucket SIZE"

    size: int = argument(lambda given: int(given.number("size", DEFAULT)))
