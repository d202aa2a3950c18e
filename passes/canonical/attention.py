"""Attention in the canonical form: four dims, counted draws, and written-out scores where they are needed."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.capture.reach import GradientFlow
from ...compiler.initial.counter import dropped
from ...compiler.ops.own_ops import OPS, aten
from ...compiler.ops.rules import facts
from .decompose import shape_of
from .rewriter import REWRITES, Canonicalizer, rewrites


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


# ---- random operators as counter-based streams: dropout, and every other draw whose law is known.


def drop_unread(graph: fx.Graph) -> None:
    """Remove random operators that no stream counts and that nobody reads: no other number follows them."""
    for node in reversed(list(graph.nodes)):
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if draws and not node.users and not _is_counted(node):
            graph.erase_node(node)


def uncounted(graph: fx.Graph) -> fx.Node | None:
    """Return the first random operator that the canonical form does not count, or None; attention counts its own
    dropout."""
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        known = _is_counted(node) or node.target is aten.scaled_dot_product_attention.default
        if torch.Tag.nondeterministic_seeded in tags and not known:
            return node  # type: ignore[no-any-return]
    return None


def _is_counted(node: fx.Node) -> bool:
    return facts(node.target).law != "" and node.target in REWRITES


@rewrites(aten.native_dropout.default)
def _dropout(c: Canonicalizer, node: Any) -> None:
    x, p, *train = node.args
    for user in [user for user in node.users if not user.users]:
        c.graph.erase_node(user)
    if any(user.args[1] != 0 for user in node.users):  # the mask itself is read
        return
    if p == 0 or (train and train[0] is False):
        made = x
    elif p == 1:  # nothing is drawn, as torch draws nothing
        made = c.emit(node, aten.mul.Tensor, x, 0.0)
    else:
        value = noted(x).value
        mask = c.emit(node, OPS.dropout_mask.default, c.stream(node, c.rng), list(value.shape), float(p), value.dtype)
        made = c.emit(node, aten.mul.Tensor, x, mask)
    for user in list(node.users):
        c.replace(user, made)
    c.graph.erase_node(node)  # torch's removal of dead nodes keeps what draws


@rewrites(
    aten.rand.default, aten.rand_like.default, aten.uniform.default, aten.randn.default, aten.randn_like.default,
    aten.normal_functional.default, aten.normal.float_float,
)  # fmt: skip
def _random(c: Canonicalizer, node: Any) -> None:
    """Draw numbers of a law; of the arguments only the shape matters. A draw in place of a tensor may have a range."""
    value, law = noted(node).value, facts(node.target).law
    numbers = c.emit(node, OPS.random.default, c.stream(node, c.rng), list(value.shape), law, value.dtype)
    names = [argument.name for argument in node.target._schema.arguments]
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    shift, scale = arguments.get("from", arguments.get("mean", 0.0)), arguments.get("to", arguments.get("std", 1.0))
    if "from" in names:
        scale -= shift
    if scale != 1:
        numbers = c.emit(node, aten.mul.Tensor, numbers, scale)
    if shift != 0:
        numbers = c.emit(node, aten.add.Tensor, numbers, shift)
    c.replace(node, numbers)


@rewrites(aten.bernoulli.p, aten.bernoulli.default)
def _bernoulli(c: Canonicalizer, node: Any) -> None:
    """Draw ones with one probability for all elements, or with each element's own, as dropout in place does."""
    value, p = noted(node).value, node.args[1] if len(node.args) > 1 else None
    if p in (0, 1):
        c.replace(node, c.emit(node, aten.full.default, list(value.shape), p, dtype=value.dtype))
        return
    key = c.stream(node, c.rng)
    if p is None:
        drawn = c.emit(node, OPS.random.default, key, list(value.shape), "uniform", value.dtype)
        kept = c.emit(node, aten.lt.Tensor, drawn, node.args[0])
    else:
        p = dropped(p)
        kept = c.emit(
            node, aten.ne.Scalar, c.emit(node, OPS.dropout_mask.default, key, list(value.shape), p, value.dtype), 0
        )
    c.replace(node, c.emit(node, aten._to_copy.default, kept, dtype=value.dtype))
