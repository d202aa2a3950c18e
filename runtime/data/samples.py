"""Samples by their number, their order, the rows of a batch, and the checks of these. Each rank reads only its rows."""

from __future__ import annotations

import hashlib
import traceback
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, final

import torch
from torch import Tensor

from ...compiler.sizes.size_range import BATCH, SizeRange

_Got = TypeVar("_Got")


class DataError(Exception):
    """The error of data that cannot be read as the plan says; the message is for the plan's author.

    ``help`` is a way out, where one is known; ``pattern`` the glob at fault; ``place`` the line of a person's file that
    failed in a worker process.
    """

    def __init__(self, message: str, help: str = "", pattern: str = "", place: str = "") -> None:
        super().__init__(message)
        self.help, self.pattern, self.place = help, pattern, place


def raised_at(error: Exception) -> str:
    """Return the line of the person's own file that failed and caused an error, "" if there is none."""
    cause = error.__cause__
    if cause is None:
        return error.place if isinstance(error, DataError) else ""
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if "/parc/runtime/" not in frame.filename]
    return f"raised at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


ASKED: list[Callable[[str, str], object]] = []
"""In a worker process the function that notes what a person's own code is asked for, and where that code is."""


def asked(call: Callable[[], _Got], what: str, help: str, code: str = "") -> _Got:
    """Return the result of a person's own code. ``what`` names it in the message, ``code`` says where it is.

    Raises:
        DataError: it failed (chained), or raised such an error itself.
    """
    for note in ASKED:
        note(what, code)
    try:
        return call()
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"{what} failed: {type(error).__name__}: {error}", help) from error


class SampleSource(Protocol):
    """Samples by their number: sample i is the same on every rank, at any time, after any restart."""

    @property
    def count(self) -> int | None:
        """The number of samples, or of an epoch of them; None where there is no end, or none that is known."""

    def __call__(self, number: int) -> Mapping[str, Tensor]:
        """Return the tensors of one sample, without a batch dim."""


def sample_misfit(
    sample: Mapping[str, Tensor], number: int, inputs: Sequence[Mapping[str, Any]], sizes: Mapping[str, SizeRange]
) -> tuple[str, str] | None:
    """Return the first input whose tensor in a sample differs from its ``input`` line, and the difference. Inputs that
    the sample does not hold are left out."""
    for line in inputs:
        value, dims = sample.get(line["name"]), line["dims"][line["dims"][:1] == [BATCH] :]  # a sample has no batch dim
        if value is None:
            continue
        wanted = [SizeRange(dim, dim) if isinstance(dim, int) else sizes[dim] for dim in dims]
        form = _type_text(value.dtype, value.shape)
        fits = len(wanted) == value.dim() and all(size in w.values for size, w in zip(value.shape, wanted, strict=True))
        if form.split()[0] != line["dtype"] or not fits:
            declared = f"input {line['name']} {line['dtype']} [{', '.join(map(str, line['dims']))}]"
            text = f"`{line['name']}` of sample {number} is {form}, but `{declared}` asks for {line['dtype']}"
            return line["name"], f"{text} [{', '.join(map(str, wanted))}]"
    return None


def read_rows(source: SampleSource, first: int, rows: Sequence[int]) -> dict[str, Tensor]:
    """Return some ``rows`` of a batch, stacked: each tensor is [len(rows), *sample's shape]. Row r is the global sample
    ``first + r``; no other sample is read.

    Raises:
        DataError: samples differ in their names, dtypes or shapes, or there is no row.
    """
    samples = [source(first + row) for row in rows]
    if not samples:
        raise DataError("a batch has at least one row", "ask for one row or more")
    form = {name: (value.dtype, value.shape) for name, value in samples[0].items()}
    for row, sample in zip(rows, samples, strict=True):
        other = {name: (value.dtype, value.shape) for name, value in sample.items()}
        if other != form:
            raise DataError(
                f"sample {first + row} is {_shown(other)}, but {first + rows[0]} is {_shown(form)}",
                "give every sample tensors of the same names, types and shapes",
            )
    return {name: torch.stack([sample[name] for sample in samples]) for name in form}


def _shown(form: Mapping[str, tuple[torch.dtype, torch.Size]]) -> str:
    return ", ".join(f"{name}: {_type_text(*tensor)}" for name, tensor in form.items()) or "empty"


def _type_text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


# ---- the order of samples: it has no state and knows nothing of ranks, so every mesh trains on the same samples


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

    @property
    def others(self) -> Mapping[str, Any] | None:
        """The entries of the first sample that no input takes, once it was read."""
        return getattr(self._source, "others", None)

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
