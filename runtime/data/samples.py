"""Samples by their global number: bytes of text files as tokens, random ones, or a callable's. Each rank reads only its
rows."""

from __future__ import annotations

import glob
import hashlib
import math
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor

from ...compiler.initial.counter import normal, stream, uniform
from ...compiler.sizes.size_range import BATCH, SizeRange
from ...grammar.nearest import did_you_mean


class DataError(Exception):
    """The error of data that cannot be read as the plan says; the message is for the plan's author.

    ``help`` is a way out, where one is known; ``pattern`` the glob that is at fault.
    """

    def __init__(self, message: str, help: str = "", pattern: str = "") -> None:
        super().__init__(message)
        self.help, self.pattern = help, pattern


class SampleSource(Protocol):
    """Samples by their global number: sample i is the same on every rank, at any time, after any restart."""

    def __call__(self, number: int) -> Mapping[str, Tensor]:
        """Return the tensors of one sample, without a batch dim."""


@final
class ByteText:
    """The bytes of text files as tokens 0..255: windows of ``length`` tokens, each window once an epoch, shuffled.

    ``patterns`` are globs relative to ``root`` (``**`` for any depth); ``{stdlib}`` stands for the folder of the
    running Python's standard library, without the packages installed below it. The files, sorted by name, count as one
    text. Nothing is held in memory but names and sizes.

    Raises:
        DataError: a pattern matches no file, or all files together are shorter than ``length + 1`` bytes.
    """

    def __init__(self, patterns: Sequence[str], root: Path, length: int, seed: int = 0) -> None:
        if length < 1:
            raise DataError(f"a sample has at least one token, not {length}", "make samples longer")
        self.length = length
        self.seed = seed
        self._files = _matching(patterns, root)
        self._ends = list(accumulate(os.path.getsize(file) for file in self._files))
        self.size = self._ends[-1]  # bytes
        if self.size < length + 1:
            count = len(self._files)
            message = f"{count} files hold {self.size} bytes: a sample of {length} tokens needs {length + 1}"
            raise DataError(message, "name more files, or make samples shorter")
        self.windows = (self.size - 1) // length  # samples of an epoch

    def __call__(self, number: int) -> dict[str, Tensor]:
        """Return sample ``number`` >= 0: ``tokens`` and ``targets``, the byte after each, both int64 of shape
        [length]."""
        epoch, place = divmod(number, self.windows)
        start = permuted(place, self.windows, f"{self.seed} {epoch}") * self.length
        text = torch.frombuffer(bytearray(self._read(start, self.length + 1)), dtype=torch.uint8).to(torch.int64)
        return {"tokens": text[:-1], "targets": text[1:]}

    def _read(self, start: int, count: int) -> bytes:
        """Read ``count`` bytes of the whole text."""
        parts: list[bytes] = []
        place = bisect_right(self._ends, start)
        while count:
            begin = self._ends[place - 1] if place else 0
            wanted = min(count, self._ends[place] - start)
            with open(self._files[place], "rb") as file:
                file.seek(start - begin)
                part = file.read(wanted)
            if len(part) != wanted:
                raise DataError(
                    f"{self._files[place]} became shorter while it was read", "start again once nothing writes to it"
                )
            parts.append(part)
            start, count, place = start + wanted, count - wanted, place + 1
        return b"".join(parts)


@final
class CallableData:
    """Samples from a user's function: ``function(number)`` returns a dict of tensors, the same at every call."""

    def __init__(self, function: Callable[[int], Mapping[str, Tensor]]) -> None:
        self._function = function

    def __call__(self, number: int) -> dict[str, Tensor]:
        """Return sample ``number``, as the function returns it.

        Raises:
            DataError: it failed (chained), or gave something else than a dict of tensors.
        """
        try:
            sample = self._function(number)
        except (Exception, SystemExit) as error:
            message = f"making sample {number} failed: {type(error).__name__}: {error}"
            raise DataError(
                message, "the function of the plan's `data` line failed: call it with this number"
            ) from error
        entries = sample.items() if isinstance(sample, Mapping) else [("", sample)]
        wrong = next((f"{f'`{name}`' if name else 'it'} is {type(value).__name__}" for name, value in entries
                      if not isinstance(value, Tensor)), "")  # fmt: skip
        if wrong or not isinstance(sample, Mapping):
            help_ = "return tensors by the names of inputs, a number as `torch.tensor(3)`"
            raise DataError(f"sample {number} is not a dict of tensors: {wrong or 'it is a tensor'}", help_)
        return dict(sample)


@final
class SyntheticData:
    """Random samples of the plan's inputs, functions of ``seed``, the sample's number and the input's name alone.

    ``bounds`` has how many rows or classes the whole numbers of an input may name; others are 0 or 1.
    """

    def __init__(
        self, inputs: Sequence[Mapping[str, Any]], sizes: Mapping[str, int], bounds: Mapping[str, int], seed: int
    ) -> None:
        self._inputs, self._sizes, self._bounds, self._seed = inputs, sizes, bounds, seed

    def __call__(self, number: int) -> dict[str, Tensor]:
        """Return sample ``number`` >= 0."""
        return {line["name"]: self._drawn(line, number) for line in self._inputs}

    def _drawn(self, line: Mapping[str, Any], number: int) -> Tensor:
        name, dtype = line["name"], getattr(torch, line["dtype"])
        shape = [int(self._sizes.get(dim, dim)) for dim in line["dims"][line["dims"][:1] == [BATCH] :]]
        index = torch.arange(math.prod(shape)).reshape(shape)
        key = stream(self._seed, f"synthetic {name}", number)
        if dtype.is_floating_point:
            return normal(key, index).to(dtype)
        return (uniform(key, index) * self._bounds.get(name, 2)).to(torch.int64).to(dtype)


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
        form = _form(value.dtype, value.shape)
        fits = len(wanted) == value.dim() and all(size in w.values for size, w in zip(value.shape, wanted, strict=True))
        if form.split()[0] != line["dtype"] or not fits:
            declared = f"input {line['name']} {line['dtype']} [{', '.join(map(str, line['dims']))}]"
            text = f"`{line['name']}` of sample {number} is {form}, but `{declared}` asks for {line['dtype']}"
            return line["name"], f"{text} [{', '.join(map(str, wanted))}]"
    return None


def read_batch(source: SampleSource, step: int, batch: int, rows: Sequence[int] | slice) -> dict[str, Tensor]:
    """Return the given rows of the batch of one optimizer step, stacked: each tensor is [len(rows), *sample's shape].

    ``batch`` is the global batch size, ``step`` counts from 0; row r is global sample ``step * batch + r``. No other
    sample is read.

    Raises:
        DataError: samples differ in their names, dtypes or shapes, or there is no row.
    """
    numbers = range(batch)[rows] if isinstance(rows, slice) else rows
    samples = [source(step * batch + row) for row in numbers]
    if not samples:
        raise DataError("a batch has at least one row", "ask for one row or more")
    first = {name: (value.dtype, value.shape) for name, value in samples[0].items()}
    for row, sample in zip(numbers, samples, strict=True):
        form = {name: (value.dtype, value.shape) for name, value in sample.items()}
        if form != first:
            raise DataError(
                f"sample {step * batch + row} is {_shown(form)}, but {step * batch + numbers[0]} is {_shown(first)}",
                "give every sample tensors of the same names, types and shapes",
            )
    return {name: torch.stack([sample[name] for sample in samples]) for name in first}


def permuted(number: int, count: int, key: str) -> int:
    """Return the position of ``number`` in a pseudorandom permutation of ``range(count)`` that ``key`` chooses, without
    a table.

    Source: Black, Rogaway 2002, "Ciphers with arbitrary finite domains": a Feistel network on the next power of four,
    applied again for as long as it leaves the range.
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


def _matching(patterns: Sequence[str], root: Path) -> list[str]:
    """Return the files that the patterns match, each once, sorted, without empty ones."""
    library = sysconfig.get_path("stdlib")
    matches: set[str] = set()
    for pattern in patterns:
        absolute = os.path.join(root, pattern.replace("{stdlib}", glob.escape(library)))
        files = {os.path.normpath(name) for name in glob.iglob(absolute, recursive=True) if os.path.isfile(name)}
        if "{stdlib}" in pattern:  # what else is installed there differs from machine to machine
            files = {name for name in files if not {"site-packages", "dist-packages"} & set(Path(name).parts)}
        if not files:
            raise DataError(f'no file matches "{pattern}" in {root}', _meant(pattern, root), pattern)
        matches |= files
    return sorted(name for name in matches if os.path.getsize(name)) or sorted(matches)[:1]


def _meant(pattern: str, root: Path) -> str:
    """Return the question "did you mean ...?" with names similar to the first part of a pattern that does not exist;
    without such names, a text that says where patterns are looked for."""
    for part in Path(pattern).parts:
        if glob.has_magic(part) or not root.is_dir():
            break
        if not (root / part).exists():
            return did_you_mean(part, (entry.name for entry in root.iterdir()), _PATTERNS)
        root /= part
    return _PATTERNS


_PATTERNS = 'name files that are there, from the plan\'s folder: "texts/*.txt"; `**` goes into all folders below'


def _shown(form: Mapping[str, tuple[torch.dtype, torch.Size]]) -> str:
    return ", ".join(f"{name}: {_form(*found)}" for name, found in form.items())


def _form(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
