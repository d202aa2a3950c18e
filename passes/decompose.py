"""Operators that canonical form writes as several, so that a split batch gives a part of a sum: means, losses."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..compiler.ops import OPS

if TYPE_CHECKING:
    from .canonicalize import Canonicalizer

aten = torch.ops.aten

Rewrite = Callable[["Canonicalizer", fx.Node], None]

_NONE, _MEAN = 0, 1  # torch's reduction argument


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Global shape of a node with one tensor result."""
    return tuple(node.meta["val"].shape)


def average(c: Canonicalizer, near: fx.Node, x: fx.Node, dims: list[int], keep: bool = False) -> fx.Node:
    """The mean of ``x`` over ``dims``: a sum over the global count."""
    total = c.emit(near, aten.sum.dim_IntList, x, dims, keep)
    return c.emit(near, aten.div.Tensor, total, math.prod(shape_of(x)[dim] for dim in dims))


def _mean(c: Canonicalizer, node: fx.Node) -> None:
    x = node.args[0]
    dtype = node.kwargs.get("dtype")
    if not isinstance(x, fx.Node) or not (dtype or x.meta["val"].dtype).is_floating_point:  # type: ignore[union-attr]
        return
    if dtype is not None and dtype != x.meta["val"].dtype:
        x = c.emit(node, aten._to_copy.default, x, dtype=dtype)
    rank = len(shape_of(x))
    given: Any = node.args[1] if len(node.args) > 1 and node.args[1] else range(rank)
    keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    c.replace(node, average(c, node, x, [dim % max(rank, 1) for dim in given], keep))


def _averaged_loss(reduction: int) -> Rewrite:
    """A loss of every element, then their sum over how many there are; ``reduction``: that argument's position."""

    def rewrite(c: Canonicalizer, node: fx.Node) -> None:
        args, kwargs = list(node.args), dict(node.kwargs)
        how = args[reduction] if len(args) > reduction else kwargs.pop("reduction", _MEAN)
        if how == _NONE:
            return
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        args += [kwargs.pop(name, None) for name in names[len(args) : reduction]]
        args[reduction : reduction + 1] = [_NONE]
        losses = c.emit(node, node.target, *args, **kwargs)
        total = c.emit(node, aten.sum.default, losses)
        count = math.prod(shape_of(losses))
        c.replace(node, total if how != _MEAN else c.emit(node, aten.div.Tensor, total, count))

    return rewrite


def _batch_norm(c: Canonicalizer, node: fx.Node) -> None:
    """Statistics as sums over the global count, so that they are the whole batch's however it is split."""
    x, weight, bias, mean, var, training, momentum, eps = node.args
    if not training or not isinstance(x, fx.Node):
        return
    shape = shape_of(x)
    dims = [dim for dim in range(len(shape)) if dim != 1]
    count = math.prod(shape[dim] for dim in dims)

    def spread(value: Any) -> fx.Node:
        """A value of each channel beside ``x``."""
        for _ in range(len(shape) - 2):
            value = c.emit(node, aten.unsqueeze.default, value, 1)
        return value  # type: ignore[no-any-return]

    def moved(old: Any, new: fx.Node) -> fx.Node:
        kept = c.emit(node, aten.mul.Tensor, old, 1 - momentum)  # type: ignore[operator]
        return c.emit(node, aten.add.Tensor, kept, c.emit(node, aten.mul.Tensor, new, momentum))

    center = average(c, node, x, dims)
    apart = c.emit(node, aten.sub.Tensor, x, spread(center))
    square = c.emit(node, aten.sum.dim_IntList, c.emit(node, aten.mul.Tensor, apart, apart), dims)
    biased = c.emit(node, aten.div.Tensor, square, count)
    scale = c.emit(node, aten.rsqrt.default, c.emit(node, aten.add.Tensor, biased, eps))
    result = c.emit(node, aten.mul.Tensor, apart, spread(scale))
    if weight is not None:
        result = c.emit(node, aten.mul.Tensor, result, spread(weight))
    if bias is not None:
        result = c.emit(node, aten.add.Tensor, result, spread(bias))
    unbiased = c.emit(node, aten.div.Tensor, c.emit(node, aten.detach.default, square), max(count - 1, 1))
    results = {0: lambda: result, 1: lambda: center, 2: lambda: scale,
               3: lambda: moved(mean, c.emit(node, aten.detach.default, center)),
               4: lambda: moved(var, unbiased)}  # fmt: skip
    for user in list(node.users):
        if user.target is operator.getitem:
            c.replace(user, results[user.args[1]]())  # type: ignore[index]


def _rms_norm(c: Canonicalizer, node: fx.Node) -> None:
    """The ``eps`` of a norm that names none, as a number: a run in another dtype would read its own."""
    x, shape, *rest = node.args
    weight, eps = [*rest, None, None][:2]
    if eps is None and isinstance(x, fx.Node):
        dtype = x.meta["val"].dtype
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype  # what torch computes in
        node.args, node.kwargs = (x, shape, weight, torch.finfo(wide).eps), {}


def _broadcast_tensors(c: Canonicalizer, node: fx.Node) -> None:
    """Each tensor expanded to the common shape, alone: one that has it stays as it is."""
    tensors: Any = node.args[0]
    for user in list(node.users):
        source, shape = tensors[user.args[1]], shape_of(user)
        c.replace(user, source if shape_of(source) == shape else c.emit(user, aten.expand.default, source, list(shape)))


def _written(c: Canonicalizer, node: fx.Node) -> None:
    """What is written over a whole tensor is all that is left of it: the source, in the tensor's shape and dtype."""
    source, value = node.args[1], node.meta["val"]
    if not isinstance(source, fx.Node):
        return
    if source.meta["val"].dtype != value.dtype:
        source = c.emit(node, aten._to_copy.default, source, dtype=value.dtype)
    if shape_of(source) != tuple(value.shape):
        source = c.emit(node, aten.expand.default, source, list(value.shape))
    c.replace(node, source)


def _embedding(c: Canonicalizer, node: fx.Node) -> None:
    """A table whose padding row is not trained: what is looked up there carries no gradient, wherever the row is."""
    weight, index, *rest = node.args
    padding = rest[0] if rest else -1
    if not isinstance(padding, int) or padding < 0:
        return
    found = c.emit(node, aten.embedding.default, weight, index)
    padded = c.emit(node, aten.unsqueeze.default, c.emit(node, aten.eq.Scalar, index, padding), -1)
    c.replace(node, c.emit(node, aten.where.self, padded, c.emit(node, aten.detach.default, found), found))


def looked_up(c: Canonicalizer, node: fx.Node) -> None:
    """Rows of a parameter by indices of its leading dims, as an embedding: then parts of the lookups make parts of the
    gradient's sum. Indices may count from the end, which an embedding's do not."""
    x: Any = node.args[0]
    given: Any = node.args[1]
    indices = [index for index in given if index is not None]
    whole = [index is not None for index in given] == [True] * len(indices)
    counts = (torch.int64, torch.int32)
    if not whole or not _is_parameter(x) or any(index.meta["val"].dtype not in counts for index in indices):
        return
    shape, result = shape_of(x), shape_of(node)
    row: Any = None
    for size, index in zip(shape, indices, strict=False):
        below = c.emit(node, aten.lt.Scalar, index, 0)
        index = c.emit(node, aten.where.self, below, c.emit(node, aten.add.Tensor, index, size), index)
        row = index if row is None else c.emit(node, aten.add.Tensor, c.emit(node, aten.mul.Tensor, row, size), index)
    rows, rest = math.prod(shape[: len(indices)]), shape[len(indices) :]
    if len(shape) != 2 or len(indices) != 1:
        x = c.emit(node, aten.reshape.default, x, [rows, math.prod(rest)])
    found = c.emit(node, aten.embedding.default, x, row)
    c.replace(node, found if shape_of(found) == result else c.emit(node, aten.reshape.default, found, list(result)))


def _einsum(c: Canonicalizer, node: fx.Node) -> None:
    """What one operand alone has is summed before the product, as a sum with a type of its own."""
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


def _bernoulli(c: Canonicalizer, node: fx.Node) -> None:
    """Ones and zeros as dropout draws them: of whole channels, or of whole samples."""
    p = float(node.args[1] if len(node.args) > 1 else 0.5)  # type: ignore[arg-type]
    shape, dtype = list(shape_of(node)), node.meta["val"].dtype
    if p in (0.0, 1.0):
        c.replace(node, c.emit(node, aten.full.default, shape, p, dtype=dtype))
        return
    kept = c.emit(node, OPS.dropout_mask.default, c.stream(node, c.rng), shape, 1 - p, dtype)
    c.replace(node, c.emit(node, aten._to_copy.default, c.emit(node, aten.ne.Scalar, kept, 0), dtype=dtype))


def learned(value: fx.Node) -> bool:
    """Whether a gradient may flow to a value: it is made of a parameter."""
    seen, todo = {value}, [value] * value.meta["val"].dtype.is_floating_point
    while todo:
        node = todo.pop()
        if str(node.meta.get("role", "")).startswith("parameter"):
            return True
        if node.target is not aten.detach.default:
            todo += [x for x in node.all_input_nodes if x not in seen and x.meta["val"].dtype.is_floating_point]
            seen.update(todo)
    return False


def _repeated(c: Canonicalizer, near: fx.Node, x: fx.Node, heads: int) -> fx.Node:
    """Keys or values [b, g, t, d] for every query head."""
    batch, groups, length, size = shape_of(x)
    if groups == heads:
        return x
    apart = c.emit(near, aten.unsqueeze.default, x, 2)
    apart = c.emit(near, aten.expand.default, apart, [batch, groups, heads // groups, length, size])
    return c.emit(near, aten.reshape.default, apart, [batch, heads, length, size])


def written_attention(
    c: Canonicalizer, node: fx.Node, q: Any, k: Any, v: Any, mask: fx.Node, key: Any, scale: Any, p: float
) -> fx.Node:
    """Attention in its parts, for a mask that is trained: the one operator has no gradient for it."""
    k, v = (_repeated(c, node, x, shape_of(q)[1]) for x in (k, v))
    scores = c.emit(node, aten.matmul.default, q, c.emit(node, aten.transpose.int, k, -2, -1))
    scores = c.emit(node, aten.mul.Tensor, scores, float(shape_of(q)[-1]) ** -0.5 if scale is None else scale)
    weights = c.emit(node, aten.softmax.int, c.emit(node, aten.add.Tensor, scores, mask), -1)
    if key is not None:
        keep = c.emit(node, OPS.dropout_mask.default, key, list(shape_of(weights)), p, weights.meta["val"].dtype)
        weights = c.emit(node, aten.mul.Tensor, weights, keep)
    return c.emit(node, aten.matmul.default, weights, v)


def _is_parameter(x: fx.Node) -> bool:
    """Whether a value is trained, in whatever dtype it is read."""
    while x.target is aten._to_copy.default:
        x = x.args[0]  # type: ignore[assignment]
    return x.op == "placeholder" and x.meta["role"].startswith("parameter")


DECOMPOSITIONS: Mapping[Any, Rewrite] = {
    aten.einsum.default: _einsum,
    aten.bernoulli.p: _bernoulli,
    aten.mean.dim: _mean,
    aten.mean.default: _mean,
    aten.rms_norm.default: _rms_norm,
    aten.embedding.default: _embedding,
    aten.broadcast_tensors.default: _broadcast_tensors,
    aten.copy.default: _written,
    aten.fill.Tensor: _written,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    **dict.fromkeys(
        (aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
         aten.soft_margin_loss.default, aten.kl_div.default),
        _averaged_loss(2),
    ),
    aten.binary_cross_entropy.default: _averaged_loss(3),
    aten.binary_cross_entropy_with_logits.default: _averaged_loss(4),
}  # fmt: skip
"""Operator → rewrite."""
