"""The batches that the ranks of a run pass to a step, compared before any is used: a whole one that all ranks have,
each rank's own samples, or the plan's data. One exchange brings their hashes and the counts of their targets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from ...compiler.initial.counter import stream
from ...compiler.layout.mesh import Mesh
from ...compiler.sizes.size_range import BATCH
from ...compiler.sizes.template import sizes_text
from ...grammar.codes import BATCHES_DIFFER
from ..ranks.faults import RunError
from ..ranks.gather import everywhere
from ..ranks.lockstep import Lockstep, Row, ranks_text
from ..ranks.work import Batch, RankState, Work
from .feed import LocalParts
from .sizes import AtSizes, BySizes

GIVEN_KINDS = ("nothing, so it reads the plan's data", "a whole batch", "samples of its own")
"""The kinds of batch that a rank may pass to a step, in words."""
_DATA, _WHOLE, _LOCAL = range(3)
LOOKS = 3
"""The first steps on ranks' own samples in which samples that several ranks repeat are looked for."""
_SIZES, _FIRST = 1, 2
"""Positions in a rank's row, which has the kind, a hash of the sizes, a hash of each input from ``_FIRST`` on, and the
counts of targets."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that all ranks may go on with: its programs, this rank's part of each microbatch, and its work so far."""

    at: AtSizes
    parts: LocalParts
    work: Sequence[Work]


Completed = Callable[[AtSizes, Batch, Mapping[str, int]], Batch]
"""A function that completes a batch for programs at its sizes; the mapping has the number of ranks that share the
samples of each input, if the batch is one rank's."""


@final
class Batches:
    """The beginning of one rank's steps; every rank calls alike."""

    def __init__(self, by_sizes: BySizes[AtSizes], mesh: Mesh, together: Lockstep) -> None:
        self._by_sizes, self._mesh, self._together = by_sizes, mesh, together
        first = by_sizes()
        self._feed, self._keys = first.feed, first.stepper.counts
        self._looks = LOOKS

    def begin(
        self, call: str, batch: Batch | None, local: Batch | None, state: RankState, step: int, last: int | None,
        keep: bool = True, complete: Completed | None = None, beside: bool = False,
    ) -> Begun:  # fmt: skip
        """Begin step ``step`` (from 0) on a whole batch, on the samples of this rank, or on the plan's data, of which
        nothing is read beyond step ``last``. ``call`` is the name of the method for messages. Without ``keep`` there is
        no backward. ``complete`` completes a batch that was passed. ``beside`` says that the step before is not
        finished.

        Raises:
            RunError: on every rank: a batch does not fit the plan, or those of the ranks are not parts of one.
        """
        kind = _WHOLE if batch is not None else _DATA if local is None else _LOCAL
        passed = local if batch is None else batch
        alone = self._together.world == 1

        def make() -> tuple[Begun, Row]:
            if batch is not None and local is not None:
                raise RunError(
                    BATCHES_DIFFER, "both a whole batch and `local` samples were given", "give only one of them"
                )
            at = self._by_sizes(passed, self._feed.shares if kind == _LOCAL else {})
            if passed is None:
                part = at.feed.read(step, last)
            else:
                shares = at.feed.shares if kind == _LOCAL else {}
                completed = passed if complete is None else complete(at, passed, shares)
                part = at.feed.cut_hashed(completed, kind == _LOCAL, not alone)
            begun = Begun(at, part.parts, at.stepper.begin([state], [part.parts], step, keep, beside))
            sizes = stream(0, str(sorted(at.build.manifest["sizes"].items())))
            counted = (_as_integer(begun.work[0].totals.get(key)) for key in self._keys)
            return begun, [kind, sizes, *part.hashes, *counted]

        if alone:
            return make()[0]
        begun, rows = self._together.exchanged(call, make)
        self._hold(rows, begun.at)
        if kind == _LOCAL and complete is None and self._looks:
            self._looks -= 1
            self._warn_of_repeats(rows)
        for at, key in enumerate(self._keys, _FIRST + len(self._feed.types)):
            if (count := begun.work[0].totals.get(key)) is not None:
                counts = _as_counts([row[at] for row in rows], count)
                begun.at.stepper.share_counts(begun.work[0], self._together.rank, key, counts.unbind())
        return begun

    def _hold(self, rows: Sequence[Sequence[int]], at: AtSizes) -> None:
        """Check that the ranks' batches are parts of one. All ranks have the same rows, and so raise the same error."""
        if other := _odd_one([row[0] for row in rows]):
            first, second = (f"rank {rank} gave {GIVEN_KINDS[rows[rank][0]]}" for rank in other)
            raise RunError(BATCHES_DIFFER, f"{first}, and {second}", _every_rank(rows[other[0]][0], self._samples(at)))
        if other := _odd_one([row[_SIZES] for row in rows]):
            sizes = everywhere(sizes_text(at.build.manifest["sizes"]), len(rows))
            message = " and ".join(f"the batch of rank {rank} has {sizes[rank]}" for rank in other)
            raise RunError(BATCHES_DIFFER, message, "all ranks of a step have one choice of the plan's sizes")
        kind = rows[0][0]
        for place, name in enumerate(self._feed.types, _FIRST):
            axes = () if kind == _WHOLE else self._feed.batch_axes(name)
            if other := _odd_one([row[place] for row in rows], self._at(axes)):
                where = self._mesh.coordinates(other[0])
                alike = ", ".join(f"{axis}={where[axis]}" for axis in axes)
                both = f", though both are at {alike}" if alike else ""
                message = f"`{name}` of rank {other[1]} is not that of rank {other[0]}{both}"
                raise RunError(BATCHES_DIFFER, message, _every_rank(kind, self._samples(at), axes))

    def _warn_of_repeats(self, rows: Sequence[Sequence[int]]) -> None:
        """Warn, once and on one rank, where ranks that should have different samples have the same."""
        split = {
            place: axes for place, name in enumerate(self._feed.types, _FIRST) if (axes := self._feed.batch_axes(name))
        }
        axes = tuple(dict.fromkeys(axis for each in split.values() for axis in each))
        place = self._at(axes)
        for rank in range(len(rows)):
            alike = [other for other, row in enumerate(rows) if all(row[at] == rows[rank][at] for at in split)]
            if (times := len({place(other) for other in alike})) > 1:
                self._looks = 0
                if self._together.rank == 0:
                    by = " and ".join(f'`session.coordinates["{axis}"]`' for axis in axes)
                    message = (
                        f"{ranks_text(alike)} gave the same samples as `local`, so each of them counts {times} times;"
                        f" give each rank its own, chosen by {by}: `parc.dataloader` does so, and torch's"
                        " `DistributedSampler` with that as its `rank`"
                    )
                    warnings.warn(message, stacklevel=5)  # of who calls `session.step`
                return

    def _at(self, axes: Sequence[str]) -> Callable[[int], Hashable]:
        def place(rank: int) -> Hashable:
            coordinates = self._mesh.coordinates(rank)
            return tuple(coordinates[axis] for axis in axes)

        return place

    def _samples(self, at: AtSizes) -> int:
        """Return the number of a rank's own samples of a step."""
        return int(at.build.manifest["sizes"].get(BATCH, 1)) // max(self._feed.shares.values(), default=1)


def _odd_one(numbers: Sequence[int], place: Callable[[int], Hashable] = lambda _: 0) -> tuple[int, int] | None:
    """Return the first rank whose number differs from that of an earlier rank at the same place, behind that earlier
    rank; None if there is none."""
    first: dict[Hashable, int] = {}
    for rank, number in enumerate(numbers):
        if numbers[known := first.setdefault(place(rank), rank)] != number:
            return known, rank
    return None


def _every_rank(kind: int, samples: int, axes: Sequence[str] = ()) -> str:
    """Return the advice on the batches that ranks should have passed."""
    local = f"a rank's own {samples} sample{'s' * (samples != 1)} of it are `local=batch`"
    if kind == _WHOLE:
        return f"`batch` is a whole step's, the same on every rank; {local}"
    if kind == _LOCAL and axes:
        by = " and ".join(f'`session.coordinates["{axis}"]`' for axis in axes)
        return f"choose a rank's samples by {by} alone: other ranks at that place compute with the same samples"
    if kind == _LOCAL:
        return "no axis of the mesh splits it: give every rank the same"
    return "a sample must depend only on its number, the same on every rank: seed each random number by it"


def _as_counts(numbers: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """The inverse of ``_as_integer``: return the counts of all ranks, of the type of one of them."""
    counts = torch.tensor(numbers, device=like.device)
    return (counts.view(torch.float64) if like.is_floating_point() else counts).to(like.dtype)


def _as_integer(count: torch.Tensor | None) -> int | torch.Tensor:
    """Return a count as int64; of a floating-point one the bits of its float64."""
    if count is None:
        return 0
    return count.double().view(torch.int64) if count.is_floating_point() else count.long()
