"""The order of samples: the source's sample that is the global sample n, by seed, epoch and split. It has no state and
knows nothing of ranks, so every mesh trains on the same samples in the same order."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from .samples import DataError, SampleSource


@final
@dataclass(frozen=True, slots=True)
class Order:
    """The order of a source of ``total`` samples: every sample of one part once an epoch, epoch after epoch.

    The part is the samples of training, or, if ``held``, the share ``split`` that is kept for evaluation. Kept samples
    are spread evenly over the source, whatever the seed: of every 20 samples the last, if the share is 0.05.

    >>> [Order(10, 0, False, split=0.2)(number) for number in range(10)]
    [0, 1, 2, 3, 5, 6, 7, 8, 0, 1]
    >>> [Order(10, 0, False, split=0.2, held=True)(number) for number in range(3)]
    [4, 9, 4]
    """

    total: int
    seed: int
    shuffled: bool
    split: float = 0.0
    held: bool = False

    @property
    def kept(self) -> int:
        """The number of samples that are kept for evaluation."""
        return min(self.total, max(1, round(self.total * self.split))) if self.split else 0

    @property
    def count(self) -> int:
        """The number of samples of an epoch."""
        return self.kept if self.held else self.total - self.kept

    def __call__(self, number: int) -> int:
        """Return which of the source's samples is the global sample ``number`` >= 0."""
        epoch, place = divmod(number, self.count)
        if self.shuffled:
            place = permuted(place, self.count, f"{self.seed} {epoch}")
        if not self.split:
            return place
        if self.held:
            return (place + 1) * self.total // self.kept - 1
        # The source is cut into blocks, whose last sample is kept: find the block of training's sample `place`.
        block = bisect_right(range(self.kept), place, key=lambda one: one * self.total // self.kept - one) - 1
        return place + block


@final
class Ordered:
    """Samples of a source in an order, without end; ``count`` is the number of an epoch."""

    def __init__(self, source: SampleSource, order: Order) -> None:
        self._source, self._order, self.count = source, order, order.count

    def __call__(self, number: int) -> Mapping[str, Tensor]:
        """Return the global sample ``number`` >= 0."""
        return self._source(self._order(number))


def check_order(order: Order, batch: int) -> None:
    """Check that an epoch has enough samples for a batch, so that none comes twice in it.

    Raises:
        DataError: it has fewer.
    """
    if order.count < batch:
        kept = f" beside the {order.kept} that `split` keeps" if order.kept else ""
        have = f"{order.count} sample{'s' * (order.count != 1)}"
        takes, smaller = (f", and a step takes {batch}", ", or make B smaller") if batch > 1 else ("", "")
        raise DataError(f"the data has {have}{kept}{takes}", f"give it {batch} or more{smaller}")


def permuted(number: int, count: int, key: str) -> int:
    """Return the position of ``number`` in a pseudorandom permutation of ``range(count)`` that ``key`` chooses, without
    a table.

    Source: Black, Rogaway 2002, "Ciphers with arbitrary finite domains": a Feistel network on the next power of four,
    applied again while the number is outside the range.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{turn} {right} {key}".encode(), digest_size=8).digest()
            left, right = right, left ^ int.from_bytes(digest, "little") & mask
        number = left << half | right
        if number < count:
            return number
