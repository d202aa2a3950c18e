"""Fusion: lines that torch can compute together are joined, and a gradient is added to the sum of earlier microbatches
as it is made. The text of a program stays as it was proved; fusion is only the way in which a machine runs it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ...compiler.layout.collectives import COLLECTIVES
from ...compiler.layout.mesh import Mesh
from ...compiler.program.liveness import owners
from ...compiler.program.program import Function, Line, Ref, Value
from ...compiler.program.totals import uses_of
from .kernels import ADD_PRODUCT
from .ways import runs

_RESHAPE = "aten.reshape.default"


def fused(function: Function, mesh: Mesh, products: bool) -> Function:
    """Return the function with ``x + a * b`` as one line, and with ``products`` also ``x + a @ b``, if nobody else
    reads the summand. A product's operands then live until the sum. So a product is left alone if that takes memory, or
    if ``x`` is still on its way while the product is made."""
    key = "fused", mesh, products
    if key not in function.derived:
        function.derived[key] = _fused(function, mesh, products)
    stored: Function = function.derived[key]
    return stored


def _fused(function: Function, mesh: Mesh, products: bool) -> Function:
    values, uses, source = function.values(), uses_of(function), owners(function)
    makers = {value.name: (at, line) for at, line in enumerate(function.lines) for value in line.made}
    last = {name: at for at, line in enumerate(function.lines) for name in line.uses()}
    kept = {value.name for value in function.parameters} | {name for _, name in function.returns}
    gone: set[str] = set()

    def made_for(item: Any, op: str) -> Line | None:
        """Return the line that makes an operand for this reader alone, if it has this operator."""
        _, line = makers.get(item.name, (0, None)) if isinstance(item, Ref) and uses[item.name] == 1 else (0, None)
        return line if line is not None and line.op == op and not line.kwargs else None

    def size(name: str) -> int:
        type_ = values[source.get(name, name)].type  # of what a view keeps alive
        return math.prod(type_.local(mesh)) * type_.dtype.itemsize

    def for_nothing(at: int, product: Line) -> bool:
        """Return whether the sum at a line may compute the product itself: no value is made between the two, or the
        product's operands that die with it take no more bytes than its result."""
        first, made = makers[product.made[0].name][0], product.made[0].name
        between = {v.name for line in function.lines[first + 1 : at] for v in line.made if line.op != _RESHAPE}
        dying = {name for name in product.uses() if name not in kept and last[name] == first}
        return not between - gone or sum(map(size, dying)) <= size(made)

    def together(at: int, line: Line, result: Value) -> Line:
        type_ = result.type
        for x, other in (line.args, line.args[::-1]):
            if not (isinstance(x, Ref) and isinstance(other, Ref)) or not type_.dtype.is_floating_point:
                continue
            if values[x.name].type != type_ or makers.get(x.name, (0, line))[1].op in COLLECTIVES:
                continue
            view = made_for(other, _RESHAPE)
            whole = products and values[other.name].type.shape == type_.shape
            product = made_for(view.args[0] if view else other, "aten.mm.default") if whole else None
            if product is None:
                view, product = None, made_for(other, "aten.mul.Tensor")
            if product is None or not all(isinstance(item, Ref) for item in product.args):
                continue
            read = [values[name].type.dtype for name in product.uses()]
            if set(read) == {type_.dtype} and for_nothing(at, product):
                gone.update(made.made[0].name for made in (view, product) if made)
                op = ADD_PRODUCT if product.op == "aten.mm.default" else "aten.addcmul.default"
                return replace(line, op=op, args=(x, *product.args))
        return line

    lines = [
        together(at, line, line.made[0]) if line.op == "aten.add.Tensor" and not line.kwargs else line
        for at, line in enumerate(function.lines)
    ]
    return replace(function, lines=tuple(line for line in lines if not any(v.name in gone for v in line.made)))


@runs("aten.embedding_dense_backward.default", "adding")
def _embedding(total: torch.Tensor, grad: Any, index: Any, rows: int, padding: int, by_frequency: bool) -> torch.Tensor:
    # on an accelerator rows are added as threads come, and bits would differ from run to run
    if padding < 0 and not by_frequency and total.device.type == "cpu":
        return total.index_add_(0, index.reshape(-1), grad.reshape(-1, grad.shape[-1]))
    return total.add_(torch.ops.aten.embedding_dense_backward(grad, index, rows, padding, by_frequency))


@runs("aten.mm.default", "into")
def _product(place: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b, out=place)


runs("aten.mm.default", "adding")(torch.Tensor.addmm_)
