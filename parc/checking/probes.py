"""Probes: the weights and the batch on which the captured graph is compared with the user's module.

Random numbers leave much unseen. Behind a weight of zeros every gradient is zero, a table's first and last row are
seldom looked up, and whole numbers without a known bound mean something. So one probe has the initial weights, another
moved ones, and batches hold the ends of every range, and samples of the plan's own data.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy
import torch
from torch import Tensor

from parc.compiler.capture.capture import InputSpec
from parc.compiler.sizes.size_range import BATCH
from parc.compiling.compiled import Compiled
from parc.compiling.plan_capture import input_specs
from parc.runtime.compare.model_run import Case
from parc.runtime.data.random_batch import class_bounds, random_batch
from parc.runtime.data.sources import make_data
from parc.runtime.ranks.faults import RunError

SHARES = (0.2, 0.02)
"""The largest share of itself by which an entry of a weight is moved: the first with which the module is finite."""
_READ = 4
"""The samples that are read of the plan's data."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The parameters and buffers by name from which a step starts; ``share`` is that by which they are moved."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    share: float = 0.0

    @property
    def at(self) -> str:
        """The weights, in words."""
        return moved_text(self.share) if self.share else "at the initial weights"


def moved_text(share: float) -> str:
    """Return the words on weights that are moved by a share of themselves."""
    return f"at weights moved by up to {share:.0%}"


# ---- moved weights


def moved(tensors: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """Return tensors with every entry moved by a random part of ``share`` of itself, towards zero, so that it stays in
    the domain of a root, of a logarithm or of an arc cosine. Zeros move up, by the size of the other entries, or where
    all are zeros by that of the nearest other tensor. The numbers depend on names and shapes alone."""
    sizes = {name: _size(tensor) for name, tensor in tensors.items() if _is_moved(tensor)}

    def near(name: str) -> float:
        """Return the size of the tensor with the longest common path that is not all zeros."""
        parts = name.split(".")
        shared = {other: _common(parts, other.split(".")) for other, size in sizes.items() if size}
        return sizes[max(shared, key=lambda other: shared[other])] if shared else 1.0

    return {name: _moved(name, tensor, share, sizes[name] or near(name)) if name in sizes else tensor
            for name, tensor in tensors.items()}  # fmt: skip


def _is_moved(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


def _size(tensor: Tensor) -> float:
    """Return the root mean square of the finite entries that are not zeros; 0 without any."""
    entries = tensor.double()
    entries = entries[entries.isfinite() & (entries != 0)]
    return float(entries.square().mean().sqrt()) if entries.numel() else 0.0


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the number of equal parts at the start of two paths."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _moved(name: str, tensor: Tensor, share: float, size: float) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    parts = share * torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
    entries = tensor.double()
    return torch.where(entries == 0, size * parts, entries * (1 - parts)).to(tensor.dtype)


# ---- batches

_SHORT_RANGE = 3
"""The most numbers of a range that keeps its ends, as without them one number at most would be left."""


class ProbeBatches:
    """The batches of probes for one compiled plan at its sizes.

    Attributes:
        ends: whether the batches hold the first and the last number of each range, as tokens and classes have one.
        guessed: what is not of the plan's data although it should be, and why, "" where nothing is.
    """

    def __init__(self, compiled: Compiled, case: Case, ends: bool = True) -> None:
        self._compiled, self._case, self.ends = compiled, case, ends
        self._specs = input_specs(compiled.plan)
        self._bounds = class_bounds(case.reference)
        self._batched = {line.name for line in compiled.plan.inputs if line.dims[:1] == (BATCH,)}
        self.guessed = ""

    def batch(self, seed: int) -> dict[str, Tensor]:
        """Return one microbatch. Of several samples half are the plan's own; one sample is its own where ``seed`` is
        odd."""
        generator = torch.Generator().manual_seed(seed)
        (drawn,) = random_batch(self._case.reference, 1, generator)
        inputs = {}
        for name, spec in self._specs.items():
            value = drawn[name] if name in drawn else _unread(spec, generator)
            value = value.to(spec.dtype)
            first = spec.shape[0] // 2 if name in self._batched and spec.shape[0] > 1 else 0
            self._place_ends(name, value[first:] if first else value, generator)
            inputs[name] = self._without_ends(name, self._with_samples(name, value, seed))
        return inputs

    def _is_unbounded(self, name: str, spec: InputSpec) -> bool:
        return name not in self._bounds and not spec.dtype.is_floating_point and spec.dtype is not torch.bool

    def _place_ends(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Write the first and the last number of a range, each twice where there is room."""
        if not self.ends or name not in self._bounds or not value.numel():
            return
        last = self._bounds[name].drawn(value).flatten() - 1
        places = torch.randperm(value.numel(), generator=generator)[:4]
        ends = (last[places] * torch.tensor([1, 0, 1, 0])[: len(places)]).to(value.dtype)
        value.copy_(value.flatten().index_copy(0, places, ends).view_as(value))

    def _without_ends(self, name: str, value: Tensor) -> Tensor:
        """Return an input with the second number of a range in the place of its first one, and the last but one in that
        of its last, where the batches have no ends."""
        if self.ends or name not in self._bounds or self._bounds[name].least <= _SHORT_RANGE:
            return value
        return self._bounds[name].clamped(value)

    def _with_samples(self, name: str, value: Tensor, seed: int) -> Tensor:
        """Return an input with samples of the plan's data in its first half."""
        if name not in self._samples:
            return value
        samples = self._samples[name].to(value.dtype)
        whole = self._is_unbounded(name, self._specs[name])  # such numbers are not drawn, so all come from the data
        if name not in self._batched:
            return self._in_range(name, _fitted(samples[0], value.shape)) if seed % 2 or whole else value
        rows = len(value) if whole else len(value) // 2 or seed % 2
        return torch.cat([self._in_range(name, _fitted(samples, (rows, *value.shape[1:]))), value[rows:]])

    def _in_range(self, name: str, value: Tensor) -> Tensor:
        """Return numbers of the data below the count of rows or classes: a smaller model has fewer."""
        if name not in self._bounds:
            return value
        return self._bounds[name].within(value)

    @cached_property
    def _samples(self) -> dict[str, Tensor]:
        """The first samples of the plan's data by input, stacked; those of types and dims that inputs have."""
        line = self._compiled.build.manifest["data"]
        if line is None or line["form"] == "synthetic":
            self._guess("the plan has no `data` line" if line is None else "the data are synthetic", "")
            return {}
        try:
            with _own_draws():
                source = make_data(self._compiled.build)
                count = _READ if source.count is None else min(_READ, source.count)
                read = [source(number) for number in range(count)]
        except (Exception, SystemExit) as error:  # a person's code may fail in any way; a run says why
            message = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
            self._guess(f"the data cannot be read here: {message}", "no samples are the plan's own: ")
            return {}
        samples = {}
        for name, spec in self._specs.items():
            values = [sample[name] for sample in read if name in sample]
            dims, alike = len(spec.shape) - (name in self._batched), {value.shape for value in values}
            if len(alike) == 1 and values[0].dim() == dims and values[0].dtype == spec.dtype and values[0].numel():
                stacked = torch.stack(values)
                if not stacked.is_floating_point() or bool(stacked.isfinite().all()):
                    samples[name] = stacked
        return samples

    def _guess(self, why: str, otherwise: str) -> None:
        """Note why numbers are guessed, or else what follows; nothing if that is ""."""
        names = [name for name, spec in self._specs.items() if self._is_unbounded(name, spec)]
        words = f"numbers of {', '.join(f'`{name}`' for name in names)} are 0 or 1: " if names else otherwise
        self.guessed = words and words + why


def _unread(spec: InputSpec, generator: torch.Generator) -> Tensor:
    """Return numbers of an input that the captured graph does not read; the module may."""
    if spec.dtype.is_floating_point:
        return torch.randn(spec.shape, generator=generator, dtype=torch.float64)
    return torch.randint(2, spec.shape, generator=generator)


def _fitted(samples: Tensor, shape: Sequence[int]) -> Tensor:
    """Return samples cut to a shape, or repeated up to it: smaller builds have smaller sizes."""
    for dim, size in enumerate(shape):
        samples = samples.index_select(dim, torch.arange(size) % samples.shape[dim])
    return samples


@contextmanager
def _own_draws() -> Iterator[None]:
    """Enter a block after which all generators are as they were before."""
    states = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
