"""Weights in safetensors files, by the model's own names: checked against a model at once, and read piece by piece."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ...grammar.bounded import MOST_JSON, check_regular
from ...grammar.syntax import size_text
from ..capture.adapters import base_names, saved_name
from ..capture.complex.form import real_form
from ..layout.mesh import Mesh, Shape
from ..layout.placement import DTYPES, TensorType
from ..padding.pads import Pad
from ..padding.tensors import ranges_of, real_entries, runs_of, spread
from ..program.stacked import is_stacked, part_name

_COMPLEX = "C64"  # as safetensors calls complex64
_CHECKPOINT = frozenset({"parameter", "buffer", "optimizer"})
"""The first words of the names that tensors have in a run's checkpoint."""


class WeightsError(Exception):
    """The error of a folder that has no weights, or whose files cannot be read."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor of a model's state: its names, shape and dtype. An ``optional`` one, an adapter's, keeps its initial
    value if the files do not have it."""

    names: tuple[str, ...]
    shape: Shape
    dtype: torch.dtype
    optional: bool = False


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    file: Path
    shape: Shape
    dtype: torch.dtype | None
    type_name: str


@contextmanager
def opened_tensors(file: Path) -> Iterator[Any]:
    """Enter a block with an open safetensors file. Its header is bounded, as every tensor in it takes memory.

    Raises:
        SafetensorError, OSError: it cannot be read.
    """
    with open(check_regular(file), "rb") as start:
        size = int.from_bytes(start.read(8), "little")
    if size > MOST_JSON:
        raise SafetensorError(f"its header has {size:,} bytes, and at most {size_text(MOST_JSON)} are read")
    with safe_open(file, framework="pt") as opened:
        yield opened


class OpenedFiles:
    """Safetensors files, each opened when it is first read."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()

    def read(self, file: Path, name: str, ranges: Sequence[Sequence[tuple[int, int]]]) -> torch.Tensor:
        """Return the block of a tensor, in its ``real_form``, at these ranges of each dim. No other part of the file is
        read.

        Raises:
            SafetensorError, OSError: the file cannot be read, or has no such tensor.
        """
        if file not in self._open:
            self._open[file] = self._stack.enter_context(opened_tensors(file))
        if not ranges:
            return self._open[file].get_tensor(name)  # type: ignore[no-any-return]
        part = self._open[file].get_slice(name)
        if part.get_dtype() != _COMPLEX:
            return _read_ranges(part, ranges)
        numbers = _read_ranges(part, ranges[:-1]) if ranges[1:] else self._open[file].get_tensor(name)
        return torch.cat([real_form(numbers)[..., first:last] for first, last in ranges[-1]], -1)

    def close(self) -> None:
        self._open.clear()
        self._stack.close()


@dataclass(frozen=True)
class Weights:
    """The tensors of a folder: file, shape and dtype of each, and, on request, their numbers."""

    folder: Path
    tensors: Mapping[str, _StoredTensor]
    twice: tuple[str, ...] = ()
    rounded: bool = False
    _opened: OpenedFiles = field(default_factory=OpenedFiles, repr=False, compare=False)

    def faults(self, expected: Sequence[Expected]) -> list[str]:
        """Return all faults: tensors that are missing, extra, misshapen, or of a dtype that would be rounded."""
        known = {name for tensor in expected for name in tensor.names}
        adapted = any(tensor.optional and self.has(tensor.names) for tensor in expected)  # then all adapters are there
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
        """Return a whole tensor, by any of its names.

        Raises:
            WeightsError: the file can no longer be read.
        """
        name = self._named(names)
        return self._read(name, [[(0, size)] for size in self.tensors[name].shape]).to(dtype)

    def piece(
        self, names: Sequence[str], type_: TensorType, mesh: Mesh, at: Mapping[str, int], pads: Sequence[Pad] = ()
    ) -> torch.Tensor:
        """Return a rank's piece of a tensor, contiguous, zeros in its padding; no other part of the file is read.

        Raises:
            WeightsError: the file can no longer be read.
        """
        kept = [real_entries(type_, dim, pads, mesh, at)[0] for dim in range(len(type_.shape))]
        ranges = [ranges_of(runs) or ((0, 0),) for runs in runs_of(type_, pads, mesh, at)]
        # a slice keeps the strides of the tensor in the file, and what a rank computes with lies as its type says
        return spread(self._read(self._named(names), ranges).to(type_.dtype).contiguous(), kept)

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
    """Return whether a dtype has every number of another one of its kind."""
    alike = dtype.is_floating_point == other.is_floating_point and other != torch.bool
    return alike and torch.promote_types(dtype, other) == dtype


def _read_ranges(part: Any, ranges: Sequence[Sequence[tuple[int, int]]], outer: tuple[slice, ...] = ()) -> torch.Tensor:
    """Return the block at these ranges of each dim; ``outer`` are chosen ranges of the first dims."""
    if len(outer) == len(ranges):
        return part[outer]  # type: ignore[no-any-return]
    pieces = [_read_ranges(part, ranges, (*outer, slice(first, last))) for first, last in ranges[len(outer)]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=len(outer))


def held_type(shape: Sequence[int], kind: str) -> tuple[Shape, torch.dtype | None]:
    """Return the shape and the dtype of a tensor in a safetensors file, of complex numbers those of their
    ``real_form``; None for a dtype that programs do not have."""
    if kind == _COMPLEX:
        return (*shape, 2), torch.float32
    return tuple(shape), DTYPES.get(kind.lower())


def open_weights(folder: Path, rounded: bool = False) -> Weights:
    """Open the safetensors files of a folder, or one such file.

    Raises:
        WeightsError: there is no such folder, no such file in it, or one cannot be read.
    """
    one_file = folder.is_file() and folder.suffix == ".safetensors"
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder] * one_file
    if not files:
        what = "has no `*.safetensors` file" if folder.is_dir() else "is not a folder"
        raise WeightsError(f"`{folder}` {what}")
    tensors: dict[str, _StoredTensor] = {}
    twice: list[str] = []
    for file in files:
        try:
            with opened_tensors(file) as opened:
                for name in opened.keys():  # noqa: SIM118 no mapping
                    part = opened.get_slice(name)
                    twice += [name] if name in tensors else []
                    kind = part.get_dtype()
                    tensors[name] = _StoredTensor(file, *held_type(part.get_shape(), kind), kind)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"`{file}` cannot be read: {error}") from None
    if tensors and {name.partition(".")[0] for name in tensors} <= _CHECKPOINT:
        raise WeightsError(f"`{folder}` is a checkpoint of a run: use `--resume` or `session.restore` with it")
    return Weights(folder, tensors, tuple(twice), rounded)


def shown_faults(faults: Iterable[str]) -> tuple[str, ...]:
    """Return faults, each of which begins with the name of a tensor, as lines for a reader: those that differ only in
    the numbers of layers become one.

    >>> shown_faults([*(f"`h.{layer}.up` is [4] there" for layer in (1, 2, 3)), "`wte` is missing"])
    ('`h.[1..3].up` is [4] there (3 tensors)', '`wte` is missing')
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for fault in faults:
        name, _, what = fault.removeprefix("`").partition("`")
        alike.setdefault((_LAYER_NUMBER.sub("*", name), what), []).append(name)
    shown: list[str] = []
    for (_, what), names in alike.items():
        pattern = _pattern(names)
        shown += [f"`{pattern}`{what} ({len(names)} tensors)"] if pattern else [f"`{name}`{what}" for name in names]
    return tuple(shown)


_LAYER_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9]\d*)(?![^.])")


def _pattern(names: Sequence[str]) -> str:
    """Return the pattern of names that differ in whole numbers between dots, if it matches no other names; else ""."""
    numbers = [[int(number) for number in _LAYER_NUMBER.findall(name)] for name in names]
    ends = [(min(column), max(column)) for column in zip(*numbers, strict=True)]
    many = math.prod(high - low + 1 for low, high in ends)
    if not len(names) == len(set(names)) == many or many < 2:
        return ""
    texts = (str(low) if low == high else f"[{low}..{high}]" for low, high in ends)
    return _LAYER_NUMBER.sub(lambda _: next(texts), names[0])


def state_tensors(module: nn.Module, aliases: Mapping[str, str]) -> list[Expected]:
    """Return the tensors of a model's state, tied ones once with all their names (``aliases``). With adapters, a
    wrapped layer also has its name in the model without them, and an adapter's tensor that in files of ``peft``."""
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
