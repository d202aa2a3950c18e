"""Matrix libraries: whether they write a product where it is wanted, or first into memory of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..layout.mesh import Mesh
from ..program.program import Function, Line, Ref

PRODUCT = "aten.mm.default"
LARGE_PRODUCT = 1 << 21
"""The multiply-adds from which a product of float32 is large; below, oneDNN's longer start matters."""


@dataclass(frozen=True, slots=True)
class Products:
    """The library that makes large products of float32 on a device. One that works ``in_place`` accumulates a product
    into a gradient, and writes it into a bucket or into the sum that reads it; another one makes a temporary first. All
    smaller products, and those of other types, are the BLAS's."""

    name: str
    in_place: bool

    def apart(self, line: Line, function: Function, mesh: Mesh) -> bool:
        """Return whether a line is a product that this library makes as a temporary."""
        if self.in_place or line.op != PRODUCT or not all(isinstance(item, Ref) for item in line.args):
            return False
        left, right = (function.values()[name].type for name in line.uses)
        size = math.prod(left.local(mesh)) * right.local(mesh)[1]
        return left.dtype == torch.float32 and size >= LARGE_PRODUCT


BLAS = Products("BLAS", True)
ONEDNN = Products("oneDNN", False)
LIBRARIES = BLAS, ONEDNN
"""The libraries that a run may multiply with: either on a CPU, on an accelerator the BLAS."""
