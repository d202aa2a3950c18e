"""Evaluation: the programs of a model in ``eval()``, on the parameters and buffers of a session."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast, final

import torch

from ..compiler.build.build import Build
from ..compiler.layout.mesh import Mesh
from ..compiler.program.binding import BUFFERS, SCALE
from ..compiler.sizes.size_range import BATCH
from ..grammar.codes_build import BAD_DATA
from ..grammar.codes_run import BATCHES_DIFFER, NO_EVALUATION, TRAINS_NOTHING
from .data.batches import Batches
from .data.feed import Feed
from .data.sizes import AtSizes, BySizes
from .data.sources import PREDICTED
from .faults import RunError
from .lockstep import Together
from .opening import constants_of
from .owners import held
from .predictions import Predictions
from .saving import LocalPart
from .state.initial import Initial
from .work import Batch, RankState


def evaluation_of(build: Build) -> Build:
    """Return the programs of a build's evaluation; those of a build for inference are the build itself.

    Raises:
        RunError: it has none.
    """
    if not build.trains:
        return build
    if build.evaluation is None:
        message = f"`{build.path}` has no programs that evaluate the model: its plan has no `eval` line"
        raise RunError(NO_EVALUATION, message, "add a line `eval` to the plan, and build again")
    return build.evaluation


def with_samples(build: Build, samples: Mapping[str, Any]) -> Build:
    """Return an evaluation at its largest sizes, with other ``samples``: all of those of a `data` line, in order. They
    need not have inputs that the loss alone reads."""
    from ..compiler.verify.padding import of_returned  # proves in sympy, which most runs need not import

    needed = [*of_returned(build.reference.main).bound("input")]
    return replace(build, manifest={**build.manifest, "data": samples, "said": PREDICTED, "needed": needed},
                   template=None)  # fmt: skip


def trains_nothing(path: Path) -> RunError:
    """Return the error of a plan for inference, or of its build, of which training is asked."""
    message = f"`{path}` is for inference: the plan has no `loss` and no `optimizer` line"
    help_ = "`session.predict`, or `parc run BUILD --predict WORDS -o DIR`; or add both lines, and build again"
    return RunError(TRAINS_NOTHING, message, help_)


def check_trains(build: Build) -> None:
    """Check that a build has a loss and an update.

    Raises:
        RunError: it is for inference.
    """
    if build.purpose == "inference":
        raise trains_nothing(build.path)


BATCHES = 100
"""The most batches of an evaluation in a run whose plan does not say how many."""
_MEAN = "session.evaluation.mean"


@dataclass(frozen=True, slots=True)
class Extent:
    """The samples that an evaluation of a run reads: so many whole ``batches`` of its data, then a smaller one of
    ``rest`` samples, 0 if there is none. ``note`` says what of the data is left out, or is ""."""

    batches: int
    rest: int = 0
    note: str = ""


def extent_of(feed: Feed, batches: int | None) -> Extent:
    """Return what an evaluation of at most so many ``batches`` reads of its data; no sample comes twice.

    Raises:
        RunError: the data cannot be read, or has no batch for these programs.
    """
    count, most = feed.count, batches or BATCHES
    if count is None:
        return Extent(most)
    whole, rest = divmod(count, feed.batch)
    if whole + bool(rest) > most:
        left = f"each evaluation reads {most} of the {whole + bool(rest)} batches of its data"
        return Extent(most, note="" if batches else f"{left}; `batches N` in the plan's `eval` line reads N")
    if rest and (fault := feed.tail_fault(rest)):
        samples = f"{rest} sample{'s' * (rest != 1)}"
        if not whole:
            message = f"the evaluation's data has {samples}, and a batch takes {feed.batch}"
            raise RunError(BAD_DATA, message, f"give it {feed.batch} or more, or make B smaller", [fault])
        return Extent(whole, note=f"each evaluation leaves out the last {samples} of its data: {fault}")
    return Extent(whole, rest)


def _check_alike(rows: Sequence[Sequence[int]], what: str) -> None:
    if other := next((rank for rank, row in enumerate(rows) if row != rows[0]), None):
        message = f"rank {other} has other samples to {what} than rank 0: there are more, or fewer"
        raise RunError(BATCHES_DIFFER, message, "give every rank the same data")


@final
class Evaluation:
    """The evaluation of one rank's model; every rank calls alike. ``by_sizes`` has what runs the programs of a
    ``build`` that trains nothing, for batches of each size. ``initial`` makes what ``eval()`` reads and a step of
    training does not; None where the state is that of a session of the ``build`` itself."""

    def __init__(
        self, build: Build, by_sizes: BySizes[AtSizes], mesh: Mesh, initial: Initial | None, together: Together
    ) -> None:
        self._build, self._by_sizes, self._mesh = build, by_sizes, mesh
        self._initial, self._together = initial, together
        self._role = build.role_at(mesh.coordinates(together.rank))
        self._batches = Batches(by_sizes, mesh, together)
        self._predictions: dict[int, Predictions] = {}
        self._told = False

    @cached_property
    def _fixed(self) -> dict[str, torch.Tensor]:
        """The buffers that no step changes, and the numbers in the model's code, as ``eval()`` reads them."""
        if self._initial is None:
            return {}
        names = held(self._role, BUFFERS) - {*self._build.manifest["updates"]}
        types = {name: type_ for name, type_ in constants_of(self._build).items() if name in names}
        return self._initial.buffers(types, self._build.manifest["constants"])

    @cached_property
    def _counts_a_share(self) -> bool:
        """True where the loss is divided by a mean over samples, and batches have different numbers of samples."""
        from ..compiler.analysis.samples import counts_a_share  # asked where sizes have ranges alone

        template, inputs = self._build.template, self._build.manifest["inputs"]
        unbatched = [line["name"] for line in inputs if line["dims"][:1] != [BATCH]]
        return template is not None and BATCH in template.ranges and counts_a_share(self._build.reference, unbatched)

    @cached_property
    def extent(self) -> Extent:
        """The samples that each evaluation of a run reads.

        Collective: every rank asks for it.

        Raises:
            RunError: on every rank: the data cannot be read, or is not the same everywhere.
        """

        def make() -> tuple[Extent, list[int]]:
            found = extent_of(self._by_sizes().feed, self._build.manifest["batches"])
            return found, [found.batches, found.rest]

        found, rows = self._together.exchanged(_MEAN, make)
        _check_alike(rows, "evaluate")
        return found

    def left_out(self) -> str:
        """Return a sentence on the data that evaluations leave out, or "". ``mean`` warns of it unless it was asked.

        Collective: every rank asks for it.
        """
        self._told = True
        return self.extent.note

    def mean(self, state: RankState) -> float:
        """Return the mean loss over the first batches of the evaluation's data, as many as the plan says, where there
        are so many. Each counts by its targets, or, where the loss counts none, by its samples: the mean is that over
        one large batch of all their samples. Samples that are left out are warned of once."""
        check_trains(self._build)
        extent, feed, rest = self.extent, self._by_sizes().feed, None
        if not self._told and self.left_out() and not self._together.rank:
            warnings.warn(extent.note, stacklevel=2)
        if extent.rest:
            rest = self._together.agreed(_MEAN, lambda: feed.beginning(extent.batches, extent.rest))
        total, weights = 0.0, 0.0
        for number in range(extent.batches + (rest is not None)):
            batch = rest if number == extent.batches else None
            loss, weight = self._weighed(batch, None, state, number, extent.batches)
            if weight:  # the loss of a batch without a target is none
                total, weights = total + loss * weight, weights + weight
        return total / weights if weights else math.nan

    def loss(self, batch: Batch | None, local: Batch | None, state: RankState, step: int) -> float:
        """Return the global loss of a batch, or of batch ``step`` (from 0) of the evaluation's data. Nothing of the
        ``state`` is changed."""
        check_trains(self._build)
        return self._weighed(batch, local, state, step, None)[0]

    def _weighed(
        self, batch: Batch | None, local: Batch | None, state: RankState, step: int, last: int | None
    ) -> tuple[float, float]:
        """Return the global loss of a batch, and the number of its targets, or, where the loss counts none, of its
        samples. Of the evaluation's data nothing is read beyond batch ``last``."""
        own = replace(state, buffers={**state.buffers, **self._fixed})
        begun = self._batches.begin("session.evaluate", batch, local, own, step, last, keep=False)
        with self._together.doing("an evaluation", own):
            (result,) = begun.at.stepper.evaluate(begun.work, step)
        if not begun.at.stepper.counts:
            return float(result.loss), begun.at.feed.batch
        count = 1 / float(begun.work[0].totals[SCALE])
        return float(result.loss), count * begun.at.feed.batch if self._counts_a_share else count

    def predict(
        self, batch: Batch | None, local: Batch | None, state: RankState, step: int, split: bool,
        last: int | None = None,
    ) -> dict[str, torch.Tensor] | dict[str, LocalPart]:  # fmt: skip
        """Return the tensors that the model returns for a batch, which is given as to ``loss`` and need not have inputs
        that the loss alone reads: whole tensors, or the parts of a rank where these are to stay ``split``. Of the
        evaluation's data nothing is read beyond batch ``last``."""
        own = replace(state, buffers={**state.buffers, **self._fixed})
        call = "session.predict(split=True)" if split else "session.predict"  # ranks talk in one of them alone
        begun = self._batches.begin(call, batch, local, own, step, last, keep=False, complete=self._complete)
        predictions = self._predictions_at(begun.at)
        predictions.check()
        with self._together.doing("a prediction", own):
            (result,) = begun.at.stepper.evaluate(begun.work, step, returns=True)
            if split:
                return predictions.local(result.returned)
            return predictions.whole(result.returned, batch, local)

    @cached_property
    def count(self) -> int:
        """The number of samples of the data, which all ranks have alike. Collective: every rank asks for it.

        Raises:
            RunError: on every rank: the data cannot be read or has no end; or the model returns nothing to predict, or
                mixes samples, of which the last batch has too few.
        """
        at = self._by_sizes()

        def counted() -> tuple[int, list[int]]:
            if (count := at.feed.count) is None:
                help_ = "name files, a folder, or a dataset with a length"
                raise RunError(BAD_DATA, "the samples to predict have no end", help_)
            self._predictions_at(at).check(count % at.feed.batch)
            return count, [count]

        count, rows = self._together.exchanged("session.predict", counted)
        _check_alike(rows, "predict")
        return count

    def predict_all(self, state: RankState) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield what ``predict`` returns for all samples of the data, batch by batch in their order, each with the
        number of its samples. Collective: every rank takes as many."""
        feed, (whole, rest) = self._by_sizes().feed, divmod(self.count, self._by_sizes().feed.batch)
        for number in range(whole):
            yield feed.batch, cast(dict[str, torch.Tensor], self.predict(None, None, state, number, False, whole))
        if rest:
            batch = self._together.agreed("session.predict", lambda: feed.beginning(whole, rest))
            yield rest, cast(dict[str, torch.Tensor], self.predict(batch, None, state, whole, False))

    @property
    def sample_dims(self) -> Mapping[str, int | None]:
        """The dim of each returned tensor along which it has its samples; None where it is alike for all."""
        return self._predictions_at(self._by_sizes()).dims

    def _complete(self, at: AtSizes, batch: Batch, shares: Mapping[str, int]) -> Batch:
        return self._predictions_at(at).completed(batch, shares)

    def _predictions_at(self, at: AtSizes) -> Predictions:
        if id(at) not in self._predictions:
            self._predictions[id(at)] = Predictions(at.build, at.feed, self._mesh, self._together.rank)
        return self._predictions[id(at)]

    def close(self) -> None:
        """Stop reading data."""
        self._by_sizes().feed.close()
