"""Operators without a rule, taken apart into operators with rules, as torch itself composes them."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._decomp import decomposition_table

from ...compiler.capture.node_facts import noted
from ...compiler.capture.parts import inline, parts_of
from ...compiler.ops.own_ops import aten
from ...compiler.ops.rules import has_rule
from ..programs.backward_forms import write_functional
from .rewriter import PARTS, REWRITES, takes_apart

_DEPTH = 4
"""The most times that the parts of an operator are taken apart in turn: torch's decompositions end after two or
three."""


def expand_unruled(graph: fx.Graph) -> None:
    """Write every operator without a rule, unless the canonical form rewrites it, as its parts, in place.

    One that torch does not decompose, or not into operators that are known, stays: it is computed whole.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and not _is_known(node.target):
            parts = _parts(node, _DEPTH)
            if parts is not None:
                _put(graph, node, parts)
    graph.eliminate_dead_code()


def _is_known(target: Any) -> bool:
    return target is operator.getitem or target in REWRITES or has_rule(target)


def _parts(node: fx.Node, depth: int) -> fx.Graph | None:
    """Return the graph of one operator's parts, which all have rules; None where there is none."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or depth == 0:
        return None
    composite = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    function = PARTS[target](node) if target in PARTS else target
    own = {target: decomposition_table[target]} if target in decomposition_table and not composite else {}
    if function is None or (function is target and not composite and not own):
        return None
    parts = parts_of(node, function, own)
    if any(_writes_view(part) for part in parts.nodes):
        return None
    write_functional(parts)
    for part in list(parts.nodes):
        if part.op == "get_attr":
            return None
        if part.op == "call_function" and not _is_known(part.target):
            inner = None if part.target is target else _parts(part, depth - 1)
            if inner is None:
                return None
            _put(parts, part, inner)
    return parts


def _writes_view(node: fx.Node) -> bool:
    """Return whether an operator writes a part of another tensor, so that readers of that tensor would have to see
    it."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    written: Any = node.args[0]
    maker = getattr(written.target, "_schema", None)
    return maker is not None and not maker.is_mutable and any(value.alias_info for value in maker.returns)


@takes_apart(aten.bilinear.default)
def _bilinear(node: fx.Node) -> Any:
    def bilinear(x: Any, y: Any, weight: Any, bias: Any = None) -> Any:
        out, left, right = weight.shape
        rows = weight.transpose(1, 2).reshape(out * right, left)
        product = F.linear(x, rows).unflatten(-1, (out, right)) * y.unsqueeze(-2)
        return product.sum(-1) if bias is None else product.sum(-1) + bias

    return bilinear


@takes_apart(aten.pad.default)
def _pad(node: fx.Node) -> Any:
    """Pad around in plain torch: torch's own circular pad writes into views of its result."""
    if list(node.args[2:3]) != ["circular"]:
        return node.target

    def pad(x: Any, pads: Any, _: str, value: Any = None) -> Any:
        for place in range(len(pads) // 2):
            dim, (before, after) = -1 - place, pads[2 * place : 2 * place + 2]
            size = x.shape[dim]
            x = torch.cat([x.narrow(dim, size - before, before), x, x.narrow(dim, 0, after)], dim)
        return x

    return pad


@takes_apart(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default)
def _average_pool(node: fx.Node) -> Any:
    """Pool to one element by a mean, without torch's care for its layout in memory."""
    sizes: Any = node.args[1]
    dims = list(range(-len(sizes), 0))
    return (lambda x, _: x.mean(dims, keepdim=True)) if set(sizes) == {1} else node.target


@takes_apart(aten.instance_norm.default)
def _instance_norm(node: fx.Node) -> Any:
    """Normalize each sample by its own statistics, unless it keeps a running mean, which is written from all
    samples."""
    if node.args[3] is not None or node.args[4] is not None:
        return None

    def instance_norm(
        x: Any, weight: Any, bias: Any, mean: Any, var: Any, own: bool, momentum: float, eps: float, _: Any
    ) -> Any:
        dims = list(range(2, x.dim()))
        center = x - x.mean(dims, keepdim=True)
        normed = center * torch.rsqrt((center * center).mean(dims, keepdim=True) + eps)
        normed = normed if weight is None else normed * weight.view(-1, *[1] * len(dims))
        return normed if bias is None else normed + bias.view(-1, *[1] * len(dims))

    return instance_norm


@takes_apart(aten.embedding_bag.padding_idx, aten.embedding_bag.default)
def _embedding_bag(node: fx.Node) -> Any:
    """Look up and add rows for bags of equal sizes, which is the meaning of a table of indices."""
    offsets: Any = node.args[2]
    step = next((n.args[2] for n in (offsets,) if n.target is aten.arange.start_step and n.args[0] == 0), None)
    if not step or noted(node.args[1]).value.numel() % step:  # type: ignore[arg-type]
        return None

    def embedding_bag(table: Any, index: Any, offsets: Any, freq: Any = False, mode: int = 0, sparse: Any = False,
                      weights: Any = None, last: Any = False, padding: int | None = None) -> Any:  # fmt: skip
        index = index.reshape(-1, step)
        rows = F.embedding(index, table, -1 if padding is None else padding)
        rows = rows if weights is None else rows * weights.reshape(index.shape).unsqueeze(-1)
        kept = None if padding is None else (index != padding).unsqueeze(-1)
        if mode == 2:
            rows = rows if kept is None else rows.masked_fill(~kept, -torch.inf)
            return (torch.amax(rows, 1),)
        rows = rows if kept is None else rows * kept
        count = step if kept is None else kept.sum(1).clamp_min(1)
        return (rows.sum(1) / count if mode == 1 else rows.sum(1),)

    return embedding_bag


def _put(graph: fx.Graph, node: fx.Node, parts: fx.Graph) -> None:
    """Put the parts in the operator's place, with its provenance."""
    inline(graph, node, parts, node.all_input_nodes)
