"""The site of a line: where in the mesh, and on what types, a rank runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...compiler.layout.mesh import Mesh
from ...compiler.layout.pieces import Interval, dim_index, dim_runs, row_major
from ...compiler.layout.placement import TensorType
from ...compiler.layout.stretches import atoms, terms


@dataclass(frozen=True, slots=True)
class Site:
    """One line on one rank: the mesh, the rank's coordinates, the types of tensor operands and results, the device.
    ``pipeline`` is the axis whose ranks compute other lines."""

    mesh: Mesh
    coordinates: Mapping[str, int]
    operands: Sequence[TensorType]
    results: Sequence[TensorType]
    device: torch.device
    pipeline: str = ""

    @property
    def traced(self) -> bool:
        """True where a compiler traces the kernel: it fuses several passes into one by itself."""
        return False

    def repeated(self, type_: TensorType) -> bool:
        """Return whether other ranks have the very same value of a type, and so must compute the same bits from it."""
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
