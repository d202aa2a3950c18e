"""Attention and random operators in the canonical form: attention of four dims, and draws from counter-based
streams."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.capture.reach import GradientFlow
from ...compiler.initial.counter import dropped
from ...compiler.ops.own_ops import OPS, aten
from ...compiler.ops.rules import facts
from ..calls import arguments_of
from .decompose import shape_of
from .rewriter import REWRITES, Canonicalizer, rewrites


@rewrites(aten.scaled_dot_product_attention.default)
def _canonical_attention(c: Canonicalizer, node: Any) -> None:
    """Replace torch's attention by parc's own, which saves what its backward reads and draws its dropout from a
    stream."""
    arguments = arguments_of(node)
    if not _has_four_dims(node, arguments):
        _give_four_dims(c, node, arguments)
        return
    q, k, v, mask = (arguments[name] for name in ("query", "key", "value", "attn_mask"))
    p = float(arguments["dropout_p"] or 0.0)
    key = c.stream(node, c.rng) if p else None
    if mask is not None:
        mask = _aligned(c, node, mask, 4)
        if mask in GradientFlow():
            _write_out_scores(c, node, {**arguments, "attn_mask": mask}, key)
            return
    options = (bool(arguments["is_causal"]), arguments["scale"], p)
    grouped = [_before_repeat(x) for x in (k, v)]
    if None not in grouped:
        k, v = grouped
    pair = c.emit(node, OPS.attention.default, q, k, v, mask, key, *options)
    out = c.emit(node, operator.getitem, pair, 0, val=noted(pair).value[0])
    c.replace(node, out)


def _before_repeat(x: Any) -> fx.Node | None:
    """Return keys or values [b, g, t, d] before a model repeats each head for several query heads (GQA); None where it
    does not. Attention reads them unrepeated."""
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


def _has_four_dims(node: fx.Node, arguments: Mapping[str, Any]) -> bool:
    """Return whether attention is that of four dims, in which nothing but heads of keys, and a mask, is broadcast."""
    q, k, v = (shape_of(arguments[name]) for name in ("query", "key", "value"))
    out, mask = shape_of(node), arguments["attn_mask"]
    if not len(q) == len(k) == len(v) == len(out) == 4 or (mask is not None and len(shape_of(mask)) > 4):
        return False
    return q[:3] == out[:3] and k[0] == out[0] and k[:3] == v[:3] and q[1] % k[1] == 0


def _give_four_dims(c: Canonicalizer, node: Any, arguments: Mapping[str, Any]) -> None:
    """Give attention four dims: batch, heads, positions and sizes. Three dims are a batch and one head: kernels
    disagree on the place of that dim. What torch broadcasts, such as queries that all samples share, or all operands
    to a mask of more heads, is expanded."""
    out, grouped = shape_of(node), bool(arguments["enable_gqa"])
    apart = len(out) - (3 if len(out) > 3 or (grouped and len(out) == 3) else 2)
    batch, heads = out[:apart], out[apart:-2]
    q, k, v = operands = [arguments[name] for name in ("query", "key", "value")]
    key_heads = [shape_of(x)[-3:-2] or (1,) for x in (k, v)] if heads else [(), ()]
    read = key_heads[0] if key_heads[0] == key_heads[1] else heads
    rows = max(shape_of(k)[-2], shape_of(v)[-2])
    mask = arguments["attn_mask"]
    if mask is not None and len(shape_of(mask)) > len(heads) + 2:
        mask = _aligned(c, node, mask, len(out))
        if any(size > 1 for size in shape_of(mask)[:apart]):
            mask = _expanded(c, node, mask, (*batch, *shape_of(mask)[apart:]))
        mask = _joined_batch(c, node, mask, apart)
    wanted = (*batch, *heads, out[-2]), (*batch, *read, rows), (*batch, *read, rows)
    q, k, v = (
        _joined_batch(c, node, _expanded(c, node, _aligned(c, node, x, len(out)), (*dims, shape_of(x)[-1])), apart)
        for x, dims in zip(operands, wanted, strict=True)
    )
    options = arguments["dropout_p"] or 0.0, arguments["is_causal"] or False
    grouped = shape_of(q)[1] != shape_of(k)[1]
    attention = c.emit(node, node.target, q, k, v, mask, *options, scale=arguments["scale"], enable_gqa=grouped)
    if len(out) == 3 and not heads:
        c.replace(node, c.emit(node, aten.squeeze.dim, attention, 1))
    else:
        same = shape_of(attention) == out
        c.replace(node, attention if same else c.emit(node, aten.reshape.default, attention, list(out)))
    _canonical_attention(c, attention)


def _aligned(c: Canonicalizer, near: fx.Node, x: fx.Node, rank: int) -> fx.Node:
    """Return a tensor with dims of one before its own, up to a rank."""
    while len(shape_of(x)) < rank:
        x = c.emit(near, aten.unsqueeze.default, x, 0)
    return x


def _expanded(c: Canonicalizer, near: fx.Node, x: fx.Node, sizes: Sequence[int]) -> fx.Node:
    return x if shape_of(x) == tuple(sizes) else c.emit(near, aten.expand.default, x, list(sizes))


def _joined_batch(c: Canonicalizer, near: fx.Node, x: fx.Node, apart: int) -> fx.Node:
    """Return a tensor whose first ``apart`` dims are those of the batch in four dims: one of batch, one of heads."""
    sizes = shape_of(x)
    four = [math.prod(sizes[:apart]), *(sizes[apart:-2] or (1,)), *sizes[-2:]]
    if list(sizes) == four:
        return x
    if len(sizes) == 3 and apart == 1:
        return c.emit(near, aten.unsqueeze.default, x, 1)
    return c.emit(near, aten.reshape.default, x, four)


def _write_out_scores(c: Canonicalizer, node: fx.Node, arguments: Mapping[str, Any], key: fx.Node | None) -> None:
    """Write out attention's scores where its mask is trained (relative positions added to the scores): the backward of
    attention returns no gradient of the mask."""
    q, k, v, mask = (arguments[name] for name in ("query", "key", "value", "attn_mask"))
    p, scale = float(arguments["dropout_p"] or 0.0), arguments["scale"]
    k, v = (_repeat_heads(c, node, x, shape_of(q)[1]) for x in (k, v))
    scores = c.emit(node, aten.matmul.default, q, c.emit(node, aten.transpose.int, k, -2, -1))
    if (factor := shape_of(q)[-1] ** -0.5 if scale is None else scale) != 1:
        scores = c.emit(node, aten.mul.Tensor, scores, factor)
    weights = c.emit(node, aten.softmax.int, c.emit(node, aten.add.Tensor, scores, mask), -1)
    if key is not None:
        kept = c.emit(node, OPS.dropout_mask.default, key, list(shape_of(weights)), p, noted(weights).value.dtype)
        weights = c.emit(node, aten.mul.Tensor, weights, kept)
    c.replace(node, c.emit(node, aten.matmul.default, weights, v))


def _repeat_heads(c: Canonicalizer, near: fx.Node, x: fx.Node, heads: int) -> fx.Node:
    """Repeat keys or values [b, g, t, d] for every query head."""
    batch, groups, length, size = shape_of(x)
    if groups == heads:
        return x
    apart = c.emit(near, aten.unsqueeze.default, x, 2)
    apart = c.emit(near, aten.expand.default, apart, [batch, groups, heads // groups, length, size])
    return c.emit(near, aten.reshape.default, apart, [batch, heads, length, size])


# ---- random operators as counter-based streams: dropout, and every other draw whose distribution is known


def drop_unread(graph: fx.Graph) -> None:
    """The pass that removes random operators which no stream counts and nobody reads. It changes a captured graph in
    place; no other draw depends on them."""
    for node in reversed(list(_draws_without_stream(graph))):
        if not node.users:
            graph.erase_node(node)


def uncounted(graph: fx.Graph) -> fx.Node | None:
    """Return the first random operator without a stream in the canonical form, or None. Attention's dropout has one."""
    draws = _draws_without_stream(graph)
    return next((node for node in draws if node.target is not aten.scaled_dot_product_attention.default), None)


def _draws_without_stream(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the random operators that the canonical form does not rewrite as draws of a known distribution."""
    for node in graph.nodes:
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        several = node.target is aten.multinomial.default and node.args[1] > 1 and (*node.args[2:], False)[0]
        if draws and not (facts(node.target).law and node.target in REWRITES and not several):
            yield node


@rewrites(aten.native_dropout.default)
def _dropout(c: Canonicalizer, node: Any) -> None:
    x, p, *train = node.args
    for user in [user for user in node.users if not user.users]:
        c.graph.erase_node(user)
    if any(user.args[1] != 0 for user in node.users):  # the mask itself is read
        return
    if p == 0 or (train and train[0] is False):
        dropped_out = x
    elif p == 1:  # nothing is drawn, as torch draws nothing
        dropped_out = c.emit(node, aten.mul.Tensor, x, 0.0)
    else:
        value = noted(x).value
        mask = c.emit(node, OPS.dropout_mask.default, c.stream(node, c.rng), list(value.shape), float(p), value.dtype)
        dropped_out = c.emit(node, aten.mul.Tensor, x, mask)
    for user in list(node.users):
        c.replace(user, dropped_out)
    c.graph.erase_node(node)  # fx keeps random operators as dead code


@rewrites(
    aten.rand.default, aten.rand_like.default, aten.uniform.default, aten.randn.default, aten.randn_like.default,
    aten.normal_functional.default, aten.normal.float_float,
)  # fmt: skip
def _draw(c: Canonicalizer, node: Any) -> None:
    """Draw numbers from a stream, then scale and shift them to the operator's range, or to its mean and deviation."""
    value, law, arguments = noted(node).value, facts(node.target).law, arguments_of(node)
    numbers = c.emit(node, OPS.random.default, c.stream(node, c.rng), list(value.shape), law, value.dtype)
    shift, scale = arguments.get("from", arguments.get("mean", 0.0)), arguments.get("to", arguments.get("std", 1.0))
    if "from" in arguments:
        scale -= shift
    if scale != 1:
        numbers = c.emit(node, aten.mul.Tensor, numbers, scale)
    if shift != 0:
        numbers = c.emit(node, aten.add.Tensor, numbers, shift)
    c.replace(node, numbers)


@rewrites(aten.bernoulli.p, aten.bernoulli.default)
def _bernoulli(c: Canonicalizer, node: Any) -> None:
    """Draw ones with one probability for all elements, or with a probability for each, as in-place dropout does."""
    value, p = noted(node).value, node.args[1] if len(node.args) > 1 else None
    if p in (0, 1):
        c.replace(node, c.emit(node, aten.full.default, list(value.shape), p, dtype=value.dtype))
        return
    key = c.stream(node, c.rng)
    if p is None:
        drawn = c.emit(node, OPS.random.default, key, list(value.shape), "uniform", value.dtype)
        kept = c.emit(node, aten.lt.Tensor, drawn, node.args[0])
    else:
        mask = c.emit(node, OPS.dropout_mask.default, key, list(value.shape), dropped(p), value.dtype)
        kept = c.emit(node, aten.ne.Scalar, mask, 0)
    c.replace(node, c.emit(node, aten._to_copy.default, kept, dtype=value.dtype))


@rewrites(
    aten.randint.default, aten.randint.low, aten.randint_like.default, aten.randint_like.low_dtype,
    getattr(aten.random, "from"), aten.random.to,
)  # fmt: skip
def _integers(c: Canonicalizer, node: Any) -> None:
    """Draw whole numbers from ``low`` to below ``high``, as the whole part of a number uniform between them."""
    value, arguments = noted(node).value, arguments_of(node)
    low, high = arguments.get("low", arguments.get("from", 0)), arguments.get("high", arguments.get("to"))
    if high is None or high - low > 1 << 53:
        return
    numbers = _uniform(c, node, value.shape)
    numbers = c.emit(node, aten.floor.default, c.emit(node, aten.mul.Tensor, numbers, float(high - low)))
    shifted = c.emit(node, aten.add.Tensor, numbers, float(low)) if low else numbers
    c.replace(node, c.emit(node, aten._to_copy.default, shifted, dtype=value.dtype))


@rewrites(aten.randperm.default)
def _permutation(c: Canonicalizer, node: Any) -> None:
    """Draw a permutation: the order of as many uniform numbers."""
    value = noted(node).value
    order = c.emit(node, aten.argsort.stable, _uniform(c, node, value.shape), stable=True)
    same = value.dtype == torch.int64
    c.replace(node, order if same else c.emit(node, aten._to_copy.default, order, dtype=value.dtype))


@rewrites(aten.multinomial.default)
def _classes(c: Canonicalizer, node: Any) -> None:
    """Draw classes by their weights, as torch does: those of the largest quotients of a weight and an exponential
    number. Several with replacement are not drawn so."""
    arguments = arguments_of(node)
    weights, count = arguments["input"] if "input" in arguments else arguments["self"], arguments["num_samples"]
    if count > 1 and arguments["replacement"]:
        return
    numbers = c.emit(node, aten.neg.default, _uniform(c, node, shape_of(weights)))
    numbers = c.emit(node, aten.neg.default, c.emit(node, aten.log1p.default, numbers))
    wide = c.emit(node, aten._to_copy.default, weights, dtype=torch.float64)
    quotients = c.emit(node, aten.detach.default, c.emit(node, aten.div.Tensor, wide, numbers))
    pair = c.emit(node, aten.topk.default, quotients, count)
    c.replace(node, c.emit(node, operator.getitem, pair, 1, val=noted(pair).value[1]))


def _uniform(c: Canonicalizer, node: Any, shape: Sequence[int]) -> fx.Node:
    return c.emit(node, OPS.random.default, c.stream(node, c.rng), list(shape), "uniform", torch.float64)
