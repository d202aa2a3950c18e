"""The registry of kernels: the functions that a machine runs in place of torch's operators, by purpose, and the context
of mesh, coordinates and types that a kernel is called with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch

from ...compiler.analysis.products import BLAS, ONEDNN, PRODUCT, Products
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.pieces import Interval, dim_index, dim_runs, row_major
from ...compiler.layout.placement import TensorType
from ...compiler.layout.stretches import atoms, terms
from ...compiler.ops.op_row import TILE
from ...compiler.ops.precision import base_name
from ...compiler.ops.rules import facts
from ...compiler.program.program import operator

_DEVICE_TILE = 1 << 24
"""The entries of a tile on a device other than a CPU: 64 MiB of float32, little beside such a device's memory."""


@dataclass(frozen=True, slots=True)
class KernelContext:
    """The context of a line on one rank: the mesh, the rank's coordinates, the types of tensor operands and results,
    the device. ``pipeline`` is the axis whose ranks compute other lines."""

    mesh: Mesh
    coordinates: Mapping[str, int]
    operands: Sequence[TensorType]
    results: Sequence[TensorType]
    device: torch.device
    pipeline: str = ""

    @property
    def traced(self) -> bool:
        """True while a compiler traces the kernel; it fuses passes over the data by itself."""
        return False

    @property
    def tile(self) -> int:
        """The entries of temporaries that a kernel makes at once. On a CPU they stay in the cache; other devices need
        more to be busy; a compiler gets a kernel whole."""
        if self.traced:
            return sys.maxsize
        return TILE if self.device.type == "cpu" else _DEVICE_TILE

    def repeated(self, type_: TensorType) -> bool:
        """Return whether values of a type are replicated, so that all replicas must compute the same bits from them."""
        axes = {axis for axis, kind in type_.placement.types if kind in ("R", "I")}
        return any(self.mesh.size(axis) > 1 for axis in axes.difference(self.mesh.parts(self.pipeline)))

    def index(self, type_: TensorType, dim: int) -> torch.Tensor:
        """Return the global coordinates of the rank's entries along a dim."""
        return dim_index(type_.shape[dim], dim, type_.placement, self.mesh, self.coordinates, self.device)

    def numbers(self, type_: TensorType) -> torch.Tensor:
        """Return the row-major global numbers of the piece's elements."""
        return row_major(type_.shape, (self.index(type_, dim) for dim in range(len(type_.shape))), self.device)

    def runs(self, type_: TensorType, dim: int) -> list[Interval]:
        """Return the global coordinates of the rank's entries along a dim as runs of consecutive ones, in order."""
        return dim_runs(type_.shape[dim], dim, type_.placement, self.mesh, self.coordinates)

    def consecutive(self, type_: TensorType, dim: int) -> bool:
        """Return whether the rank's entries along a dim are consecutive: above the part that is split, no part of the
        dim is whole."""
        (size, splits), *more = terms(type_.shape[dim], type_.placement.splits(dim))
        whole = [atom.axis is None for atom in atoms(size, splits, self.mesh.size) if atom.size > 1]
        return not more and whole == sorted(whole)

    def key(self, key: torch.Tensor) -> Any:
        """Return a stream's key, for ``keep_mask``."""
        return int(key)


# ---- the table of kernels

Kernel = Callable[..., Any]
KernelPurpose = Literal["kernel", "reference", "over", "into", "adding", "onednn"]
"""The purposes of a function. A *kernel* gets the context of its line, then the operator's arguments. Functions for the
*reference* replace it in the captured graph, those for *onednn* where that library is faster. The others get no
context: they write *over* their first operand, or write *into* or are *adding* to a tensor that they get first."""

_CODE: dict[KernelPurpose, dict[str, Kernel]] = {purpose: {} for purpose in get_args(KernelPurpose)}
_SomeKernel = TypeVar("_SomeKernel", bound=Kernel)


def runs(op: str, purpose: KernelPurpose = "kernel") -> Callable[[_SomeKernel], _SomeKernel]:
    """Register the decorated function as the code of an operator for a purpose."""

    def note(code: _SomeKernel) -> _SomeKernel:
        _CODE[purpose][op] = code
        return code

    return note


def code_for(purpose: KernelPurpose) -> Mapping[str, Kernel]:
    """Return the code for a purpose by operator, from the modules that are imported."""
    return _CODE[purpose]


def library_of(kernels: Mapping[str, Kernel]) -> Products:
    """Return the library that computes large float32 products with these kernels."""
    return ONEDNN if PRODUCT in kernels else BLAS


def binding(op: str) -> Callable[..., Any]:
    """Return the Python function that calls an operator fastest: for the most frequent operators torch's own function,
    which takes the same arguments and half the time."""
    if not facts(op).plain:
        return operator(op)  # type: ignore[no-any-return]
    name = base_name(op)
    return getattr(torch, name, None) or getattr(torch.Tensor, name)  # type: ignore[no-any-return]
