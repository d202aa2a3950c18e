"""Packed weights: products of few rows by weights that all microbatches read.

MKL copies the second operand of a product into the order in which it multiplies, every time. Where the first has few
rows, as a microbatch of a pipeline has, that is up to a quarter of the work. Weights do not change within a step, so
each is packed once for all microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Self

import torch

from ...compiler.layout.mesh import Mesh
from ...compiler.program.program import Function, Line, Program, Ref
from ...compiler.torch_private import packed_linear
from ..owners import PARAMETERS

Product = Callable[..., torch.Tensor]
_LEAST = 128
"""Rows and columns of a weight from which on packing matters; a pack of few columns is many times as large."""
_ROWS = range(16, 513)
"""Of the other operand: one row is multiplied as it comes, and of many rows packing is a small part."""
_TIMES = 4
"""Microbatches from which on packing pays: a pack takes as long as it saves in one or two."""


def turned_weights(program: Program) -> dict[str, set[str]]:
    """For each function the values that are transposes of parameters of the model, in whatever call."""
    found: dict[str, set[tuple[str, bool]]] = {}
    found[program.main.name] = {
        (value.name, False) for value in program.main.parameters if value.role.partition(" ")[0] in PARAMETERS
    }
    for function in reversed(program.functions):  # who calls a function stands after it
        own = found.setdefault(function.name, set())
        for line in function.lines:
            if line.op == "aten.t.default":
                own.update((line.made[0].name, not turned) for name, turned in list(own) if name in line.uses())
            if line.calls_function:
                pairs = list(zip(program.function(line.op).parameters, line.args, strict=True))
                given = {
                    (v.name, turned) for v, item in pairs for turned in (False, True) if (item.name, turned) in own
                }
                found[line.op] = found.get(line.op, given) & given
    return {name: {value for value, turned in own if turned} for name, own in found.items()}


def packable(line: Line, function: Function, turned: Collection[str], mesh: Mesh) -> bool:
    """Whether a product, an operator of ``BY_WEIGHT``, gains by a packed weight."""
    values = function.values()
    *_, a, b = (values[item.name].type for item in line.args if isinstance(item, Ref))
    (rows, _), (k, n) = a.local(mesh), b.local(mesh)
    if line.op == "aten.addmm.default" and values[next(line.uses())].type.local(mesh) != (n,):
        return False
    large = min(k, n) >= _LEAST and rows in _ROWS
    return large and a.dtype == b.dtype == torch.float32 and list(line.uses())[-1] in turned


class Packs:
    """The packed weights of a step, within which they do not change: a context. They take as much memory again, for
    each number of rows."""

    def __init__(self, pack: Product, linear: Product) -> None:
        self._pack, self._linear = pack, linear
        self.packed: dict[tuple[int, torch.Size, int], torch.Tensor] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.packed.clear()

    def product(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``a @ b + bias`` [m, n] of ``a`` [m, k], a weight ``b`` [k, n] and a bias [n]."""
        weight, rows = b.t(), a.shape[0]
        if not weight.is_contiguous():  # a pack of it in order would be made anew by whoever asks
            return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
        key = (b.data_ptr(), b.shape, rows)
        packed = self.packed.get(key)
        if packed is None:
            packed = self.packed[key] = self._pack(weight, rows)
        return self._linear(a.contiguous(), packed, weight, bias, rows)


BY_WEIGHT: Mapping[str, Product] = {
    "aten.mm.default": Packs.product,
    "aten.addmm.default": lambda packs, bias, a, b: packs.product(a, b, bias),
    "parc.add_product.default": lambda packs, x, a, b: packs.product(a, b).view(x.shape).add_(x),
}
"""Products whose last operand may be a weight, and is where they are ``packable``."""


def packs_for(device: torch.device, microbatches: int) -> Packs | None:
    """What packs a device's weights; None where it has no MKL, or no weight is read often enough."""
    mkl = packed_linear() if device.type == "cpu" and microbatches >= _TIMES else None
    return None if mkl is None else Packs(*mkl)
