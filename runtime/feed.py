"""A rank's part of each step's microbatches, cut from whole batches or read from the plan's data, its rows alone."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

import torch

from ..compiler.artifact import Build
from ..compiler.callables import CallableError, load_callable
from ..compiler.mesh import Mesh
from ..compiler.placement import TensorType, dim_index, take
from ..grammar.codes_build import BAD_DATA
from .data import ByteText, CallableData, DataError, Source, read_batch
from .faults import RunError
from .simulate import class_bounds

Parts = list[dict[str, torch.Tensor]]
"""One rank's part of each microbatch of a step."""


@final
class Feed:
    """Cuts or reads batches for the rank at ``coordinates``; the next step's rows are read while one is computed."""

    def __init__(self, build: Build, mesh: Mesh, coordinates: Mapping[str, int], device: torch.device) -> None:
        self._build, self._mesh, self._coordinates, self._device = build, mesh, coordinates, device
        self.types = input_types(build)
        self._count = int(build.manifest["microbatches"])
        self._batched = {line["name"]: line["dims"][:1] == ["B"] for line in build.manifest["inputs"]}
        self._bounds = class_bounds(build.reference)
        self._source: Source | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, Future[Parts]] | None = None

    def cut(self, batch: Mapping[str, torch.Tensor]) -> Parts:
        """This rank's part of each microbatch of a step's *whole* batch.

        Raises:
            RunError: an input is missing, or has another shape, dtype or range than the plan's.
        """
        parts: Parts = [{} for _ in range(self._count)]
        for name, type_ in self.types.items():
            if name not in batch:
                raise RunError(BAD_DATA, f"the batch has no `{name}`", f"it needs {', '.join(self.types)}")
            value, rows = batch[name], type_.shape[0] if self._batched[name] else 0
            shape = (rows * self._count, *type_.shape[1:]) if rows else type_.shape
            self._check(name, value, shape, "of a whole step's batch")
            for index, part in enumerate(parts):
                piece = value[index * rows : (index + 1) * rows] if rows else value
                part[name] = take(piece, type_.placement, self._mesh, self._coordinates).to(self._device)
        return parts

    def next(self, step: int) -> Parts:
        """This rank's part of the microbatches of step ``step`` (from 0), from the plan's ``data`` line.

        Raises:
            RunError: the plan has no data, or it cannot be read.
        """
        if self._source is None:
            self._source = make_data(self._build)
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="parc-data")
        assert self._reader is not None
        ahead = self._ahead
        parts = ahead[1].result() if ahead is not None and ahead[0] == step else self._read(step)
        self._ahead = (step + 1, self._reader.submit(self._read, step + 1))
        return [{name: value.to(self._device) for name, value in part.items()} for part in parts]

    def close(self) -> None:
        """Stop reading ahead."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
        self._reader = self._source = self._ahead = None

    def _read(self, step: int) -> Parts:
        """Every sample that this rank needs, read once, on the CPU."""
        assert self._source is not None
        wanted = {
            (name, index): index * type_.shape[0] + self._index(type_, 0)
            if self._batched[name]
            else torch.zeros(1).long()
            for name, type_ in self.types.items()
            for index in range(self._count)
        }
        rows = sorted({int(row) for numbers in wanted.values() for row in numbers})
        size = int(self._build.manifest["sizes"].get("B", 1))
        try:
            samples = read_batch(self._source, step, size, rows)
        except DataError as error:
            raise RunError(BAD_DATA, f"step {step + 1}: {error}") from error
        missing = [name for name in self.types if name not in samples]
        if missing:
            held = f"samples hold {', '.join(f'`{name}`' for name in samples)}"
            raise RunError(BAD_DATA, f"samples have no `{missing[0]}`", f"name inputs as the data does: {held}")
        parts: Parts = [{} for _ in range(self._count)]
        for (name, index), numbers in wanted.items():
            type_ = self.types[name]
            at = torch.searchsorted(torch.tensor(rows), numbers)
            value = samples[name].index_select(0, at)
            value = value if self._batched[name] else value[0]
            self._check(
                name, value, (len(at) if self._batched[name] else type_.shape[0], *type_.shape[1:]), "of a rank's rows"
            )
            parts[index][name] = self._cut_rest(value, type_, 1 if self._batched[name] else 0)
        return parts

    def _index(self, type_: TensorType, dim: int) -> torch.Tensor:
        return dim_index(type_.shape[dim], dim, type_.placement, self._mesh, self._coordinates, None)

    def _cut_rest(self, value: torch.Tensor, type_: TensorType, first: int) -> torch.Tensor:
        """A rank's rows cut along the other dims too."""
        for dim in range(first, value.dim()):
            if type_.placement.splits(dim):
                value = value.index_select(dim, self._index(type_, dim))
        return value.contiguous()

    def _check(self, name: str, value: Any, shape: tuple[int, ...], what: str) -> None:
        """Shape, dtype, and that class numbers are below what they index: a split table would not notice."""
        type_ = self.types[name]
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape or value.dtype != type_.dtype:
            have = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            wanted = f"{type_.dtype} {list(shape)}".replace("torch.", "")
            raise RunError(
                BAD_DATA, f"`{name}` is {have.replace('torch.', '')}, not {wanted}",
                f"the shape {what} follows from the plan's `input` and `sizes` lines",
            )  # fmt: skip
        if name in self._bounds:
            bound, ignore = self._bounds[name]
            wrong = (value < 0) | (value >= bound)
            if ignore is not None:
                wrong &= value != ignore
            if bool(wrong.any()):
                raise RunError(BAD_DATA, f"`{name}` holds {int(value[wrong][0])}, but the model knows 0 to {bound - 1}")


def input_types(build: Build) -> dict[str, TensorType]:
    """The type of each input in one microbatch."""
    programs = [build.programs[action] for action in ("F", "COUNT") if action in build.programs]
    return {
        value.role.removeprefix("input "): value.type
        for program in programs
        for value in program.main.parameters
        if value.role.startswith("input ")
    }


def make_data(build: Build) -> Source:
    """The source of samples of a build's ``data`` line.

    Raises:
        RunError: there is none, or nothing can be read.
    """
    line = build.manifest["data"]
    if line is None:
        raise RunError(BAD_DATA, "the plan has no `data` line", 'add one, e.g. `data bytes "{stdlib}/*.py"`')
    if line["callable"] is not None:
        try:
            function = load_callable(line["callable"], build.folder)
        except CallableError as error:
            raise RunError(BAD_DATA, f"the data's callable: {error}") from error
        arguments = line["arguments"]
        return CallableData(lambda index: function(index, **arguments))
    first = build.manifest["inputs"][0]["dims"]
    length = build.manifest["sizes"].get(first[-1], first[-1]) if first else 0
    try:
        return ByteText(line["globs"], build.folder, int(length))
    except DataError as error:
        raise RunError(BAD_DATA, str(error)) from error
