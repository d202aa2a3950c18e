"""Fusion: lines that torch can compute together are, and a gradient is added to the sum of earlier microbatches as it
is made. A program's text stays as it was proved; this is how a machine runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..compiler.program import Function, Line, Ref, Value
from ..compiler.totals import uses_of

_ADD_PRODUCT = "parc.add_product.default"
"""``x + a @ b`` in the shape of ``x``."""
_RESHAPE = "aten.reshape.default"


def fused(function: Function, products: bool) -> Function:
    """The function with ``x + a * b``, and with ``products`` ``x + a @ b``, as one line each, where nobody else reads
    what is added to ``x``."""
    values, uses = function.values(), uses_of(function)
    makers = {value.name: line for line in function.lines for value in line.made}
    gone: set[str] = set()

    def made_for(item: Any, *ops: str) -> Line | None:
        """The line that makes an operand for its one reader, if it is one of these."""
        line = makers.get(item.name) if isinstance(item, Ref) and uses[item.name] == 1 else None
        return line if line is not None and line.op in ops and not line.kwargs else None

    def together(line: Line, result: Value) -> Line:
        for x, other in (line.args, line.args[::-1]):
            if not isinstance(x, Ref) or values[x.name].type != result.type or not result.type.dtype.is_floating_point:
                continue
            view = made_for(other, _RESHAPE)
            product = made_for(view.args[0] if view else other, "aten.mm.default") if products else None
            if product is not None and values[product.made[0].name].type.dtype == result.type.dtype:
                gone.update(made.made[0].name for made in (view, product) if made)
                return replace(line, op=_ADD_PRODUCT, args=(x, *product.args))
            product = made_for(other, "aten.mul.Tensor")
            if product is not None and all(
                isinstance(item, Ref) and values[item.name].type.dtype == result.type.dtype for item in product.args
            ):
                gone.add(product.made[0].name)
                return replace(line, op="aten.addcmul.default", args=(x, *product.args))
        return line

    lines = [
        together(line, line.made[0]) if line.op == "aten.add.Tensor" and not line.kwargs else line
        for line in function.lines
    ]
    return replace(function, lines=tuple(line for line in lines if not any(v.name in gone for v in line.made)))


def _embedding(total: torch.Tensor, grad: Any, index: Any, rows: int, padding: int, by_frequency: bool) -> torch.Tensor:
    # on an accelerator rows are added as threads come, and bits would differ from run to run
    if padding < 0 and not by_frequency and total.device.type == "cpu":
        return total.index_add_(0, index.reshape(-1), grad.reshape(-1, grad.shape[-1]))
    return total.add_(torch.ops.aten.embedding_dense_backward(grad, index, rows, padding, by_frequency))


ADDING: Mapping[str, Callable[..., torch.Tensor]] = {
    "aten.mm.default": torch.Tensor.addmm_,
    "aten.embedding_dense_backward.default": _embedding,
}
"""The operators of ``ADDABLE``, adding to a total, which comes first: nothing of its size is made besides."""
