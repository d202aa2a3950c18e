"""Weights in safetensors files by the model's own names. They are checked against a model all at once, and read piece
by piece.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ...grammar.bounded import check_regular
from ..capture.adapters import base_names, saved_name
from ..capture.complex.form import real_form
from ..layout.mesh import Mesh, Shape
from ..layout.placement import DTYPES, TensorType
from ..padding.pads import Pad
from ..padding.tensors import real_entries, spread
from ..program.stacked import is_stacked, part_name

_COMPLEX = "C64"  # as safetensors calls complex64
_CHECKPOINT = frozenset({"parameter", "buffer", "optimizer"})
"""The first words of the names that tensors have in a run's checkpoint."""


class WeightsError(Exception):
    """The error of a folder that has no weights, or whose files cannot be read."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor of a model's state: all of its names, its shape and its type. An ``optional`` one, an adapter's, is as
    the model makes it where the files have no such tensor."""

    names: tuple[str, ...]
    shape: Shape
    dtype: torch.dtype
    optional: bool = False


@dataclass(frozen=True, slots=True)
class _Found:
    file: Path
    shape: Shape
    dtype: torch.dtype | None
    type_name: str


class OpenedFiles:
    """Safetensors files, each opened when it is first read."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()

    def read(self, file: Path, name: str, ranges: Sequence[Sequence[tuple[int, int]]]) -> torch.Tensor:
        """Return the entries of a tensor, in the form that programs hold, that lie at the crossings of its dims'
        ranges, put together. No other part of the file is read.

        Raises:
            SafetensorError, OSError: the file cannot be read, or has no such tensor.
        """
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        if not ranges:
            return self._open[file].get_tensor(name)  # type: ignore[no-any-return]
        part = self._open[file].get_slice(name)
        if part.get_dtype() != _COMPLEX:
            return _joined(part, ranges, ())
        numbers = _joined(part, ranges[:-1], ()) if ranges[1:] else self._open[file].get_tensor(name)
        return torch.cat([real_form(numbers)[..., first:last] for first, last in ranges[-1]], -1)

    def close(self) -> None:
        self._open.clear()
        self._stack.close()


@dataclass(frozen=True)
class Weights:
    """The tensors of a folder: the file, shape and type of each. Their numbers are not read yet."""

    folder: Path
    tensors: Mapping[str, _Found]
    twice: tuple[str, ...] = ()
    rounded: bool = False
    _opened: OpenedFiles = field(default_factory=OpenedFiles, repr=False, compare=False)

    def faults(self, expected: Sequence[Expected]) -> list[str]:
        """Return the tensors that are missing, extra, misshapen, or of a type that would be rounded, all at once."""
        known = {name for tensor in expected for name in tensor.names}
        adapted = any(tensor.optional and self.has(tensor.names) for tensor in expected)  # then it has all of them
        wanted = (tensor for tensor in expected if adapted or not tensor.optional)
        missing = (tensor.names[0] for tensor in wanted if self.tensors.keys().isdisjoint(tensor.names))
        faults = [f"`{name}` is missing" for name in missing]
        faults += [f"`{name}` is not a tensor of the model" for name in self.tensors if name not in known]
        faults += [f"`{name}` is in two files" for name in self.twice]
        for tensor in expected:
            for name in tensor.names:
                if name in self.tensors:
                    faults += self._unlike(name, tensor)
        return faults

    def _unlike(self, name: str, tensor: Expected) -> Iterator[str]:
        stored = self.tensors[name]
        if stored.shape != tensor.shape:
            yield f"`{name}` is {list(stored.shape)} there and {list(tensor.shape)} in the model"
        elif stored.dtype is None:
            yield f"`{name}` is of type {stored.type_name}, which parc does not read"
        elif stored.dtype != tensor.dtype and not _holds(tensor.dtype, stored.dtype):
            floats = stored.dtype.is_floating_point and tensor.dtype.is_floating_point
            if not (floats and self.rounded):
                types = f"{stored.dtype} there and {tensor.dtype} in the model".replace("torch.", "")
                yield f"`{name}` is {types}" + (": write `rounded` to allow it" if floats else "")

    def has(self, names: Sequence[str]) -> bool:
        """Return whether the files have a tensor, by any of its names."""
        return any(part_name(name, 0) in self.tensors for name in names)

    def whole(self, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
        """A whole tensor, by any of its names.

        Raises:
            WeightsError: the file can no longer be read.
        """
        name = self._named(names)
        return self._read(name, [[(0, size)] for size in self.tensors[name].shape]).to(dtype)

    def piece(
        self, names: Sequence[str], type_: TensorType, mesh: Mesh, at: Mapping[str, int], pads: Sequence[Pad] = ()
    ) -> torch.Tensor:
        """A rank's piece of a tensor, contiguous, zeros in its padding; no other part of the file is read.

        Raises:
            WeightsError: the file can no longer be read.
        """
        places = [real_entries(type_, dim, pads, mesh, at) for dim in range(len(type_.shape))]
        numbers = self._read(self._named(names), [_runs(entries) for _, entries in places])
        # a slice keeps the strides of the tensor in the file, and what a rank computes with lies as its type says
        return spread(numbers.to(type_.dtype).contiguous(), [kept for kept, _ in places])

    def _named(self, names: Sequence[str]) -> str:
        name = next((name for name in names if part_name(name, 0) in self.tensors), None)
        if name is None:
            raise WeightsError(f"`{self.folder}` has no `{names[0]}`")
        return name

    def _read(self, name: str, ranges: Sequence[Sequence[tuple[int, int]]]) -> torch.Tensor:
        if is_stacked(name):
            numbers = (number for first, last in ranges[0] for number in range(first, last))
            return torch.stack([self._read(part_name(name, number), ranges[1:]) for number in numbers])
        file = self.tensors[name].file
        try:
            return self._opened.read(file, name, ranges)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"`{file}` cannot be read: {error}") from None

    def close(self) -> None:
        self._opened.close()


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether a type holds every number of another type of its kind."""
    alike = dtype.is_floating_point == other.is_floating_point and other != torch.bool
    return alike and torch.promote_types(dtype, other) == dtype


def _joined(part: Any, runs: Sequence[Sequence[tuple[int, int]]], fixed: tuple[slice, ...]) -> torch.Tensor:
    if len(fixed) == len(runs):
        return part[fixed]  # type: ignore[no-any-return]
    pieces = [_joined(part, runs, (*fixed, slice(first, last))) for first, last in runs[len(fixed)]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=len(fixed))


def _runs(index: torch.Tensor) -> list[tuple[int, int]]:
    """Return rising indices as ranges of consecutive numbers.

    >>> _runs(torch.tensor([0, 1, 2, 6, 7]))
    [(0, 3), (6, 8)]
    """
    numbers = index.tolist()
    breaks = [at for at, (low, high) in enumerate(pairwise(numbers), start=1) if high != low + 1]
    bounds = pairwise([0, *breaks, len(numbers)])
    return [(numbers[first], numbers[last - 1] + 1) for first, last in bounds] if numbers else [(0, 0)]


def held_type(shape: Sequence[int], kind: str) -> tuple[Shape, torch.dtype | None]:
    """Return shape and dtype of a tensor in a safetensors file, for complex numbers those of their ``real_form``; None
    for a dtype that programs do not hold."""
    if kind == _COMPLEX:
        return (*shape, 2), torch.float32
    return tuple(shape), DTYPES.get(kind.lower())


def open_weights(folder: Path, rounded: bool = False) -> Weights:
    """The tensors that the safetensors files of a folder hold, or one such file.

    Raises:
        WeightsError: there is no such folder, no such file in it, or one cannot be read.
    """
    one_file = folder.is_file() and folder.suffix == ".safetensors"
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder] * one_file
    if not files:
        what = "has no `*.safetensors` file" if folder.is_dir() else "is not a folder"
        raise WeightsError(f"`{folder}` {what}")
    tensors: dict[str, _Found] = {}
    twice: list[str] = []
    for file in files:
        try:
            with safe_open(check_regular(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 no mapping
                    part = opened.get_slice(name)
                    twice += [name] if name in tensors else []
                    kind = part.get_dtype()
                    tensors[name] = _Found(file, *held_type(part.get_shape(), kind), kind)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"`{file}` cannot be read: {error}") from None
    if tensors and {name.partition(".")[0] for name in tensors} <= _CHECKPOINT:
        raise WeightsError(f"`{folder}` is a checkpoint of a run: use `--resume` or `session.restore` with it")
    return Weights(folder, tensors, tuple(twice), rounded)


def shown_faults(faults: Iterable[str]) -> tuple[str, ...]:
    """Return faults of tensors, each of which begins with a name, for a reader. Faults that differ only in the numbers
    of layers become one line.

    >>> shown_faults([*(f"`h.{layer}.up` is [4] there" for layer in (1, 2, 3)), "`wte` is missing"])
    ('`h.[1..3].up` is [4] there (3 tensors)', '`wte` is missing')
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for fault in faults:
        name, _, what = fault.removeprefix("`").partition("`")
        alike.setdefault((_NUMBER.sub("*", name), what), []).append(name)
    shown: list[str] = []
    for (_, what), names in alike.items():
        pattern = _pattern(names)
        shown += [f"`{pattern}`{what} ({len(names)} tensors)"] if pattern else [f"`{name}`{what}" for name in names]
    return tuple(shown)


_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9]\d*)(?![^.])")


def _pattern(names: Sequence[str]) -> str:
    """Return the pattern that matches these names and no other, where they differ in whole numbers between dots; "" if
    there is none."""
    numbers = [[int(number) for number in _NUMBER.findall(name)] for name in names]
    ends = [(min(column), max(column)) for column in zip(*numbers, strict=True)]
    many = math.prod(high - low + 1 for low, high in ends)
    if not len(names) == len(set(names)) == many or many < 2:
        return ""
    texts = (str(low) if low == high else f"[{low}..{high}]" for low, high in ends)
    return _NUMBER.sub(lambda _: next(texts), names[0])


# ---- the tensors that files of a model's weights have.


def state_tensors(module: nn.Module, aliases: Mapping[str, str]) -> list[Expected]:
    """Return the tensors of a model's state, tied ones once with all their names; ``aliases`` are these. Where adapters
    wrap layers, a layer has the name of the model without adapters too, and an adapter's tensor that of files of
    ``peft``."""
    bases = base_names(module)
    tensors: dict[str, Expected] = {}
    for name, value in module.state_dict().items():
        if isinstance(value, torch.Tensor):
            owner, base = aliases.get(name, name), bases.get(name, name)
            names = tensors[owner].names if owner in tensors else ()
            also = [saved_name(module, name), *([base] if base is not None else [])]
            names = tuple(dict.fromkeys((*names, name, *also)))
            held = real_form(value)
            tensors[owner] = Expected(names, tuple(held.shape), held.dtype, base is None)
    return list(tensors.values())
