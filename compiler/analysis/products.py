"""Products: what the library that multiplies matrices can do with the place of a result."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..layout.mesh import Mesh
from ..program.program import Function, Line, Ref

PRODUCT = "aten.mm.default"
LARGE_PRODUCT = 1 << 21
"""The multiply-adds from which on a product of float32 is large: below, oneDNN's longer start matters."""


@dataclass(frozen=True, slots=True)
class Products:
    """The library that makes large products of float32 on a device. One that works ``in_place`` adds a product to a
    total, and makes it in a message's buffer or in the sum that reads it; one that does not first makes it by itself.
    All other products are the BLAS's."""

    name: str
    in_place: bool

    def apart(self, line: Line, function: Function, mesh: Mesh) -> bool:
        """Return whether a line is a product that this library makes by itself."""
        if self.in_place or line.op != PRODUCT or not all(isinstance(item, Ref) for item in line.args):
            return False
        left, right = (function.values()[name].type for name in line.uses)
        size = math.prod(left.local(mesh)) * right.local(mesh)[1]
        return left.dtype == torch.float32 and size >= LARGE_PRODUCT


BLAS = Products("BLAS", True)
ONEDNN = Products("oneDNN", False)
LIBRARIES = BLAS, ONEDNN
"""The libraries that a run may multiply with: any on a CPU, on an accelerator the BLAS."""
