"""Decomposition of bags of embeddings: rows are looked up as in an embedding, then reduced over each bag.

In every form, a rank that holds a part of the rows gives a part of each sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ...compiler.capture.faults import fault_at
from ...compiler.capture.node_facts import noted
from ...compiler.ops.own_ops import aten
from ..calls import arguments_of, operands_of, substitute_nodes
from .rewriter import takes_apart

_SUM, _MEAN, _MAX = 0, 1, 2  # torch's numbers of the modes


@takes_apart(aten.embedding_bag.padding_idx, aten.embedding_bag.default, aten._embedding_bag.default)
def _embedding_bag(node: fx.Node) -> Any:
    """Return the parts of a call of which only the bags are read. ``_embedding_bag`` has -1 where no row is padding;
    elsewhere this is None, and -1 counts from the end.

    Raises:
        CaptureError: the gradient of a row is to be divided by its count, in which torch counts other rows.
    """
    if any(user.args[1] != 0 for user in node.users):
        return None
    arguments = arguments_of(node)
    if arguments.get("scale_grad_by_freq"):
        message = "`scale_grad_by_freq` of a bag divides each row's gradient by another row's count on a CPU"
        help_ = "leave `scale_grad_by_freq` out, or look up with `nn.Embedding`, which has it too, and sum over the bag"
        raise fault_at(node, message, help=help_)
    indices, table = (noted(arguments[name]).value for name in ("indices", "weight"))
    padding = arguments.get("padding_idx")
    if padding is not None and padding < 0:
        padding = None if node.target is aten._embedding_bag.default else padding + table.shape[0]
    known = _known_offsets(arguments["offsets"])
    if arguments.get("include_last_offset") and known is not None:
        known = known[:-1] if known[-1] == indices.numel() else None
    size = 0 if known is None else _equal_size(known, indices.numel())

    def embedding_bag(weight: Any, indices: Any, offsets: Any, scale_grad_by_freq: Any = False, mode: int = _SUM,
                      sparse: Any = False, per_sample_weights: Any = None, include_last_offset: Any = False,
                      padding_idx: Any = None) -> Any:  # fmt: skip
        rows = F.embedding(indices, weight)
        if per_sample_weights is not None:
            rows = rows * per_sample_weights.unsqueeze(-1)
        kept = None if padding is None else indices != padding
        if size:
            return (_over_equal_bags(rows, kept, size, mode),)
        return (_over_bags(rows, kept, offsets, mode, bool(include_last_offset)),)

    return embedding_bag


def _known_offsets(node: Any) -> Tensor | None:
    """Return offsets that are computed from positions alone, or None."""
    tags = getattr(node.target, "tags", None)  # an item of a tuple has none
    if node.op != "call_function" or tags is None or torch.Tag.nondeterministic_seeded in tags:
        return None
    operands = {operand: _known_offsets(operand) for operand in operands_of(node)}
    if any(value is None for value in operands.values()):
        return None
    args, kwargs = substitute_nodes((node.args, node.kwargs), lambda operand: operands[operand])
    result: Tensor = node.target(*args, **kwargs)
    return result


def _equal_size(offsets: Tensor, indices: int) -> int:
    """Return the size of bags that are equally long, or 0."""
    size = indices // len(offsets) if len(offsets) else 0
    return size if size and torch.equal(offsets, torch.arange(0, indices, size)) else 0


def _over_equal_bags(rows: Tensor, kept: Tensor | None, size: int, mode: int) -> Tensor:
    """Reduce rows ``[bags * size, width]``, or those that are ``kept``, over bags of equal sizes."""
    rows = rows.reshape(-1, size, rows.shape[-1])
    kept = None if kept is None else kept.reshape(-1, size, 1)
    if mode == _MAX:
        # the first of equal numbers gets the gradient, as in torch's own kernel
        if kept is None:
            return rows.max(1).values
        most = rows.masked_fill(~kept, -torch.inf).max(1).values
        return most.masked_fill(~kept.any(1), 0)
    total = (rows if kept is None else rows.masked_fill(~kept, 0)).sum(1)
    if mode == _SUM:
        return total
    return total / (size if kept is None else kept.sum(1).clamp_min(1))


def _over_bags(rows: Tensor, kept: Tensor | None, offsets: Tensor, mode: int, has_end: bool) -> Tensor:
    """Reduce rows ``[entries, width]``, or those that are ``kept``, over the bags that begin at ``offsets``. An empty
    bag gives zeros; with ``has_end`` the last offset is the end of the last bag."""
    entries, width = rows.shape
    position = torch.arange(entries, device=rows.device)
    bags = offsets.shape[0] - has_end
    bag = torch.bucketize(position, offsets, right=True) - 1  # that of rows behind the end is `bags`
    place = bag.unsqueeze(1).expand(entries, width)
    zeros = rows.new_zeros(bags + 1, width)
    used = torch.ones_like(position) if kept is None else kept.to(torch.int64)
    rows = rows if kept is None else rows.masked_fill(~kept.unsqueeze(1), 0 if mode != _MAX else -torch.inf)
    if mode == _MAX:
        peak = zeros.scatter_reduce(0, place, rows.detach(), "amax", include_self=False)
        at_peak = (rows.detach() == peak.gather(0, place)) & (used > 0).unsqueeze(1)
        candidates = position.unsqueeze(1).expand(entries, width).masked_fill(~at_peak, entries)
        none = torch.full((bags + 1, width), entries, dtype=torch.int64, device=rows.device)
        first = none.scatter_reduce(0, place, candidates, "amin")
        most = rows.gather(0, first.clamp_max(entries - 1)).masked_fill(first == entries, 0)
        return most[:bags]
    total = zeros.index_add(0, bag, rows)[:bags]
    if mode == _SUM:
        return total
    counts = position.new_zeros(bags + 1).index_add(0, bag, used)[:bags]
    return total / counts.clamp_min(1).unsqueeze(1)
