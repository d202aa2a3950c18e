"""Decompositions: operators that the canonical form writes as several, so that a split batch gives a partial sum, and
operators without a rule in the parts that torch composes them of."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._decomp import decomposition_table

from ...compiler.capture.node_facts import noted
from ...compiler.capture.parts import inline, parts_of
from ...compiler.capture.reach import GradientFlow
from ...compiler.ops.own_ops import OPS, aten
from ...compiler.ops.precision import is_narrow
from ...compiler.ops.rules import facts, has_rule
from ..calls import arguments_of
from ..programs.joint import write_functional
from .rewriter import PARTS, REWRITES, Canonicalizer, rewrites, takes_apart, targets_where

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
    arguments = arguments_of(node)
    x, dtype = arguments["self"], arguments["dtype"]
    if not isinstance(x, fx.Node) or not (dtype or noted(x).value.dtype).is_floating_point:
        return
    if dtype is not None and dtype != noted(x).value.dtype:
        x = c.emit(node, aten._to_copy.default, x, dtype=dtype)
    rank = len(shape_of(x))
    dims = [dim % max(rank, 1) for dim in arguments.get("dim") or range(rank)]
    c.replace(node, average(c, node, x, dims, bool(arguments.get("keepdim"))))


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
    arguments = {"training": False, **arguments_of(node)}
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

    # the shape that broadcasts with x, also for running statistics, which so read the same reduced sums
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


@rewrites(aten.pow.Tensor_Scalar)
def _power(c: Canonicalizer, node: fx.Node) -> None:
    """Leave out a first power, as of a focal loss whose exponent is 1."""
    x, exponent = node.args
    if exponent == 1 and isinstance(x, fx.Node):
        value = noted(node).value
        same = noted(x).value.dtype == value.dtype
        c.replace(node, x if same else c.emit(node, aten._to_copy.default, x, dtype=value.dtype))


@rewrites(aten.rms_norm.default)
def _rms_norm(c: Canonicalizer, node: fx.Node) -> None:
    """Write down ``eps`` where a norm names none. Its default depends on the dtype, so a run in another dtype would use
    another one."""
    x, shape, weight, eps = arguments_of(node).values()
    if eps is None:
        dtype = noted(x).value.dtype
        eps = torch.finfo(torch.float32 if is_narrow(dtype) else dtype).eps  # torch computes narrow types in float32
    node.args, node.kwargs = (x, shape, weight, eps), {}


@rewrites(aten.matmul.default)
def _matmul(c: Canonicalizer, node: fx.Node) -> None:
    """Expand batch dims before their product, so that a plan can split them. A single matrix or vector becomes the
    second operand, as in ``linear``."""
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


@rewrites(aten._sparse_mm.default)
def _dense_product(c: Canonicalizer, node: fx.Node) -> None:
    """Compute a product with all entries of a sparse operand, as recipes have them."""
    node.target = aten.mm.default


@rewrites(aten.broadcast_tensors.default)
def _broadcast_tensors(c: Canonicalizer, node: fx.Node) -> None:
    """Expand each tensor to the common shape by itself; one that has that shape stays as it is."""
    tensors: Any = node.args[0]
    for user in list(node.users):
        source, shape = tensors[user.args[1]], shape_of(user)
        c.replace(user, source if shape_of(source) == shape else c.emit(user, aten.expand.default, source, list(shape)))


@rewrites(aten.copy.default, aten.fill.Tensor)
def _overwrite(c: Canonicalizer, node: fx.Node) -> None:
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
def _padding_row(c: Canonicalizer, node: fx.Node) -> None:
    """Cut the gradient of a table's padding row, which is not trained, wherever the row is. Gradients are dense."""
    weight, index, padding, by_frequency, sparse = arguments_of(node).values()
    trains_all = not isinstance(padding, int) or padding < 0
    if trains_all and not sparse:
        return
    scaled = {"scale_grad_by_freq": True} if by_frequency else {}
    rows = c.emit(node, aten.embedding.default, weight, index, **scaled)
    if trains_all:
        c.replace(node, rows)
        return
    padded = c.emit(node, aten.unsqueeze.default, c.emit(node, aten.eq.Scalar, index, padding), -1)
    c.replace(node, c.emit(node, aten.where.self, padded, c.emit(node, aten.detach.default, rows), rows))


def looked_up(c: Canonicalizer, node: fx.Node) -> None:
    """Replace an index of a trained tensor by an embedding: its gradient from a part of the lookups is a partial sum.
    Negative indices are counted from the front, since an embedding takes none."""
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
        # one entry for each sample: the samples may be split
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
    first = places[0] if together else 0  # the dim of the result at which the dims of the indices begin
    moved, rest = places != list(range(len(places))), [dim for dim in range(len(shape)) if dim not in places]
    if moved:
        x = c.emit(node, aten.permute.default, x, [*places, *rest])
    if moved or len(shape) != 2 or len(indices) != 1:
        table = [math.prod(shape[dim] for dim in dims) for dims in (places, rest)]
        x = c.emit(node, aten.reshape.default, x, table)
    entries = c.emit(node, aten.embedding.default, x, row)
    asked = len(shape_of(row))
    if shape_of(entries) != (front := (*shape_of(row), *(shape[dim] for dim in rest))):
        entries = c.emit(node, aten.reshape.default, entries, list(front))
    if first:
        order = [*range(asked, asked + first), *range(asked), *range(asked + first, len(result))]
        entries = c.emit(node, aten.permute.default, entries, order)
    c.replace(node, entries)


@rewrites(aten.index_select.default)
def _index_select(c: Canonicalizer, node: fx.Node) -> None:
    """Write entries along one dim as an index of it."""
    x, dim, index = node.args
    indices = [None] * (dim % len(shape_of(x))) + [index]  # type: ignore[operator, arg-type]
    lookup = c.emit(node, aten.index.Tensor, x, indices)
    c.replace(node, lookup)
    looked_up(c, lookup)


@rewrites(aten.einsum.default)
def _einsum(c: Canonicalizer, node: fx.Node) -> None:
    """Sum the dims that only one operand has before the product, so that each sum has its own type."""
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
def _repeat_interleave(c: Canonicalizer, node: fx.Node) -> None:
    """Repeat each entry as an expanded dim behind its own, which a plan can split."""
    x, times, dim, *_ = arguments_of(node).values()
    if dim is None:
        x = c.emit(node, aten.reshape.default, x, [math.prod(shape_of(x))])
    shape = list(shape_of(x))
    dim = int(dim or 0) % len(shape)
    apart = c.emit(node, aten.unsqueeze.default, x, dim + 1)
    apart = c.emit(node, aten.expand.default, apart, [*shape[: dim + 1], times, *shape[dim + 1 :]])
    c.replace(node, c.emit(node, aten.reshape.default, apart, list(shape_of(node))))


@rewrites(aten.nansum.default)
def _nansum(c: Canonicalizer, node: fx.Node) -> None:
    """Fill NaNs with zeros before a sum. Torch's derivative of ``nansum`` would expand the sum's gradient over dims
    that are split."""
    x, dims, keep, dtype = arguments_of(node).values()
    if noted(x).value.dtype.is_floating_point:
        x = c.emit(node, aten.masked_fill.Scalar, x, c.emit(node, aten.isnan.default, x), 0)
    dims = dims or list(range(noted(x).value.dim()))
    c.replace(node, c.emit(node, aten.sum.dim_IntList, x, dims, bool(keep), dtype=dtype))


# ---- creation operators: ``full`` for one number, ``iota`` for counts


@rewrites(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(c: Canonicalizer, node: Any) -> None:
    value, arguments = noted(node).value, arguments_of(node)
    start, step = arguments.get("start", 0), arguments.get("step", 1)
    if start != int(start) or step != int(step):  # computed as torch does, and each rank its part
        count = c.emit(node, OPS.iota.default, value.shape[0], 0, 1, torch.float64)
        numbers = c.emit(node, aten.add.Tensor, c.emit(node, aten.mul.Tensor, count, float(step)), float(start))
        return c.replace(node, c.emit(node, aten._to_copy.default, numbers, dtype=value.dtype))
    start, step = int(start), int(step)
    count = c.emit(node, OPS.iota.default, value.shape[0], start, step, value.dtype, val=value)
    if (start, step) == (0, 1):
        c.iotas[count] = (0, value.shape[0])
    c.replace(node, count)


@rewrites(aten.linspace.default, aten.logspace.default, aten.eye.default, aten.eye.m)
def _write_dtype(_: Canonicalizer, node: Any) -> None:
    """Write down the dtype of a created tensor: torch's default is float32 also in a program that runs in float64."""
    node.kwargs = {**node.kwargs, "dtype": noted(node).value.dtype}


@rewrites(*targets_where(lambda row: row.creates))
def _full(c: Canonicalizer, node: Any) -> None:
    """Write a tensor of one number as ``full``, with its shape as numbers."""
    result, row = noted(node).value, facts(node.target)
    number = row.number_in(node.args)
    if row.number is not None and result.dtype.is_floating_point:
        number = float(number)
    c.replace(node, c.emit(node, aten.full.default, list(result.shape), number, val=result, dtype=result.dtype))


# ---- operators without a rule, decomposed into operators with rules


_DEPTH = 4
"""The most times that parts are decomposed in turn: torch's decompositions end after two or three."""


def expand_unruled(graph: fx.Graph) -> None:
    """The pass that decomposes operators. It takes a captured graph, and changes it in place: every operator that has
    no rule, and that no rewrite of the canonical form knows, becomes its parts.

    An operator that torch does not decompose, or not into known operators, stays: every rank computes it whole.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and not _is_known(node.target):
            parts = _decomposed(node, _DEPTH)
            if parts is not None:
                inline(graph, node, parts, node.all_input_nodes)
    graph.eliminate_dead_code()


def _is_known(target: Any) -> bool:
    return target is operator.getitem or target in REWRITES or has_rule(target)


def _decomposed(node: fx.Node, depth: int) -> fx.Graph | None:
    """Return the graph of one operator's parts, which all are known; None where it has no such parts."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or depth == 0:
        return None
    composite = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    function = PARTS[target](node) if target in PARTS else target
    table = {target: decomposition_table[target]} if target in decomposition_table and not composite else {}
    if function is None or (function is target and not composite and not table):
        return None
    parts = parts_of(node, function, table)
    if any(_writes_view(part) for part in parts.nodes):
        return None
    write_functional(parts)
    for part in list(parts.nodes):
        if part.op == "get_attr":
            return None
        if part.op == "call_function" and not _is_known(part.target):
            inner = None if part.target is target else _decomposed(part, depth - 1)
            if inner is None:
                return None
            inline(parts, part, inner, part.all_input_nodes)
    return parts


def _writes_view(node: fx.Node) -> bool:
    """Return True for an operator that writes into a view: readers of the view's base would have to see it."""
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
    """Write a circular pad as concatenations: torch's decomposition writes into views of its result."""
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
    """Write a pool to one element as a mean: torch's decomposition restrides its result."""
    sizes: Any = node.args[1]
    dims = list(range(-len(sizes), 0))
    return (lambda x, _: x.mean(dims, keepdim=True)) if set(sizes) == {1} else node.target


@takes_apart(aten.instance_norm.default)
def _instance_norm(node: fx.Node) -> Any:
    """Normalize each sample by its statistics. A norm with a running mean stays, since that reads all samples."""
    if node.args[3] is not None or node.args[4] is not None:
        return None

    def instance_norm(
        x: Any, weight: Any, bias: Any, mean: Any, var: Any, by_sample: bool, momentum: float, eps: float, _: Any
    ) -> Any:
        dims = list(range(2, x.dim()))
        center = x - x.mean(dims, keepdim=True)
        normed = center * torch.rsqrt((center * center).mean(dims, keepdim=True) + eps)
        normed = normed if weight is None else normed * weight.view(-1, *[1] * len(dims))
        return normed if bias is None else normed + bias.view(-1, *[1] * len(dims))

    return instance_norm
