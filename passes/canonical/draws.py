"""Random operators as counter-based streams: dropout, and every other draw whose law is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.initial.counter import dropped
from ...compiler.ops.own_ops import OPS, aten
from ...compiler.ops.rules import facts
from .rewriter import REWRITES, Canonicalizer, rewrites


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
