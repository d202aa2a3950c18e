"""Fusion: lines that torch can compute together are joined, and a gradient is added to the sum of earlier microbatches
as it is made. The text of a program stays as it was proved; fusion is only the way in which a machine runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...compiler.analysis.lifetimes import Aliases
from ...compiler.analysis.products import PRODUCT, Products
from ...compiler.layout.collectives import COLLECTIVES
from ...compiler.layout.mesh import Mesh
from ...compiler.program.program import Function, Line, Ref
from .kernels import ADD_PRODUCT
from .site import runs

_RESHAPE = "aten.reshape.default"


def fused(function: Function, known: Aliases, mesh: Mesh, products: Products) -> Function:
    """Return the function with ``x + a * b``, or ``x + a * (2 * b)``, as one line, and also ``x + a @ b``, if nobody
    else reads the summand and the library of ``products`` can. A product's operands then live until the sum. So a
    product is left alone if that takes memory, or if ``x`` is still on its way while the product is made."""
    key = "fused", known, mesh, products
    if key not in function.derived:
        function.derived[key] = _Fusion(function, known, mesh, products).made()
    stored: Function = function.derived[key]
    return stored


class _Fusion:
    """The joining of one function's lines. ``gone`` are the values that no line makes any more."""

    def __init__(self, function: Function, known: Aliases, mesh: Mesh, products: Products) -> None:
        self.function, self.mesh, self.products = function, mesh, products
        self.values, self.uses, self.root = function.values(), function.uses, known.root
        self.makers = {value.name: (at, line) for at, line in enumerate(function.lines) for value in line.made}
        self.last = {name: at for at, line in enumerate(function.lines) for name in line.uses}
        self.kept = {value.name for value in function.parameters} | {name for _, name in function.returns}
        self.gone: set[str] = set()

    def made(self) -> Function:
        """Return the function with fewer lines."""
        lines = [
            self.together(at, line) if line.op == "aten.add.Tensor" and not line.kwargs else line
            for at, line in enumerate(self.function.lines)
        ]
        left = (line for line in lines if not any(value.name in self.gone for value in line.made))
        return replace(self.function, lines=tuple(left))

    def made_for(self, item: Any, op: str) -> Line | None:
        """Return the line that makes an operand for this reader alone, if it has this operator."""
        alone = isinstance(item, Ref) and self.uses[item.name] == 1
        _, line = self.makers.get(item.name, (0, None)) if alone else (0, None)
        return line if line is not None and line.op == op and not line.kwargs else None

    def size(self, name: str) -> int:
        """Return the bytes that a value keeps alive."""
        return self.values[self.root[name]].type.local_bytes(self.mesh)

    def for_nothing(self, at: int, product: Line) -> bool:
        """Return whether the sum at a line may compute the product itself: no value is made between the two, or the
        product's operands that die with it take no more bytes than its result."""
        first, made = self.makers[product.made[0].name][0], product.made[0].name
        between = {v.name for line in self.function.lines[first + 1 : at] for v in line.made if line.op != _RESHAPE}
        dying = {name for name in product.uses if name not in self.kept and self.last[name] == first}
        return not between - self.gone or sum(map(self.size, dying)) <= self.size(made)

    def with_scale(self, at: int, product: Line) -> tuple[Sequence[Any], tuple[tuple[str, Any], ...]]:
        """Return the factors of a product, and a number that makes one of them, by itself: ``a * (2 * b)`` is
        ``value=2`` of ``a * b``. It is a power of two, by which nothing is rounded."""
        for factor, other in (product.args, product.args[::-1]):
            scaled = self.made_for(factor, "aten.mul.Scalar")
            if scaled is None or abs(math.frexp(scaled.args[1])[0]) != 0.5 or not self.for_nothing(at, scaled):
                continue
            if self.values[factor.name].type == self.values[scaled.args[0].name].type:
                self.gone.add(factor.name)
                return (scaled.args[0], other), (("value", scaled.args[1]),)
        return product.args, ()

    def together(self, at: int, line: Line) -> Line:
        """Return a sum with the product that it can compute itself."""
        values, type_ = self.values, line.made[0].type
        for x, other in (line.args, line.args[::-1]):
            if not (isinstance(x, Ref) and isinstance(other, Ref)) or not type_.dtype.is_floating_point:
                continue
            if values[x.name].type != type_ or self.makers.get(x.name, (0, line))[1].op in COLLECTIVES:
                continue
            view = self.made_for(other, _RESHAPE)
            whole = values[other.name].type.shape == type_.shape
            product = self.made_for(view.args[0] if view else other, PRODUCT) if whole else None
            if product is None or self.products.apart(product, self.function, self.mesh):
                view, product = None, self.made_for(other, "aten.mul.Tensor")
            if product is None or not all(isinstance(item, Ref) for item in product.args):
                continue
            read = [values[name].type.dtype for name in product.uses]
            if set(read) == {type_.dtype} and self.for_nothing(at, product):
                self.gone.update(made.made[0].name for made in (view, product) if made)
                if product.op == PRODUCT:
                    return replace(line, op=ADD_PRODUCT, args=(x, *product.args))
                factors, kwargs = self.with_scale(at, product)
                return replace(line, op="aten.addcmul.default", args=(x, *factors), kwargs=kwargs)
        return line


@runs("aten.embedding_dense_backward.default", "adding")
def _embedding(total: torch.Tensor, grad: Any, index: Any, rows: int, padding: int, by_frequency: bool) -> torch.Tensor:
    # on an accelerator rows are added as threads come, and bits would differ from run to run
    if padding < 0 and not by_frequency and total.device.type == "cpu":
        return total.index_add_(0, index.reshape(-1), grad.reshape(-1, grad.shape[-1]))
    return total.add_(torch.ops.aten.embedding_dense_backward(grad, index, rows, padding, by_frequency))


@runs("aten._to_copy.default", "adding")
def _cast(total: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
    return total.add_(value)


@runs("aten.mm.default", "into")
def _product(place: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b, out=place)


runs("aten.mm.default", "adding")(torch.Tensor.addmm_)
