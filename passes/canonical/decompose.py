"""Operators that the canonical form writes as several, so that a split batch gives a part of a sum: means, losses."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.capture.reach import GradientFlow
from ...compiler.ops.own_ops import aten
from ...compiler.ops.precision import is_narrow
from .rewriter import Canonicalizer, rewrites

_NONE, _MEAN = 0, 1  # torch's reduction argument


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Global shape of a node with one tensor result."""
    return tuple(noted(node).value.shape)


def average(c: Canonicalizer, near: fx.Node, x: fx.Node, dims: list[int], keep: bool = False) -> fx.Node:
    """Return the mean of ``x`` over ``dims``: a sum divided by the global count."""
    total = c.emit(near, aten.sum.dim_IntList, x, dims, keep)
    return c.emit(near, aten.div.Tensor, total, math.prod(shape_of(x)[dim] for dim in dims))


@rewrites(aten.mean.dim, aten.mean.default)
def _mean(c: Canonicalizer, node: fx.Node) -> None:
    x = node.args[0]
    dtype = node.kwargs.get("dtype")
    if not isinstance(x, fx.Node) or not (dtype or noted(x).value.dtype).is_floating_point:  # type: ignore[union-attr]
        return
    if dtype is not None and dtype != noted(x).value.dtype:
        x = c.emit(node, aten._to_copy.default, x, dtype=dtype)
    rank = len(shape_of(x))
    dims: Any = node.args[1] if len(node.args) > 1 and node.args[1] else range(rank)
    keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    c.replace(node, average(c, node, x, [dim % max(rank, 1) for dim in dims], keep))


@rewrites(
    aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.soft_margin_loss.default, aten.kl_div.default, aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
)  # fmt: skip
def _averaged_loss(c: Canonicalizer, node: fx.Node) -> None:
    """Write a mean loss as the loss of every element, summed and divided by the number of elements."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    args, kwargs, reduction = list(node.args), dict(node.kwargs), names.index("reduction")
    how = args[reduction] if len(args) > reduction else kwargs.pop("reduction", _MEAN)
    if how == _NONE:
        return
    args += [kwargs.pop(name, None) for name in names[len(args) : reduction]]
    args[reduction : reduction + 1] = [_NONE]
    losses = c.emit(node, node.target, *args, **kwargs)
    total = c.emit(node, aten.sum.default, losses)
    count = math.prod(shape_of(losses))
    c.replace(node, total if how != _MEAN else c.emit(node, aten.div.Tensor, total, count))


@rewrites(
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit.no_stats,
)
def _batch_norm(c: Canonicalizer, node: fx.Node) -> None:
    """Write batch statistics as sums over the global count, so that they are the whole batch's however it is split."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    arguments: dict[str, Any] = {"training": False, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    x, weight, bias, training, momentum, eps = (
        arguments[name] for name in ("input", "weight", "bias", "training", "momentum", "eps")
    )
    mean, var = arguments.get("running_mean"), arguments.get("running_var")
    shape = shape_of(x)
    dims = [dim for dim in range(len(shape)) if dim != 1]

    def spread(value: Any) -> fx.Node:
        """Return a value of each channel in a shape that broadcasts with ``x``."""
        for _ in range(len(shape) - 2):
            value = c.emit(node, aten.unsqueeze.default, value, 1)
        return value  # type: ignore[no-any-return]

    def channels(value: fx.Node) -> fx.Node:
        return c.emit(node, aten.reshape.default, value, [shape[1]])

    def moved(old: Any, new: fx.Node) -> fx.Node:
        kept = c.emit(node, aten.mul.Tensor, old, 1 - momentum)
        new = channels(c.emit(node, aten.detach.default, new))
        return c.emit(node, aten.add.Tensor, kept, c.emit(node, aten.mul.Tensor, new, momentum))

    # in the shape that x's readers want, so that running statistics read the same reduced sums
    center = average(c, node, x, dims, keep=True) if training else spread(mean)
    apart = c.emit(node, aten.sub.Tensor, x, center)
    squares = c.emit(node, aten.mul.Tensor, apart, apart)
    biased = average(c, node, squares, dims, keep=True) if training else spread(var)
    scale = c.emit(node, aten.rsqrt.default, c.emit(node, aten.add.Tensor, biased, eps))
    result = c.emit(node, aten.mul.Tensor, apart, scale)
    if weight is not None:
        result = c.emit(node, aten.mul.Tensor, result, spread(weight))
    if bias is not None:
        result = c.emit(node, aten.add.Tensor, result, spread(bias))
    count = math.prod(shape[dim] for dim in dims)

    def unbiased() -> fx.Node:
        return c.emit(node, aten.div.Tensor, c.emit(node, aten.mul.Tensor, biased, count), max(count - 1, 1))

    results: dict[int, Callable[[], Any]] = {
        0: lambda: result,
        1: lambda: channels(center),
        2: lambda: channels(scale),
        3: lambda: moved(mean, center) if training else mean,
        4: lambda: moved(var, unbiased()) if training else var,
    }
    for user in list(node.users):
        if user.target is operator.getitem:
            c.replace(user, results[user.args[1]]())  # type: ignore[index]


@rewrites(aten.rms_norm.default)
def _rms_norm(c: Canonicalizer, node: fx.Node) -> None:
    """Write down ``eps`` where a norm names none. Its default depends on the dtype, so a run in another dtype would use
    another one."""
    x, shape, *rest = node.args
    weight, eps = [*rest, None, None][:2]
    if eps is None:
        dtype = noted(x).value.dtype  # type: ignore[arg-type]
        eps = torch.finfo(torch.float32 if is_narrow(dtype) else dtype).eps  # of what torch computes in
    node.args, node.kwargs = (x, shape, weight, eps), {}


@rewrites(aten.matmul.default)
def _matmul(c: Canonicalizer, node: fx.Node) -> None:
    """Repeat batches before their product, where a plan can split the repeated dims. A single matrix or vector comes
    second, as in ``linear``."""
    pair: list[Any] = list(node.args)
    shapes = [shape_of(side) for side in pair]
    if len(shapes[0]) < 3 <= len(shapes[1]):
        vector = len(shapes[0]) == 1
        first = pair[0] if vector else c.emit(node, aten.transpose.int, pair[0], -2, -1)
        product = c.emit(node, aten.matmul.default, c.emit(node, aten.transpose.int, pair[1], -2, -1), first)
        c.replace(node, product if vector else c.emit(node, aten.transpose.int, product, -2, -1))
        return
    lead = shape_of(node)[:-2]
    if min(map(len, shapes)) < 3:
        return
    for at, (side, shape) in enumerate(zip(pair, shapes, strict=True)):
        if shape[:-2] != lead:
            for _ in range(len(lead) + 2 - len(shape)):
                side = c.emit(node, aten.unsqueeze.default, side, 0)
            pair[at] = c.emit(node, aten.expand.default, side, [*lead, *shape[-2:]])
    node.args = tuple(pair)


@rewrites(aten.broadcast_tensors.default)
def _broadcast_tensors(c: Canonicalizer, node: fx.Node) -> None:
    """Expand each tensor to the common shape by itself; one that has that shape stays as it is."""
    tensors: Any = node.args[0]
    for user in list(node.users):
        source, shape = tensors[user.args[1]], shape_of(user)
        c.replace(user, source if shape_of(source) == shape else c.emit(user, aten.expand.default, source, list(shape)))


@rewrites(aten.copy.default, aten.fill.Tensor)
def _written(c: Canonicalizer, node: fx.Node) -> None:
    """Replace a write over a whole tensor by its source, in the tensor's shape and dtype."""
    source, value = node.args[1], noted(node).value
    if not isinstance(source, fx.Node):
        return
    if noted(source).value.dtype != value.dtype:
        source = c.emit(node, aten._to_copy.default, source, dtype=value.dtype)
    if shape_of(source) != tuple(value.shape):
        source = c.emit(node, aten.expand.default, source, list(value.shape))
    c.replace(node, source)


@rewrites(aten.embedding.default)
def _embedding(c: Canonicalizer, node: fx.Node) -> None:
    """Cut the gradient of a table's padding row, which is not trained, wherever the row is."""
    weight, index, *rest = node.args
    padding = rest[0] if rest else -1
    if not isinstance(padding, int) or padding < 0:
        return
    rows = c.emit(node, aten.embedding.default, weight, index)
    padded = c.emit(node, aten.unsqueeze.default, c.emit(node, aten.eq.Scalar, index, padding), -1)
    c.replace(node, c.emit(node, aten.where.self, padded, c.emit(node, aten.detach.default, rows), rows))


def looked_up(c: Canonicalizer, node: fx.Node) -> None:
    """Return entries of a trained tensor as rows of an embedding: parts of the lookups then make parts of the
    gradient's sum. Indices may count from the end, which an embedding's must not."""
    x: Any = node.args[0]
    positions: Any = node.args[1]
    places = [dim for dim, index in enumerate(positions) if index is not None]
    indices = [positions[dim] for dim in places]
    together = bool(places) and places == list(range(places[0], places[-1] + 1))
    counts = (torch.int64, torch.int32)
    if not indices or any(noted(index).value.dtype not in counts for index in indices) or x not in GradientFlow():
        return
    shape, result = shape_of(x), shape_of(node)
    if places == [0, 1] and c.iotas.get(indices[0]) == (0, shape[0]) and shape_of(indices[1]) == shape[:1]:
        # one of each sample's, whose samples may be split
        index = c.emit(node, aten.reshape.default, indices[1], [shape[0], *[1] * (len(shape) - 1)])
        index = c.emit(node, aten.expand.default, index, [shape[0], 1, *shape[2:]])
        c.replace(node, c.emit(node, aten.squeeze.dim, c.emit(node, aten.gather.default, x, 1, index), 1))
        return
    row: Any = None
    for dim, index in zip(places, indices, strict=True):
        below = c.emit(node, aten.lt.Scalar, index, 0)
        index = c.emit(node, aten.where.self, below, c.emit(node, aten.add.Tensor, index, shape[dim]), index)
        scaled = row if row is None else c.emit(node, aten.mul.Tensor, row, shape[dim])
        row = index if scaled is None else c.emit(node, aten.add.Tensor, scaled, index)
    first = places[0] if together else 0  # where what was asked stands in the result
    moved, rest = places != list(range(len(places))), [dim for dim in range(len(shape)) if dim not in places]
    if moved:
        x = c.emit(node, aten.permute.default, x, [*places, *rest])
    if moved or len(shape) != 2 or len(indices) != 1:
        x = c.emit(
            node,
            aten.reshape.default,
            x,
            [math.prod(shape[dim] for dim in places), math.prod(shape[dim] for dim in rest)],
        )
    entries = c.emit(node, aten.embedding.default, x, row)
    asked = len(shape_of(row))
    if shape_of(entries) != (front := (*shape_of(row), *(shape[dim] for dim in rest))):
        entries = c.emit(node, aten.reshape.default, entries, list(front))
    if first:
        order = [*range(asked, asked + first), *range(asked), *range(asked + first, len(result))]
        entries = c.emit(node, aten.permute.default, entries, order)
    c.replace(node, entries)


@rewrites(aten.index_select.default)
def selected(c: Canonicalizer, node: fx.Node) -> None:
    """Return entries along one dim as an index of it."""
    x, dim, index = node.args
    indices = [None] * (dim % len(shape_of(x))) + [index]  # type: ignore[operator, arg-type]
    lookup = c.emit(node, aten.index.Tensor, x, indices)
    c.replace(node, lookup)
    looked_up(c, lookup)


@rewrites(aten.einsum.default)
def _einsum(c: Canonicalizer, node: fx.Node) -> None:
    """Sum the dims that only one operand has before the product: a sum then has a type of its own."""
    equation, tensors = str(node.args[0]).replace(" ", ""), list(node.args[1])  # type: ignore[arg-type]
    inputs, _, output = equation.partition("->")
    terms = inputs.split(",")
    if "->" not in equation or any(len(set(term.replace("...", ""))) != len(term.replace("...", "")) for term in terms):
        return
    for at, term in enumerate(terms):
        alone = [x for x in term if x.isalpha() and inputs.count(x) == 1 and x not in output]
        if alone:
            dims = [i - len(term) if "..." in term[:i] else i for i, x in enumerate(term) if x in alone]
            tensors[at] = c.emit(node, aten.sum.dim_IntList, tensors[at], dims)
            terms[at] = "".join(x for x in term if x not in alone)
    node.args = (f"{','.join(terms)}->{output}", tensors)


@rewrites(aten.repeat_interleave.self_int)
def _interleaved(c: Canonicalizer, node: fx.Node) -> None:
    """Repeat entries in place, as copies in a dim of their own, which a plan can split."""
    x: Any = node.args[0]
    times: Any = node.args[1]
    arguments = dict(zip(("self", "repeats", "dim"), node.args, strict=False)) | node.kwargs
    if arguments.get("dim") is None:
        x = c.emit(node, aten.reshape.default, x, [math.prod(shape_of(x))])
    shape = list(shape_of(x))
    dim = int(arguments.get("dim") or 0) % len(shape)  # type: ignore[arg-type]
    apart = c.emit(node, aten.unsqueeze.default, x, dim + 1)
    apart = c.emit(node, aten.expand.default, apart, [*shape[: dim + 1], times, *shape[dim + 1 :]])
    c.replace(node, c.emit(node, aten.reshape.default, apart, list(shape_of(node))))


@rewrites(aten.nansum.default)
def _nansum(c: Canonicalizer, node: fx.Node) -> None:
    """Sum all numbers that are not NaN, by hand: torch's own derivative would repeat the sum's gradient over dims that
    are split."""
    x: Any = node.args[0]
    if noted(x).value.dtype.is_floating_point:
        x = c.emit(node, aten.masked_fill.Scalar, x, c.emit(node, aten.isnan.default, x), 0)
    arguments = dict(zip(("self", "dim", "keepdim"), node.args, strict=False)) | node.kwargs
    dims = arguments.get("dim") or list(range(noted(x).value.dim()))
    total = c.emit(node, aten.sum.dim_IntList, x, dims, bool(arguments.get("keepdim")), dtype=arguments.get("dtype"))
    c.replace(node, total)
