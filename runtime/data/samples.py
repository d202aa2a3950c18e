"""Samples by their number, the rows of a batch, and the checks of both. Each rank reads only its rows."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

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


def asked(call: Callable[[], _Got], what: str, help: str) -> _Got:
    """Return the result of a person's own code. ``what`` names it in the message.

    Raises:
        DataError: it failed (chained), or raised such an error itself.
    """
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
