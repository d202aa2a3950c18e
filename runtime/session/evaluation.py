"""Evaluation: losses and predictions of a model in ``eval()``, with the parameters and buffers of a session."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast, final

import torch

from ...compiler.build.build import Build
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import TensorType
from ...compiler.padding.pads import Pad
from ...compiler.padding.tensors import ranges_of, runs_of
from ...compiler.program.actions import FORWARD
from ...compiler.program.binding import BUFFERS, SCALE
from ...compiler.program.roles import Role
from ...compiler.sizes.size_range import BATCH
from ...grammar.codes import BAD_DATA, BATCHES_DIFFER, NO_EVALUATION, NOTHING_RETURNED, TRAINS_NOTHING
from ..data.batches import Batches
from ..data.feed import Feed
from ..data.sizes import AtSizes, BySizes
from ..data.sources import PREDICTED
from ..ranks.faults import RunError
from ..ranks.gather import Gatherer, held
from ..ranks.lockstep import Lockstep
from ..ranks.work import Batch, RankState
from ..state.initial import Initial
from ..state.opening import constants_of
from ..state.saving import LocalPart
from ..state.shards import Piece

# ---- predictions: the tensors that a model returns, whole on every rank or as ranks hold them


def returned_types(roles: Sequence[Role]) -> dict[str, tuple[TensorType, tuple[Role, ...]]]:
    """Return the type of a microbatch of each tensor that the model returns, and the roles that have it."""
    types: dict[str, tuple[TensorType, tuple[Role, ...]]] = {}
    for role in roles:
        for program in role.programs.values():
            if program.action == FORWARD:
                values = program.main.values()
                for name, value in program.main.returned("output").items():
                    _, owners = types.get(name, (None, ()))
                    types[name] = values[value].type, (*owners, role)
    return types


def without_padding(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a whole tensor without the padding after its entries; ``shape`` is its shape in the model."""
    for dim, size in enumerate(shape):
        value = value.narrow(dim, 0, size)
    return value


Returned = Mapping[str, Sequence[torch.Tensor]]
"""A rank's parts of the returned tensors, by name and microbatch."""


@final
class Predictions:
    """The returned tensors of an evaluation's ``build``, on one rank."""

    def __init__(self, build: Build, feed: Feed, mesh: Mesh, rank: int) -> None:
        self._build, self._feed, self._mesh, self._coordinates = build, feed, mesh, mesh.coordinates(rank)
        self._unbatched = [line["name"] for line in feed.inputs if line["dims"][:1] != [BATCH]]
        roles = [build.role_at(mesh.coordinates(rank)) for rank in range(mesh.world)]
        self._gatherer = Gatherer(mesh, rank, feed.device, roles)
        self._types, main = returned_types(tuple(build.roles.values())), build.reference.main
        self._shapes = {name: main.values()[value].type.shape for name, value in main.returned("output").items()}

    @cached_property
    def dims(self) -> dict[str, int | None]:
        """The dim of samples of each returned tensor; None where it is the same for all samples.

        Raises:
            RunError: no tensor has a row for each sample.
        """
        from ...compiler.verify.padding import sample_dims

        if not (dims := sample_dims(self._build.reference, self._unbatched)):
            message = "the model returns no tensor that has a row for each sample"
            raise RunError(NOTHING_RETURNED, message, "let its forward return one, as `logits`, and build again")
        return dims

    @cached_property
    def _reads(self) -> set[str]:
        """The inputs that these tensors need."""
        from ...compiler.verify.padding import of_returned

        return {*of_returned(self._build.reference.main, self.dims).bound("input")}

    @cached_property
    def _mixed(self) -> str:
        """The reason why further samples in a batch would change the tensors of others; "" if they do not."""
        from ...compiler.verify.padding import mixed_samples  # proves in sympy, which most runs need not import

        return mixed_samples(self._build.reference, self.dims, self._unbatched)

    def check(self, count: int = 0) -> None:
        """Check that the model returns something to predict, and that a batch of ``count`` samples (0 for a full one)
        can be completed, with the same outcome on every rank.

        Raises:
            RunError: it returns nothing, or the batch cannot be completed.
        """
        if self.dims and count and self._mixed:
            raise self._refusal(count, self._feed.batch, "the last batch")

    def _refusal(self, count: int, size: int, what: str) -> RunError:
        samples = f"{count} sample{'s' * (count != 1)}"
        message = f"{what} has {samples} of the {size} that a prediction takes"
        help_ = f"give {size}, or build the plan for another B"
        notes = [f"further samples would change what these get: {self._mixed}"]
        return RunError(BAD_DATA, message, help_, notes)

    def completed(self, batch: Batch, shares: Mapping[str, int]) -> Batch:
        """Return a batch with zeros for missing inputs that only the loss reads, and padded with copies of its first
        sample if it has fewer samples than a step takes.

        Raises:
            RunError: the model returns nothing to predict, a needed input is missing, or further samples would change
                the tensors of the batch's own.
        """
        if (
            not isinstance(batch, Mapping)
            or not self.dims
            or not {*batch} <= {line["name"] for line in self._feed.inputs}
        ):
            return batch  # Feed.cut reports the fault
        batched = {
            name: value for name, value in batch.items() if name in self._feed.types and name not in self._unbatched
        }
        if missing := sorted(self._reads - {*batch}):
            needs = ", ".join(f"`{name}`" for name in sorted(self._reads))
            help_ = f"a prediction needs {needs}; other inputs may be left out"
            raise RunError(BAD_DATA, f"the batch has no `{missing[0]}`", help_)
        if any(not isinstance(value, torch.Tensor) or not value.dim() for value in batched.values()):
            return batch
        counts = {(value.shape[0], self._feed.samples(name, shares)) for name, value in batched.items()}
        if len(counts) != 1:
            return batch
        (count, size), filled = counts.pop(), dict(batch)
        for name, type_ in self._feed.types.items():
            if name not in batch and name not in self._reads:
                rows = [count * self._feed.samples(name, shares) // size] if name not in self._unbatched else []
                filled[name] = torch.zeros([*rows, *type_.shape[len(rows) :]], dtype=type_.dtype)
        if not 0 < count < size:
            return filled
        if self._mixed:
            raise self._refusal(count, size, "this rank" if shares else "the batch")
        whole = {name: torch.cat([value, value[:1].expand(size - count, *value.shape[1:])])
                 for name, value in filled.items() if name not in self._unbatched}  # fmt: skip
        return {**filled, **whole}

    def whole(self, returned: Returned, batch: Batch | None, local: Batch | None) -> dict[str, torch.Tensor]:
        """Return every tensor whole, on the CPU, with the samples of the batch, or of this rank's ``local`` part of it,
        in their order."""
        whole, inputs = dict[str, torch.Tensor](), (local if batch is None else batch) or {}
        batched = [name for name in self._feed.types if name in inputs and name not in self._unbatched]
        shared = max(batched, key=lambda name: self._feed.shares[name], default="")
        count = inputs[shared].shape[0] if shared else None
        rows = self._feed.rows_of(shared) if shared and batch is None else None
        for name, dim in self.dims.items():
            type_, owners = self._types[name]
            pieces = returned.get(name, [None] * int(self._build.manifest["microbatches"]))
            parts = [without_padding(self._gatherer.whole(x, type_, owners), self._shapes[name]) for x in pieces]
            if dim is None:
                whole[name] = parts[0]
                continue
            value = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
            value = value.unflatten(dim, (self._feed.batch, -1))  # a sample may have several rows
            value = value if rows is None else value.index_select(dim, rows)
            value = value if count is None else value.narrow(dim, 0, count)
            whole[name] = value.flatten(dim, dim + 1)
        return whole

    def local(self, returned: Returned) -> dict[str, LocalPart]:
        """Return this rank's part of every tensor, and its entries in the whole tensor."""
        local_parts = {}
        for name in (name for name in self.dims if name in returned):
            (type_, _), shape, dim = self._types[name], list(self._shapes[name]), self.dims[name]
            sizes = zip(type_.shape, shape, strict=True)
            pads = [Pad(at, 1, real, longer) for at, (longer, real) in enumerate(sizes) if real < longer]
            runs = runs_of(type_, pads, self._mesh, self._coordinates)
            parts = [Piece(piece, runs).cut(piece) for piece in returned[name]]
            if dim is None:
                local_parts[name] = LocalPart(parts[0].clone(), tuple(shape), tuple(map(ranges_of, runs)))
                continue
            rows, count = shape[dim], len(parts)
            every = [run._replace(first=run.first + index * rows) for index in range(count) for run in runs[dim]]
            ranges = [ranges_of(every if at == dim else of_dim) for at, of_dim in enumerate(runs)]
            shape[dim] = rows * count
            local_parts[name] = LocalPart(torch.cat(parts, dim), tuple(shape), tuple(ranges))
        return local_parts


# ---- evaluation


def evaluation_of(build: Build) -> Build:
    """Return the build of a build's evaluation; a build for inference is its own.

    Raises:
        RunError: it has no evaluation.
    """
    if not build.trains:
        return build
    if build.evaluation is None:
        message = f"`{build.path}` has no programs that evaluate the model: its plan has no `eval` line"
        raise RunError(NO_EVALUATION, message, "add a line `eval` to the plan, and build again")
    return build.evaluation


def with_samples(build: Build, samples: Mapping[str, Any]) -> Build:
    """Return an evaluation at its largest sizes that reads other ``samples``, a `data` line's, in their order. They
    need not have inputs that only the loss reads."""
    from ...compiler.verify.padding import of_returned  # proves in sympy, which most runs need not import

    needed = [*of_returned(build.reference.main).bound("input")]
    return replace(build, manifest={**build.manifest, "data": samples, "said": PREDICTED, "needed": needed},
                   template=None)  # fmt: skip


def trains_nothing(path: Path) -> RunError:
    """Return the error of training with a plan for inference, or with its build."""
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
"""The largest number of batches of an evaluation, unless the plan has one."""
_MEAN = "session.evaluation.mean"


@dataclass(frozen=True, slots=True)
class Extent:
    """The samples that an evaluation of a run reads: full ``batches`` of its data, then a smaller one of ``rest``
    samples (0: none). ``note`` says which part of the data is left out, or is ""."""

    batches: int
    rest: int = 0
    note: str = ""


def extent_of(feed: Feed, batches: int | None) -> Extent:
    """Return the extent of an evaluation of at most ``batches`` batches; no sample is read twice.

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
    """The evaluation of one rank's model; its methods are collective. ``by_sizes`` has the steppers of the evaluation's
    ``build``, by sizes of batches. ``initial`` makes the buffers that ``eval()`` reads and training does not; None if
    the session is of the ``build`` itself."""

    def __init__(
        self, build: Build, by_sizes: BySizes[AtSizes], mesh: Mesh, initial: Initial | None, together: Lockstep
    ) -> None:
        self._build, self._by_sizes, self._mesh = build, by_sizes, mesh
        self._initial, self._together = initial, together
        self._role = build.role_at(mesh.coordinates(together.rank))
        self._batches = Batches(by_sizes, mesh, together)
        self._predictions: dict[int, Predictions] = {}
        self._note_read = False

    @cached_property
    def _fixed(self) -> dict[str, torch.Tensor]:
        """The buffers that no step changes, and the constants in the model's code, as ``eval()`` reads them."""
        if self._initial is None:
            return {}
        names = held(self._role, BUFFERS) - {*self._build.manifest["updates"]}
        types = {name: type_ for name, type_ in constants_of(self._build).items() if name in names}
        return self._initial.buffers(types, self._build.manifest["constants"])

    @cached_property
    def _counts_a_share(self) -> bool:
        """True where the loss is divided by a mean over samples, and batches have different numbers of samples."""
        from ...compiler.analysis.samples import counts_a_share  # needed only with ranges of sizes

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
            extent = extent_of(self._by_sizes().feed, self._build.manifest["batches"])
            return extent, [extent.batches, extent.rest]

        extent, rows = self._together.exchanged(_MEAN, make)
        _check_alike(rows, "evaluate")
        return extent

    def left_out(self) -> str:
        """Return a sentence on the data that evaluations leave out, or "". Once asked, ``mean`` no longer warns of it.

        Collective: every rank asks for it.
        """
        self._note_read = True
        return self.extent.note

    def mean(self, state: RankState) -> float:
        """Return the mean loss over the first batches of the evaluation's data, at most as many as the plan has.
        Batches are weighted by their targets, or by their samples if the loss counts none, so the mean is the loss of
        one large batch. Samples that are left out are warned of once."""
        check_trains(self._build)
        extent, feed, rest = self.extent, self._by_sizes().feed, None
        if not self._note_read and self.left_out() and not self._together.rank:
            warnings.warn(extent.note, stacklevel=2)
        if extent.rest:
            rest = self._together.agreed(_MEAN, lambda: feed.beginning(extent.batches, extent.rest))
        total, weights = 0.0, 0.0
        for number in range(extent.batches + (rest is not None)):
            batch = rest if number == extent.batches else None
            loss, weight = self._weighed(batch, None, state, number, extent.batches)
            if weight:  # without targets the loss is NaN
                total, weights = total + loss * weight, weights + weight
        return total / weights if weights else math.nan

    def loss(self, batch: Batch | None, local: Batch | None, state: RankState, step: int) -> float:
        """Return the global loss of a batch, or of batch ``step`` (from 0) of the evaluation's data. The ``state`` is
        not changed."""
        check_trains(self._build)
        return self._weighed(batch, local, state, step, None)[0]

    def _evaluated(self, state: RankState) -> RankState:
        """Return a copy of the state with the buffers that ``eval()`` reads."""
        return replace(state, buffers={**state.buffers, **self._fixed})

    def _weighed(
        self, batch: Batch | None, local: Batch | None, state: RankState, step: int, last: int | None
    ) -> tuple[float, float]:
        """Return the global loss of a batch, and the number of its targets, or of its samples if the loss counts none.
        The evaluation's data is not read beyond batch ``last``."""
        evaluated = self._evaluated(state)
        begun = self._batches.begin("session.evaluate", batch, local, evaluated, step, last, keep=False)
        with self._together.doing("an evaluation", evaluated):
            (result,) = begun.at.stepper.evaluate(begun.work, step)
        if not begun.at.stepper.counts:
            return float(result.loss), begun.at.feed.batch
        count = 1 / float(begun.work[0].totals[SCALE])
        return float(result.loss), count * begun.at.feed.batch if self._counts_a_share else count

    def predict(
        self, batch: Batch | None, local: Batch | None, state: RankState, step: int, split: bool,
        last: int | None = None,
    ) -> dict[str, torch.Tensor] | dict[str, LocalPart]:  # fmt: skip
        """Return the tensors that the model returns for a batch: whole ones, or with ``split`` this rank's parts. The
        batch is given as to ``loss``, and need not have inputs that only the loss reads. The evaluation's data is not
        read beyond batch ``last``."""
        evaluated = self._evaluated(state)
        call = "session.predict(split=True)" if split else "session.predict"  # only one of them is collective
        begun = self._batches.begin(call, batch, local, evaluated, step, last, keep=False, complete=self._complete)
        predictions = self._predictions_at(begun.at)
        predictions.check()
        with self._together.doing("a prediction", evaluated):
            (result,) = begun.at.stepper.evaluate(begun.work, step, returns=True)
            if split:
                return predictions.local(result.returned)
            return predictions.whole(result.returned, batch, local)

    @cached_property
    def count(self) -> int:
        """The number of samples of the data, the same on all ranks. Collective: every rank asks for it.

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
        """Yield the number of samples and the predictions of each batch of the data, in order. Collective: every rank
        takes all of them."""
        feed, (whole, rest) = self._by_sizes().feed, divmod(self.count, self._by_sizes().feed.batch)
        for number in range(whole):
            yield feed.batch, cast(dict[str, torch.Tensor], self.predict(None, None, state, number, False, whole))
        if rest:
            batch = self._together.agreed("session.predict", lambda: feed.beginning(whole, rest))
            yield rest, cast(dict[str, torch.Tensor], self.predict(batch, None, state, whole, False))

    @property
    def sample_dims(self) -> Mapping[str, int | None]:
        """The dim of samples of each returned tensor; None where it is the same for all samples."""
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
