"""The loader of ``parc.dataloader``: batches of a dataset for a person's own loop, of which each rank gets its samples;
checkpoints hold its place."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from ...compiler.initial.counter import stream
from ...compiler.sizes.size_range import BATCH
from ...grammar.codes import BAD_DATA, BATCHES_DIFFER
from ..ranks.faults import RunError
from ..ranks.gather import everywhere
from ..ranks.lockstep import Lockstep, Row
from .datasets import dataset_source
from .reading import Closing, RowReader
from .samples import DataError, Order, Ordered, SampleSource, raised_at
from .sizes import AtSizes, BySizes


@final
class Loader:
    """The batches of a dataset, for ``session.step(local=batch)``: of every batch this rank's samples.

    An iteration is one epoch, or the rest of one that was begun before; over an iterable it does not end. The place, an
    epoch and a number of its samples, is part of ``session.save`` and ``session.restore``: it is that of all ranks, and
    depends neither on the mesh nor on B. Every rank takes the next batch when the others do; where one of them cannot
    read its samples, all raise that error, and the session can be saved.

    Raises:
        RunError: the dataset is none, or has too few samples; its last batch is smaller, and the loss sees that; or
            another dataset has a loader of this name.
    """

    def __init__(
        self, by_sizes: BySizes[AtSizes], together: Lockstep, dataset: Any, free: Collection[str], *, shuffle: bool,
        seed: int, workers: int, drop_last: bool, name: str,
    ) -> None:  # fmt: skip
        self._by_sizes, feed = by_sizes, by_sizes().feed
        self._feed, self._together, self._drop_last, self._name = feed, together, drop_last, name
        self._dataset, self._free, self._workers = dataset, free, workers
        self._options = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last, "name": name}
        self._check_name()
        try:
            source: SampleSource = dataset_source(dataset, _ended, feed.inputs, feed.batch, None)
            self._samples, self._source = source.count, source
            if source.count is not None:
                self._check(source.count)
                source = Ordered(source, Order(source.count, seed, shuffle))
            elif shuffle:
                message = "an iterable has an order of its own, so there is no `shuffle`"
                raise DataError(message, "remove it, or give a dataset with `__getitem__` and `__len__`")
        except DataError as error:
            raise RunError(BAD_DATA, str(error), error.help) from error
        self._reader = RowReader(Closing(source, threading.Event()), feed.rows, feed.batch, workers)
        feed.loaders.add(self)

    def _check_name(self) -> None:
        """Check that no other dataset is read under this name: both would go on at one place after a restore."""
        if any(other._name == self._name and other._dataset is not self._dataset for other in self._feed.loaders):
            message = f"another dataset has a loader with the name `{self._name}` already"
            raise RunError(BAD_DATA, message, 'give each a name, as `name="pictures"`, or `del` the other loader first')

    def _check(self, samples: int) -> None:
        """Check that an epoch has a batch, and that its last one may be smaller, if it is."""
        batch = self._feed.batch
        if samples < (batch if self._drop_last else 1):
            help_ = "give it more, or build the plan for a smaller B" + ", or `drop_last=False`" * self._drop_last
            raise DataError(f"the dataset has {samples} sample{'s' * (samples != 1)}, and a step takes {batch}", help_)
        rest = samples % batch
        if rest and not self._drop_last and not self._has_size(rest):
            self._feed.tails.ignored_targets(rest)

    def _has_size(self, count: int) -> bool:
        """Return whether the plan has a range for B that a batch of so many samples is in."""
        return self._by_sizes.ranges(BATCH) and not self._feed.tail_fault(count)

    def __len__(self) -> int:
        """Return the number of batches of an epoch.

        Raises:
            TypeError: the dataset is an iterable, which has no length.
        """
        if self._samples is None:
            raise TypeError("an iterable has no length")
        return self._samples // self._feed.batch if self._drop_last else -(-self._samples // self._feed.batch)

    def _next(self) -> tuple[int, int]:
        """Return the epoch of the next batch, and how many of its samples were taken."""
        epoch, taken = self._feed.places.get(self._name, (0, 0))
        needed = taken + (self._feed.batch if self._drop_last else 1)
        return (epoch, taken) if self._samples is None or needed <= self._samples else (epoch + 1, 0)

    @property
    def epoch(self) -> int:
        """The number of the epoch whose batch comes next, from 0. An iterable counts its own."""
        return self._next()[0]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        epoch, taken = first = self._next()
        while epoch == first[0]:
            batch, rows = self._together.exchanged("parc.dataloader", partial(self._read_told, epoch, taken))
            self._hold(rows)
            self._warn_of_others()
            self._feed.places[self._name] = epoch, taken + self._feed.batch
            yield batch
            epoch, taken = self._next()

    def _read_told(self, epoch: int, taken: int) -> tuple[dict[str, Tensor], Row]:
        """Return this rank's samples of a batch, and what ranks must have alike, as numbers."""
        options = {**self._options, "samples": self._samples}
        return self._read(epoch, taken), [stream(0, repr(value)) for value in options.values()]

    def _hold(self, rows: Sequence[Sequence[int]]) -> None:
        """Check that the loaders of all ranks are one.

        Raises:
            RunError: on every rank: their options, or the lengths of their datasets, differ.
        """
        other = next((rank for rank, row in enumerate(rows) if row != rows[0]), None)
        if other is None:
            return
        options = everywhere({**self._options, "samples": self._samples}, len(rows))
        name = next(name for name in options[0] if options[0][name] != options[other][name])
        values = " and ".join(f"rank {rank} has {options[rank][name]!r}" for rank in (0, other))
        what = "a dataset of another length" if name == "samples" else f"another `{name}`"
        message = f"`parc.dataloader` has {what} on rank {other} than on rank 0: {values}"
        help_ = "make the loader alike on every rank: of each batch it gives every rank samples of its own"
        raise RunError(BATCHES_DIFFER, message, help_)

    def _warn_of_others(self) -> None:
        """Warn, once and on one rank, of entries of samples that forward takes and no input of the plan does."""
        free, self._free = self._free, ()
        if not free or self._together.rank:
            return
        others = getattr(self._source, "others", None)
        if others is None and self._workers and self._samples is not None:  # which have read it in other processes
            with suppress(DataError):
                self._source(0)
                others = getattr(self._source, "others", None)
        for name in (name for name in others or () if name in free):
            message = f"`{name}` of the dataset is left out: the model's forward takes it, and no `input` line of the"
            warnings.warn(f"{message} plan names it; add one, and build again", stacklevel=3)

    def _read(self, epoch: int, taken: int) -> dict[str, Tensor]:
        """Return this rank's samples of a batch. If the last one of an epoch is smaller, and no range of the plan for B
        has its size, samples of the next epoch pad it, with all targets ignored. A restore under another B may leave
        such a rest too.

        Raises:
            RunError: they cannot be read, or the last batch is smaller, and the loss sees that.
        """
        size, count = self._feed.batch, self._samples
        first, end = (taken, None) if count is None else (epoch * count + taken, (epoch + 1) * count)
        have = size if end is None else end - first
        short = have < size
        feed = self._by_sizes.at({BATCH: have}).feed if short and self._has_size(have) else self._feed
        ignored = feed.tails.ignored_targets(have) if short and feed is self._feed else {}
        try:
            samples = self._reader(first, end) if feed is self._feed else self._reader.rows(first, feed.rows)
            batch = feed.local_batch(samples)
        except DataError as error:
            notes = [note for note in [raised_at(error)] if note]
            raise RunError(BAD_DATA, f"epoch {epoch}: {error}", error.help, notes) from error
        for name, ignore in ignored.items():
            batch[name][self._feed.rows_of(name) >= have] = torch.tensor(ignore, dtype=batch[name].dtype)
        return batch


def _ended() -> Any:
    """Refuse to start an iterator again that a person passed.

    Raises:
        DataError: always.
    """
    message = "the iterator has ended, and cannot start again"
    raise DataError(message, "give an object whose `__iter__` starts again, such as an `IterableDataset`")
