"""Fusion: lines that torch computes in one call are joined, and gradients are accumulated as they are made, in the
epilogue of their product where torch can. A program's text stays as it was verified; only the machine runs it fused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...compiler.analysis.lifetimes import Aliases
from ...compiler.analysis.products import PRODUCT, Products
from ...compiler.layout.collectives import COLLECTIVES
from ...compiler.layout.mesh import Mesh
from ...compiler.program.program import Function, Line, Ref, remembered
from .kernels import ADD_PRODUCT
from .registry import runs

_RESHAPE = "aten.reshape.default"


@remembered
def fused(function: Function, aliases: Aliases, mesh: Mesh, products: Products) -> Function:
    """Return the function with ``x + a * b`` and ``x + a * (2 * b)`` as one line (addcmul), and also ``x + a @ b``
    (addmm) if the library of ``products`` has it. The product must have no other reader. Its operands then live until
    the sum, so it is left alone if that takes memory, or if ``x`` is a collective's result, which may still be in
    flight."""
    return _Fusion(function, aliases, mesh, products).fused()


class _Fusion:
    """The fusion of one function's lines. ``gone`` are the values that no line makes any more."""

    def __init__(self, function: Function, aliases: Aliases, mesh: Mesh, products: Products) -> None:
        self.function, self.mesh, self.products = function, mesh, products
        self.values, self.uses, self.root = function.values(), function.uses, aliases.root
        self.makers = {value.name: (at, line) for at, line in enumerate(function.lines) for value in line.made}
        self.last = {name: at for at, line in enumerate(function.lines) for name in line.uses}
        self.kept = {value.name for value in function.parameters} | {name for _, name in function.returns}
        self.gone: set[str] = set()

    def fused(self) -> Function:
        """Return the function with fewer lines."""
        lines = [
            self.with_product(at, line) if line.op == "aten.add.Tensor" and not line.kwargs else line
            for at, line in enumerate(self.function.lines)
        ]
        left = (line for line in lines if not any(value.name in self.gone for value in line.made))
        return replace(self.function, lines=tuple(left))

    def sole_maker(self, item: Any, op: str) -> Line | None:
        """Return the line that makes an operand, if it has this operator and no other reader."""
        alone = isinstance(item, Ref) and self.uses[item.name] == 1
        _, line = self.makers.get(item.name, (0, None)) if alone else (0, None)
        return line if line is not None and line.op == op and not line.kwargs else None

    def size(self, name: str) -> int:
        """Return the bytes of the storage that a value keeps alive."""
        return self.values[self.root[name]].type.local_bytes(self.mesh)

    def is_free(self, at: int, product: Line) -> bool:
        """Return whether fusing a product into the sum at line ``at`` takes no memory: no value is made between the
        two, or the operands that would die with the product take no more bytes than its result."""
        name = product.made[0].name
        first = self.makers[name][0]
        between = {v.name for line in self.function.lines[first + 1 : at] for v in line.made if line.op != _RESHAPE}
        dying = {name for name in product.uses if name not in self.kept and self.last[name] == first}
        return not between - self.gone or sum(map(self.size, dying)) <= self.size(name)

    def scaled_factors(self, at: int, product: Line) -> tuple[Sequence[Any], tuple[tuple[str, Any], ...]]:
        """Return the factors of a product without a scale that one of them was multiplied with, and the scale as
        addcmul's ``value``: ``a * (2 * b)`` is ``a * b`` with ``value=2``. It must be a power of two, which rounds
        nothing."""
        for factor, other in (product.args, product.args[::-1]):
            scaled = self.sole_maker(factor, "aten.mul.Scalar")
            if scaled is None or abs(math.frexp(scaled.args[1])[0]) != 0.5 or not self.is_free(at, scaled):
                continue
            if self.values[factor.name].type == self.values[scaled.args[0].name].type:
                self.gone.add(factor.name)
                return (scaled.args[0], other), (("value", scaled.args[1]),)
        return product.args, ()

    def with_product(self, at: int, line: Line) -> Line:
        """Return a sum, fused with one of its summands if that is a product."""
        values, type_ = self.values, line.made[0].type
        for x, other in (line.args, line.args[::-1]):
            if not (isinstance(x, Ref) and isinstance(other, Ref)) or not type_.dtype.is_floating_point:
                continue
            if values[x.name].type != type_ or self.makers.get(x.name, (0, line))[1].op in COLLECTIVES:
                continue
            view = self.sole_maker(other, _RESHAPE)
            whole = values[other.name].type.shape == type_.shape
            product = self.sole_maker(view.args[0] if view else other, PRODUCT) if whole else None
            if product is None or self.products.apart(product, self.function, self.mesh):
                view, product = None, self.sole_maker(other, "aten.mul.Tensor")
            if product is None or not all(isinstance(item, Ref) for item in product.args):
                continue
            read = [values[name].type.dtype for name in product.uses]
            if set(read) == {type_.dtype} and self.is_free(at, product):
                self.gone.update(fused.made[0].name for fused in (view, product) if fused)
                if product.op == PRODUCT:
                    return replace(line, op=ADD_PRODUCT, args=(x, *product.args))
                factors, kwargs = self.scaled_factors(at, product)
                return replace(line, op="aten.addcmul.default", args=(x, *factors), kwargs=kwargs)
        return line


# ---- gradients that are added to a total, or written into their part of a bucket


@runs("aten.embedding_dense_backward.default", "adding")
def _add_embedding_gradient(
    total: Tensor, grad: Any, index: Any, rows: int, padding: int, by_frequency: bool
) -> Tensor:
    # on an accelerator index_add_ is not deterministic
    if padding < 0 and not by_frequency and total.device.type == "cpu":
        return total.index_add_(0, index.reshape(-1), grad.reshape(-1, grad.shape[-1]))
    return total.add_(torch.ops.aten.embedding_dense_backward(grad, index, rows, padding, by_frequency))


@runs("aten._to_copy.default", "adding")
def _add_cast(total: Tensor, value: Tensor, **_: Any) -> Tensor:
    return total.add_(value)


@runs("aten.mm.default", "into")
def _product_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out=out)


runs("aten.mm.default", "adding")(Tensor.addmm_)
