"""The placement of a tensor: one type per mesh axis, its text form, and the arithmetic between global and local
shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar

import torch

from .mesh import Mesh, Shape
from .stretches import Outer, atoms, count, inside, is_zigzag, joined_stretches, nest, outer_of, terms, zigzag
from .sweep import SizeSweep


class Split(NamedTuple):
    """``S(dim, outer)``: see the dim as ``(outer, D / outer)`` and split the second part over the axis.

    ``outer`` counts *global* entries, so the types of different axes do not depend on each other; of two axes on one
    dim the minor one has ``outer`` = the size of the major one. Fused rows ``(3 h d)`` have ``outer`` = 3; parts that
    are not equal have their proportions there: rows of 64 + 32 + 32 have ``outer`` = (2, 1, 1). ``zigzag(2)``
    splits two parts, the second in reverse: ``(2 64/~cp)`` in text.
    """

    dim: int
    outer: Outer = 1

    def __str__(self) -> str:
        parts = self.outer if isinstance(self.outer, int) else "+".join(map(str, self.outer))
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim},{parts})"


AxisType = Literal["R", "I", "P"] | Split
"""The type of a value over one axis. ``R`` and ``I`` are replicated, the same value on all ranks: with ``R`` each rank
computes its own part of the work, with ``I`` all compute the same. ``P`` is partial: the true value is the sum over
the ranks. With ``Split`` each rank has a part. Gradients have the dual types: R and P swap, I and Split stay."""


_Kind = TypeVar("_Kind", bound=AxisType)


def parse_kind(text: str) -> AxisType:
    """The inverse of ``str`` on an axis type."""
    if text in ("R", "I", "P"):
        return text  # type: ignore[return-value]
    dim, _, outer = text[2:-1].partition(",")
    return Split(int(dim), outer_of([int(part) for part in outer.split("+")]) if "+" in outer else int(outer or 1))


def dual(kind: AxisType) -> AxisType:
    """The type of a gradient whose value has type ``kind``."""
    return {"R": "P", "P": "R"}.get(kind, kind) if isinstance(kind, str) else kind  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Placement:
    """One type per mesh axis, in mesh order."""

    types: tuple[tuple[str, AxisType], ...]

    def __hash__(self) -> int:
        return hash(self.types)

    @classmethod
    def whole(cls, mesh: Mesh, kind: AxisType = "I") -> Placement:
        """The same type on every axis."""
        return cls(tuple((axis, kind) for axis in mesh.names))

    @classmethod
    def of(cls, mesh: Mesh, types: Mapping[str, AxisType]) -> Placement:
        """``types`` on the axes they name, ``I`` on the others."""
        return cls(tuple((axis, types.get(axis, "I")) for axis in mesh.names))

    def __getitem__(self, axis: str) -> AxisType:
        for name, kind in self.types:
            if name == axis:
                return kind
        raise KeyError(axis)

    def items(self) -> tuple[tuple[str, AxisType], ...]:
        """Pairs of axis and type, in mesh order."""
        return self.types

    def replace(self, changes: Mapping[str, AxisType]) -> Placement:
        """The same placement with other types on some axes."""
        return Placement(tuple((axis, changes.get(axis, kind)) for axis, kind in self.types))

    def dual(self) -> Placement:
        """The placement of this value's gradient."""
        return Placement(tuple((axis, dual(kind)) for axis, kind in self.types))

    def data(self) -> Placement:
        """The placement of the bytes alone: ``R`` and ``I`` hold the same value, so both read ``I``."""
        return Placement(tuple((axis, "I" if kind == "R" else kind) for axis, kind in self.types))

    def as_one(self, axes: Sequence[str], mesh: Mesh) -> AxisType | None:
        """Return the type over axes that together act as one axis; None where they do not."""
        types = dict(self.types)
        kind = types[axes[0]]
        return kind if along(axes, kind, mesh).items() <= types.items() else None

    @property
    def partial(self) -> tuple[str, ...]:
        """The axes over which the value is still to be summed."""
        return tuple(axis for axis, kind in self.types if kind == "P")

    def splits(self, dim: int) -> list[tuple[Outer, str]]:
        """``(outer, axis)`` of every axis on ``dim``, major first."""
        splits = ((kind.outer, axis) for axis, kind in self.types if isinstance(kind, Split) and kind.dim == dim)
        return sorted(splits, key=lambda split: (count(split[0]), split[1]))

    def nests(self, shape: Sequence[int], mesh: Mesh) -> bool:
        """Return whether the splits of each dim fit each other and divide it."""
        return all(
            nest(size, [(outer, mesh.size(axis)) for outer, axis in self.splits(dim)]) for dim, size in enumerate(shape)
        )

    def split_axes(self) -> tuple[str, ...]:
        """Axes that split some dim, in mesh order."""
        return tuple(axis for axis, kind in self.types if isinstance(kind, Split))


def along(axes: Iterable[str], kind: _Kind, mesh: Mesh) -> dict[str, _Kind]:
    """Return the types of several axes that together form one axis of type ``kind``: the first is the major one of a
    split."""
    types: dict[str, _Kind] = {}
    for axis in axes:
        types[axis] = kind
        if isinstance(kind, Split):
            kind = kind._replace(outer=inside(kind.outer, mesh.size(axis)))
    return types


def parts(placement: Placement, mesh: Mesh, dim: int) -> int:
    """Return the number of pieces that ``dim`` is cut into."""
    return math.prod(mesh.size(axis) for _, axis in placement.splits(dim))


def local_shape(shape: Sequence[int], placement: Placement, mesh: Mesh) -> Shape:
    """Return the shape of one rank's piece of a tensor of global ``shape``.

    Raises:
        ValueError: a dim does not divide, or two splits of it overlap.
    """
    return _local_shape(tuple(shape), placement, mesh)


@lru_cache(maxsize=1 << 14)
def _local_shape(shape: Shape, placement: Placement, mesh: Mesh) -> Shape:
    result = list(shape)
    for dim in sorted({kind.dim for _, kind in placement.types if isinstance(kind, Split)}):
        size, pieces = shape[dim], parts(placement, mesh, dim)
        if size % pieces:
            raise ValueError(f"dim {dim} of {list(shape)} does not divide by {pieces}")
        if pieces > 1:
            for stretch, splits in terms(size, placement.splits(dim)):
                atoms(stretch, splits, mesh.size)  # the splits nest
        result[dim] = size // pieces
    return tuple(result)


DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
"""Types of tensors by the names that programs have for them."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def is_supported(dtype: torch.dtype) -> bool:
    """Return whether a program can hold tensors of the dtype."""
    return dtype in _NAMES


Packed = tuple[int, int] | None
"""The rows of a packed value that are present: ``(2, 8)`` is two of every eight on average; None for a value that is
whole. See compiler/ops/own_ops.py."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """The type of a value: dtype, global shape and placement. Its text is ``f32[8/dp, 64, (3 128/tp)] +tp``: global
    sizes, each with the axes that split it, then the axes over which it is still to be summed. A packed value holds
    some rows of its first dim: `` 2 of 8`` at the end says how many of how many."""

    dtype: torch.dtype
    shape: Shape
    placement: Placement
    packed: Packed = None

    def local(self, mesh: Mesh) -> Shape:
        """Shape of one rank's piece; of a sweep each dim has the sizes of all its meshes."""
        if isinstance(mesh, SizeSweep):
            return mesh.local(self, self.shape, lambda dim: [axis for _, axis in self.placement.splits(dim)])
        return _local_shape(self.shape, self.placement, mesh)

    def local_bytes(self, mesh: Mesh) -> int:
        """Bytes of one rank's piece; of a packed one those of all the rows for which it has room."""
        return math.prod(self.local(mesh)) * self.dtype.itemsize

    def text(self, mesh: Mesh) -> str:
        """The one notation of programs, reports and errors."""
        return _type_text(self, mesh)


@lru_cache(maxsize=1 << 14)
def _type_text(type_: TensorType, mesh: Mesh) -> str:
    dims = ", ".join(_dim_text(size, type_.placement.splits(dim), mesh) for dim, size in enumerate(type_.shape))
    sums = "".join(f" +{axis}" for axis in mesh.joined(type_.placement.partial))
    packed = " {} of {}".format(*type_.packed) if type_.packed else ""
    return f"{_NAMES[type_.dtype]}[{dims}]{sums}{packed}"


def _dim_text(size: int, splits: Sequence[tuple[Outer, str]], mesh: Mesh) -> str:
    """``8``, ``8/dp``, ``8/dp/tp``, ``(3 128/tp)``, ``(64/tp + 32/tp)``: each sub-dim's size with the axes that split
    it, major first."""
    stretches = terms(size, splits)
    words = [" ".join(_sub_dims(stretch, equal, mesh)) for stretch, equal in stretches]
    text = " + ".join(words)
    return f"({text})" if " " in text else text


def _sub_dims(size: int, splits: Sequence[tuple[int, str]], mesh: Mesh) -> list[str]:
    pieces: list[tuple[int, list[str]]] = []
    start, end = 1, 1
    axes: list[str] = []
    for parts, axis in splits:
        outer = count(parts)
        if outer != end:
            pieces.append((outer // start, axes))
            start, axes = outer, []
        axes.append(axis)
        end = outer * mesh.size(axis)
    pieces.append((size // start, axes))
    reverse = {axis for outer, axis in splits if is_zigzag(outer)}
    texts = []
    for number, names in pieces:
        dealt = [f"~{axis}" if axis in reverse else axis for axis in names]
        texts.append("/".join([str(number), *(mesh.joined(names) if reverse.isdisjoint(names) else dealt)]))
    return texts


_TYPE = re.compile(r"(\w+)\[([^\]]*)\]((?: \+\w+)*)(?: ([1-9]\d*) of ([1-9]\d*))?")


@lru_cache(maxsize=1 << 14)
def parse_type(text: str, mesh: Mesh) -> TensorType:
    """The inverse of ``TensorType.text``.

    Raises:
        ValueError: not such a text, an unknown dtype or axis, or an axis named twice.
    """
    match = _TYPE.fullmatch(text)
    if match is None or match[1] not in DTYPES:
        raise ValueError(f"`{text}` is not a type such as `f32[8/dp, 64]`")
    types: dict[str, AxisType] = {}
    shape: list[int] = []
    for dim, entry in enumerate(match[2].split(", ") if match[2] else []):
        outers: dict[str, list[int]] = {}
        sizes = []
        for term in entry.strip("()").split(" + "):
            size = 1
            for word in term.split(" "):
                number, *axes = word.split("/")
                outer = size
                for axis in mesh.spread(name.removeprefix("~") for name in axes):
                    outers.setdefault(axis, []).append(zigzag(outer) if f"~{axis}" in axes else outer)
                    outer *= mesh.size(axis) if axis in mesh else 1
                size *= int(number)
            sizes.append(size)
        for axis, outers_of_axis in outers.items():
            if len(outers_of_axis) != len(sizes):
                raise ValueError(f"`{text}` splits not every part over `{axis}`, or one twice")
            _claim(types, axis, Split(dim, joined_stretches(list(zip(sizes, outers_of_axis, strict=True)))), mesh, text)
        shape.append(sum(sizes))
    for axis in mesh.spread(word[1:] for word in match[3].split()):
        _claim(types, axis, "P", mesh, text)
    packed = (int(match[4]), int(match[5])) if match[4] else None
    return TensorType(DTYPES[match[1]], tuple(shape), Placement.of(mesh, types), packed)


def _claim(types: dict[str, AxisType], axis: str, kind: AxisType, mesh: Mesh, text: str) -> None:
    if axis not in mesh.names:
        raise ValueError(f"`{text}` names `{axis}`, which is no axis of the mesh")
    if axis in types:
        raise ValueError(f"`{text}` names `{axis}` twice")
    types[axis] = kind
