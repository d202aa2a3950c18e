"""Predictions: the tensors that a model returns in ``eval()``, whole on every rank or as ranks hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import final

import torch

from ..compiler.build.build import Build
from ..compiler.layout.mesh import Mesh
from ..compiler.padding.pads import Pad
from ..compiler.padding.tensors import ranges_of, runs_of
from ..compiler.sizes.size_range import BATCH
from ..grammar.codes_build import BAD_DATA
from ..grammar.codes_run import NOTHING_RETURNED
from .data.feed import Feed
from .faults import RunError
from .returned import real_part, returned_types
from .saving import LocalPart
from .state.gather import Gatherer
from .state.shards import Piece
from .work import Batch

Returned = Mapping[str, Sequence[torch.Tensor]]
"""A rank's parts of what the model returns, by name and microbatch."""


@final
class Predictions:
    """The tensors that the model of an evaluation's ``build`` returns, on one rank."""

    def __init__(self, build: Build, feed: Feed, mesh: Mesh, rank: int) -> None:
        self._build, self._feed, self._mesh, self._coordinates = build, feed, mesh, mesh.coordinates(rank)
        self._unbatched = [line["name"] for line in feed.inputs if line["dims"][:1] != [BATCH]]
        roles = [build.role_at(mesh.coordinates(rank)) for rank in range(mesh.world)]
        self._gatherer = Gatherer(mesh, rank, feed.device, roles)
        self._types, main = returned_types(tuple(build.roles.values())), build.reference.main
        self._shapes = {name: main.values()[value].type.shape for name, value in main.returned("output").items()}

    @cached_property
    def dims(self) -> dict[str, int | None]:
        """The dim of each returned tensor along which it has its samples; None where it is alike for all.

        Raises:
            RunError: there is none.
        """
        from ..compiler.verify.padding import sample_dims

        if not (dims := sample_dims(self._build.reference, self._unbatched)):
            message = "the model returns no tensor that has a row for each sample"
            raise RunError(NOTHING_RETURNED, message, "let its forward return one, as `logits`, and build again")
        return dims

    @cached_property
    def _reads(self) -> set[str]:
        """The inputs that these tensors need."""
        from ..compiler.verify.padding import of_returned

        return {*of_returned(self._build.reference.main, self.dims).bound("input")}

    @cached_property
    def _mixed(self) -> str:
        """The reason why further samples would change what others get; "" if they do not."""
        from ..compiler.verify.padding import mixed_samples  # proves in sympy, which most runs need not import

        return mixed_samples(self._build.reference, self.dims, self._unbatched)

    def check(self, count: int = 0) -> None:
        """Check that there is anything to predict, and that a batch of ``count`` samples (0 for a whole one) can be
        completed; every rank finds the same.

        Raises:
            RunError: there is nothing, or it cannot.
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
        """Return a batch with zeros for inputs that only the loss reads, and with copies of its first sample behind the
        others where it has fewer samples than a step takes.

        Raises:
            RunError: the model returns nothing to predict, a needed input is missing, or further samples would change
                the tensors of the batch's own.
        """
        if (
            not isinstance(batch, Mapping)
            or not self.dims
            or not {*batch} <= {line["name"] for line in self._feed.inputs}
        ):
            return batch  # whoever cuts it says what is wrong
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
        made, given = dict[str, torch.Tensor](), (local if batch is None else batch) or {}
        batched = [name for name in self._feed.types if name in given and name not in self._unbatched]
        shared = max(batched, key=lambda name: self._feed.shares[name], default="")
        count = given[shared].shape[0] if shared else None
        rows = self._feed.rows_of(shared) if shared and batch is None else None
        for name, dim in self.dims.items():
            type_, owners = self._types[name]
            own = returned.get(name, [None] * int(self._build.manifest["microbatches"]))
            parts = [real_part(self._gatherer.whole(piece, type_, owners), self._shapes[name]) for piece in own]
            if dim is None:
                made[name] = parts[0]
                continue
            value = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
            value = value.unflatten(dim, (self._feed.batch, -1))  # a sample may have several rows
            value = value if rows is None else value.index_select(dim, rows)
            value = value if count is None else value.narrow(dim, 0, count)
            made[name] = value.flatten(dim, dim + 1)
        return made

    def local(self, returned: Returned) -> dict[str, LocalPart]:
        """Return what this rank holds of every tensor, and of which entries of the whole tensor that is."""
        made = {}
        for name in (name for name in self.dims if name in returned):
            (type_, _), shape, dim = self._types[name], list(self._shapes[name]), self.dims[name]
            sizes = zip(type_.shape, shape, strict=True)
            pads = [Pad(at, 1, real, longer) for at, (longer, real) in enumerate(sizes) if real < longer]
            runs = runs_of(type_, pads, self._mesh, self._coordinates)
            parts = [Piece(piece, runs).cut(piece) for piece in returned[name]]
            if dim is None:
                made[name] = LocalPart(parts[0].clone(), tuple(shape), tuple(map(ranges_of, runs)))
                continue
            rows, count = shape[dim], len(parts)
            every = [run._replace(first=run.first + index * rows) for index in range(count) for run in runs[dim]]
            ranges = [ranges_of(every if at == dim else own) for at, own in enumerate(runs)]
            shape[dim] = rows * count
            made[name] = LocalPart(torch.cat(parts, dim), tuple(shape), tuple(ranges))
        return made
