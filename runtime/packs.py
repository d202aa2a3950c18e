"""Packed weights: products of few rows by weights that all microbatches read.

MKL copies the second operand of a product into the order in which it multiplies, every time. Where the first has few
rows, as a microbatch of a pipeline has, that is up to a quarter of the work. Weights do not change within a step, so
each is packed once for all microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..compiler.program import Program
from ..compiler.torch_private import packed_linear
from .holders import PARAMETERS

Product = Callable[..., torch.Tensor]
_LEAST = 1 << 15
"""Entries of a weight from which on packing it matters."""
_TIMES = 4
"""Microbatches from which on packing pays: a pack takes as long as it saves in one or two."""


def weights_of(program: Program) -> dict[str, set[str]]:
    """For each function the values that are parameters of the model in whatever call, and their transposes."""
    found: dict[str, set[str]] = {}
    found[program.main.name] = {
        value.name for value in program.main.parameters if value.role.partition(" ")[0] in PARAMETERS
    }
    for function in reversed(program.functions):  # who calls a function stands after it
        own = found.setdefault(function.name, set())
        for line in function.lines:
            if line.op == "aten.t.default" and not own.isdisjoint(line.uses()):
                own.update(value.name for value in line.made)
            if line.calls_function:
                parameters = program.function(line.op).parameters
                given = {value.name for value, item in zip(parameters, line.args, strict=True) if item.name in own}
                found[line.op] = found.get(line.op, given) & given
    return found


class Packs:
    """The packed weights of one step, which take as much memory again."""

    def __init__(self, pack: Product, linear: Product) -> None:
        self._pack, self._linear = pack, linear
        self.packed: dict[tuple[int, torch.Size, int], torch.Tensor] = {}

    def clear(self) -> None:
        """Weights may change now."""
        self.packed.clear()

    def product(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``a @ b + bias`` [m, n] of ``a`` [m, k], a weight ``b`` [k, n] and a bias [n]."""
        weight, rows = b.t(), a.shape[0]
        # across the rows of a weight the pack is of its transpose, whose making takes what is saved
        if a.dtype != torch.float32 or not weight.is_contiguous() or b.numel() < _LEAST or not rows:
            return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
        key = (b.data_ptr(), b.shape, rows)
        packed = self.packed.get(key)
        if packed is None:
            packed = self.packed[key] = self._pack(weight, rows)
        return self._linear(a.contiguous(), packed, weight, bias, rows)


def _addmm(packs: Packs, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return packs.product(a, b, bias) if bias.dim() == 1 else torch.addmm(bias, a, b)


BY_WEIGHT: Mapping[str, Product] = {
    "aten.mm.default": Packs.product,
    "aten.addmm.default": _addmm,
    "parc.add_product.default": lambda packs, x, a, b: packs.product(a, b).view(x.shape).add_(x),
}
"""Products whose last operand may be a weight."""


def packs_for(device: torch.device, microbatches: int) -> Packs | None:
    """What packs a device's weights; None where it has no MKL, or no weight is read often enough."""
    mkl = packed_linear() if device.type == "cpu" and microbatches >= _TIMES else None
    return None if mkl is None else Packs(*mkl)
