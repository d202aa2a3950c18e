"""Operators that become several when an axis splits them: the loss over a split vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import AxisType, Placement, Split, TensorType
from ...compiler.ops.infer import Part
from ...compiler.ops.own_ops import OPS, aten
from ..programs.segments import node_type

AxisParts = Mapping[str, Part]
Note = Callable[[fx.Node, list[TensorType | None]], None]
"""A function that notes the types of a new node, and its place in the model."""


def _token_loss(
    graph: fx.Graph, mesh: Mesh, node: fx.Node, operands: Sequence[fx.Node], parts: AxisParts, note: Note
) -> tuple[fx.Node, Placement]:
    """Compute ``log(sum(exp(x - peak))) - (x[target] - peak)``. Each rank's part of the vocabulary gives a part of both
    sums. They are summed in one message, so no rank holds whole logits."""
    logits, targets = operands
    vocab = tuple(axis for axis in mesh.names if axis in parts and parts[axis][0] == "v")
    type_ = node_type(logits)
    rows = type_.shape[0]
    lead = node_type(targets).placement

    def emit(target: Any, args: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype, at: Placement) -> fx.Node:
        new = graph.call_function(target, args)
        note(new, [TensorType(dtype, shape, at)])
        return new

    # the loss's own placement: rows as the logits', whole (or R, as the logits) elsewhere, the vocabulary summed
    types: dict[str, AxisType] = {axis: "I" if axis in vocab else type_.placement[axis] for axis in mesh.names}
    result = Placement.of(mesh, types)
    peak = emit(OPS.row_max.default, (logits, ",".join(vocab)), (rows, 1), type_.dtype, result.data())
    shifted = {
        axis: kind._replace(dim=kind.dim + 1) if isinstance(kind, Split) else kind for axis, kind in types.items()
    }
    stacked = Placement.of(mesh, shifted)
    partial = stacked.replace(dict.fromkeys(vocab, "P"))
    sums = emit(OPS.loss_parts.default, (logits, peak, targets), (2, rows), type_.dtype, partial)
    if vocab:
        args = (sums, ",".join(vocab), "P", "I")
        sums = emit(OPS.convert.default, args, (2, rows), type_.dtype, stacked)
    total = emit(aten.select.int, (sums, 0, 0), (rows,), type_.dtype, result)
    picked = emit(aten.select.int, (sums, 0, 1), (rows,), type_.dtype, result)
    loss = emit(aten.sub.Tensor, (emit(aten.log.default, (total,), (rows,), type_.dtype, result), picked),
                (rows,), type_.dtype, result)  # fmt: skip
    counted = emit(aten.ne.Scalar, (targets, node.args[2]), (rows,), torch.bool, lead.data())
    loss = emit(aten.mul.Tensor, (loss, counted), (rows,), type_.dtype, result)
    return loss, result


Expansion = Callable[[fx.Graph, Mesh, fx.Node, Sequence[fx.Node], AxisParts, Note], tuple[fx.Node, Placement]]

EXPANSIONS: Mapping[Any, Expansion] = {OPS.token_loss.default: _token_loss}
"""The function that emits several operators in place of each of these. It gets the graph and mesh, the node with its
operands as it wants them, the factor that it splits on each axis, and a ``Note``; it returns the result and its
placement."""
