"""Attention in the canonical form: four dims, counted draws, and written-out scores where they are needed."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.capture.reach import GradientFlow
from ...compiler.ops.own_ops import OPS, aten
from ...compiler.ops.rules import facts
from .decompose import shape_of
from .rewriter import Canonicalizer, rewrites


@rewrites(aten.scaled_dot_product_attention.default)
def _attention(c: Canonicalizer, node: Any) -> None:
    """Replace torch's attention by parc's own, which keeps what its backward reads and draws its mask from a stream."""
    names = ("q", "k", "v", "attn_mask", "dropout_p", "is_causal")
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    p = float(arguments.get("dropout_p") or 0.0)
    mask, q = arguments.get("attn_mask"), arguments["q"]
    if noted(q).value.dim() == 3:
        _of_one_head(c, node, arguments)
    if noted(q).value.dim() != 4:
        return
    key = c.stream(node, c.rng) if p else None
    if mask is not None:
        while noted(mask).value.dim() < 4:
            mask = c.emit(node, aten.unsqueeze.default, mask, 0)
        if mask in GradientFlow():
            _written_out(c, node, {**arguments, "attn_mask": mask}, key)
            return
    options = (bool(arguments.get("is_causal") or False), arguments.get("scale"), p)
    k, v = arguments["k"], arguments["v"]
    grouped = [_before_repeat(x) for x in (k, v)]
    if None not in grouped:
        k, v = grouped
    pair = c.emit(node, OPS.attention.default, q, k, v, mask, key, *options)
    out = c.emit(node, operator.getitem, pair, 0, val=noted(pair).value[0])
    c.replace(node, out)


def _before_repeat(x: Any) -> fx.Node | None:
    """Return keys or values [b, g, t, d] of which a model repeated each head for several query heads: attention reads
    them as they are."""
    if x.target is not aten.reshape.default:
        return None
    repeated = x.args[0]
    while facts(repeated.target).moves == "copy":
        repeated = repeated.args[0]
    if repeated.target is not aten.expand.default or repeated.args[0].target is not aten.unsqueeze.default:
        return None
    apart = repeated.args[0]
    groups: fx.Node = apart.args[0]
    batch, heads, times, length, size = (*shape_of(repeated), *[0] * 5)[:5]
    fits = shape_of(groups) == (batch, heads, length, size) and shape_of(x) == (batch, heads * times, length, size)
    return groups if fits and apart.args[1] in (2, -3) and noted(repeated).value.dim() == 5 else None


def _of_one_head(c: Canonicalizer, node: Any, given: Mapping[str, Any]) -> None:
    """Give attention without heads a dim of one head: kernels disagree on the place of that dim."""
    operands = given["q"], given["k"], given["v"]
    if len({shape_of(x)[0] for x in operands}) > 1:
        return
    mask = given.get("attn_mask")
    if mask is not None and len(shape_of(mask)) == 3:
        mask = c.emit(node, aten.unsqueeze.default, mask, 1)
    one_head = (c.emit(node, aten.unsqueeze.default, x, 1) for x in operands)
    options = given.get("dropout_p") or 0.0, given.get("is_causal") or False
    attention = c.emit(node, node.target, *one_head, mask, *options, scale=given.get("scale"))
    c.replace(node, c.emit(node, aten.squeeze.dim, attention, 1))
    _attention(c, attention)


def _written_out(c: Canonicalizer, node: fx.Node, given: Mapping[str, Any], key: fx.Node | None) -> None:
    """Write out attention's scores where its mask is trained, such as relative positions added to the scores:
    attention's own backward makes no gradient of the mask."""
    q, k, v, mask = given["q"], given["k"], given["v"], given["attn_mask"]
    p, scale = float(given.get("dropout_p") or 0.0), given.get("scale")
    k, v = (_repeated(c, node, x, shape_of(q)[1]) for x in (k, v))
    scores = c.emit(node, aten.matmul.default, q, c.emit(node, aten.transpose.int, k, -2, -1))
    if (factor := shape_of(q)[-1] ** -0.5 if scale is None else scale) != 1:
        scores = c.emit(node, aten.mul.Tensor, scores, factor)
    weights = c.emit(node, aten.softmax.int, c.emit(node, aten.add.Tensor, scores, mask), -1)
    if key is not None:
        kept = c.emit(node, OPS.dropout_mask.default, key, list(shape_of(weights)), p, noted(weights).value.dtype)
        weights = c.emit(node, aten.mul.Tensor, weights, kept)
    c.replace(node, c.emit(node, aten.matmul.default, weights, v))


def _repeated(c: Canonicalizer, near: fx.Node, x: fx.Node, heads: int) -> fx.Node:
    """Repeat keys or values [b, g, t, d] for every query head."""
    batch, groups, length, size = shape_of(x)
    if groups == heads:
        return x
    apart = c.emit(near, aten.unsqueeze.default, x, 2)
    apart = c.emit(near, aten.expand.default, apart, [batch, groups, heads // groups, length, size])
    return c.emit(near, aten.reshape.default, apart, [batch, heads, length, size])
