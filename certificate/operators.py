"""Operators that move entries, see dims whole, or look entries up: rows as functions of a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from .letters import number
from .meaning import Value
from .rows import ROWS, SLOPES, Call, Gradients, inverse, like, row, slope
from .tensors import Tensors
from .text import Atom, Refused, Type

# ---- types


@row("aten.masked_fill.Scalar")
def _(c: Call) -> Value:
    t, (x, mask, fill) = c.tensors, c.args
    other = t.plus(t.constant(1), mask, by=(1, -1))
    return t.plus(t.times(other, x), t.times(mask, t.constant(number(fill))))


@slope("aten.masked_fill.Scalar")
def _(c: Call, g: Value, y: Value) -> Gradients:
    t, (x, mask, _) = c.tensors, c.args
    return [like(t, t.times(g, t.plus(t.constant(1), mask, by=(1, -1))), x.shape), None]


FLOATS = ("torch.float16", "torch.bfloat16", "torch.float32", "torch.float64")
_WHOLE = ("i64", "i32", "i16", "i8", "u8", "bool")


@row(
    "aten.alias.default",
    "aten.clone.default",
    "parc.wait",
    "parc.store.default",
    "parc.load.default",
    "parc.route.default",
    "parc.round_int8",
)
def _(c: Call) -> Value:
    return c.operand(0)


row("aten.detach.default", constant=True)(ROWS["aten.alias.default"])


@row("aten._to_copy.default")
def _(c: Call) -> Value:
    dtype: str = c.kwargs.pop("dtype").text
    if c.types[0].dtype in _WHOLE or dtype in FLOATS:
        return c.operand(0)
    return c.tensors.pointwise("whole", [c.args[0]], dtype)


@slope("aten._to_copy.default", "aten.clone.default", "aten.alias.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [g]


# ---- views


@row("aten.reshape.default", "aten.view.default")
def _(c: Call) -> Value:
    return c.tensors.reshape(*c.args)


@slope("aten.reshape.default", "aten.view.default", "aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [c.tensors.reshape(g, c.args[0].shape)]


@row("aten.transpose.int")
def _(c: Call) -> Value:
    return c.tensors.transpose(*c.args)


@slope("aten.transpose.int")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [c.tensors.transpose(g, *c.args[1:])]


@row("aten.t.default")
def _(c: Call) -> Value:
    return c.tensors.transpose(c.args[0], 0, 1) if len(c.args[0].dims) == 2 else c.args[0]


@slope("aten.t.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [c.tensors.transpose(g, 0, 1)]


@row("aten.permute.default")
def _(c: Call) -> Value:
    x, order = c.args
    return c.tensors.permute(x, [dim % len(order) for dim in order])


@slope("aten.permute.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    order = [dim % len(c.args[1]) for dim in c.args[1]]
    return [c.tensors.permute(g, [order.index(at) for at in range(len(order))])]


@row("aten.expand.default")
def _(c: Call) -> Value:
    return c.tensors.expand(*c.args)


@slope("aten.expand.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [like(c.tensors, g, c.args[0].shape)]


@row("aten.unsqueeze.default")
def _(c: Call) -> Value:
    return c.tensors.unsqueeze(*c.args)


@row("aten.squeeze.dim", "aten.squeeze.dims")
def _(c: Call) -> Value:
    x, dims = c.args
    return c.tensors.squeeze(x, [dims] if isinstance(dims, int) else dims)


def _bounds(size: int, start: Any, end: Any, step: int) -> tuple[int, int]:
    """Return the start and the number of entries of a slice, as Python takes it."""
    start, end, step = slice(start, end, step).indices(size)
    return start, len(range(start, end, step))


@row("aten.slice.Tensor")
def _(c: Call) -> Value:
    x, dim = c.args[0], c.at(1, 0)
    step = c.at(4, 1)
    start, size = _bounds(x.shape[dim], c.at(2), c.at(3), step)
    return c.tensors.part(x, dim, start, size, step)


@slope("aten.slice.Tensor")
def _(c: Call, g: Value, y: Value) -> Gradients:
    x, dim, step = c.args[0], c.at(1, 0), c.at(4, 1)
    start, _ = _bounds(x.shape[dim], c.at(2), c.at(3), step)
    return [c.tensors.place(g, dim, start, x.shape[dim], step)]


@row("aten.slice_backward.default")
def _(c: Call) -> Value:
    g, shape, dim, start, end, step = c.args
    start, size = _bounds(shape[dim], start, end, step)
    if size != g.shape[dim]:
        raise Refused(f"a gradient of {g.shape[dim]} entries is put back to {size}")
    return c.tensors.place(g, dim, start, shape[dim], step)


@row("aten.slice_scatter.default")
def _(c: Call) -> Value:
    x, part, dim, step = c.args[0], c.args[1], c.at(2, 0), c.at(5, 1)
    t, whole = c.tensors, x.shape[c.at(2, 0)]
    start, size = _bounds(whole, c.at(3), c.at(4), step)
    if size != part.shape[dim]:
        raise Refused(f"{part.shape[dim]} entries are put in the place of {size}")
    hole = t.place(t.part(x, dim, start, size, step), dim, start, whole, step)
    return t.plus(x, hole, t.place(part, dim, start, whole, step), by=(1, -1, 1))


@row("aten.select.int")
def _(c: Call) -> Value:
    return c.tensors.select(*c.args)


@slope("aten.select.int")
def _(c: Call, g: Value, y: Value) -> Gradients:
    x, dim, at = c.args
    return [_put(c.tensors, g, dim % len(x.dims), at % x.shape[dim], x.shape[dim])]


def _put(t: Tensors, g: Value, dim: int, at: int, size: int) -> Value:
    return t.place(t.unsqueeze(g, dim), dim, at, size)


@row("aten.select_backward.default")
def _(c: Call) -> Value:
    g, shape, dim, at = c.args
    return _put(c.tensors, g, dim % len(shape), at % shape[dim], shape[dim])


def _parts(c: Call) -> tuple[int, list[int]]:
    """Return the dim of a split, and the sizes of its parts."""
    x, sizes, dim = c.args[0], c.args[1], c.at(2, 0)
    whole = x.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)]
    if sum(sizes) != whole:
        raise Refused(f"a dim of {whole} is split into {sizes}")
    return dim, list(sizes)


@row("aten.split.Tensor", "aten.split_with_sizes.default")
def _(c: Call) -> tuple[Value, ...]:
    dim, sizes = _parts(c)
    return tuple(c.tensors.part(c.args[0], dim, sum(sizes[:at]), size) for at, size in enumerate(sizes))


@slope("aten.split.Tensor", "aten.split_with_sizes.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    (dim, sizes), t, whole = _parts(c), c.tensors, sum(_parts(c)[1])
    placed = [t.place(g, dim, sum(sizes[:at]), whole) for at, g in enumerate(c.grads) if g is not None]
    return [t.plus(*placed)]


@row("aten.cat.default")
def _(c: Call) -> Value:
    return c.tensors.cat(c.args[0], c.at(1, 0))


@slope("aten.cat.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    dim, start, parts = c.at(1, 0), 0, []
    for x in c.args[0]:
        parts.append(c.tensors.part(g, dim, start, x.shape[dim]))
        start += x.shape[dim]
    return parts


@row("aten.stack.default")
def _(c: Call) -> Value:
    dim = c.at(1, 0)
    return c.tensors.cat([c.tensors.unsqueeze(x, dim) for x in c.args[0]], dim)


@slope("aten.stack.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [c.tensors.select(g, c.at(1, 0), at) for at in range(len(c.args[0]))]


# ---- creation


@row("aten.full.default", constant=True)
def _(c: Call) -> Value:
    c.kwargs.pop("dtype", None)
    return c.tensors.constant(number(c.args[1]), c.args[0])


@row("parc.iota.default", constant=True)
def _(c: Call) -> Value:
    _, start, step, _ = c.args
    return c.tensors.plus(c.position(0, c.line.types[0]), c.tensors.constant(start), by=(step, 1))


@row("parc.stream_key.default", constant=True)
def _(c: Call) -> Value:
    rng, name, seed = c.args
    return c.tensors.opaque("stream", (name, seed), [rng], [["n"]], [], ["n"])


@row("parc.dropout_mask.default", constant=True)
def _(c: Call) -> Value:
    key, _, chance, _ = c.args
    type_ = c.line.types[0]
    return c.tensors.pointwise("dropout", [key, *c.positions(type_)], (number(chance), type_.shape))


# ---- sums


def _listed(dims: Any, rank: int) -> list[int]:
    if dims is None or dims == []:
        return list(range(rank))
    return [dims] if isinstance(dims, int) else list(dims)


@row("aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default", "aten.mean.dim")
def _(c: Call) -> Value:
    x = c.args[0]
    c.kwargs.pop("dtype", None)
    dims = _listed(c.at(1), len(x.dims))
    total = c.tensors.total(x, dims, bool(c.at(2, False)))
    if ".mean." in c.line.op:
        return c.tensors.scaled(total, 1 / Fraction(math.prod(x.shape[dim] for dim in dims)))
    return total


@slope("aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default", "aten.mean.dim")
def _(c: Call, g: Value, y: Value) -> Gradients:
    t, x = c.tensors, c.args[0]
    gone = {dim % len(x.dims) for dim in _listed(c.at(1), len(x.dims))}
    g = t.expand(t.reshape(g, [1 if at in gone else size for at, size in enumerate(x.shape)]), x.shape)
    if ".mean." in c.line.op:
        g = t.scaled(g, 1 / Fraction(math.prod(x.shape[dim] for dim in gone)))
    return [g]


@row("parc.square_sum.default")
def _(c: Call) -> Value:
    return c.tensors.squares(c.args[0])


# ---- products


def _rows(x: Value, last: str) -> list[Hashable]:
    return [*range(len(x.dims) - 1), last]


@row("aten.linear.default")
def _(c: Call) -> Value:
    x, w = c.args[:2]
    result = c.tensors.product([x, w], [_rows(x, "k"), "nk"], _rows(x, "n"))
    return result if c.at(2) is None else c.tensors.plus(result, c.at(2))


@slope("aten.linear.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    t, (x, w) = c.tensors, c.args[:2]
    gx = t.product([g, w], [_rows(x, "n"), "nk"], _rows(x, "k"))
    gw = t.product([g, x], [_rows(x, "n"), _rows(x, "k")], "nk")
    return [gx, gw, *([] if c.at(2) is None else [like(t, g, c.at(2).shape)])]


# ---- lookups


def _marks(c: Call, index: Value, place: Value, skip: int = -1) -> tuple[Value, list[Hashable]]:
    """Return 1 where an index is a place and else 0, as [..., place]; 0 at the place ``skip``."""
    t = c.tensors
    names: list[Hashable] = list(range(len(index.dims)))
    marks = t.pointwise("eq", [t.unsqueeze(index, len(names)), place])
    if skip >= 0:
        marks = t.times(marks, t.pointwise("ne", [place, t.constant(skip)]))
    return marks, names


def _looked_up(c: Call, table: Value, index: Value, type_: Type) -> Value:
    marks, names = _marks(c, index, c.position(0, type_))
    return c.tensors.product([marks, table], [[*names, "v"], ["v", "d"]], [*names, "d"])


@row("aten.embedding.default")
def _(c: Call) -> Value:
    c.demand(3, False)
    c.demand(4, False)
    return _looked_up(c, c.args[0], c.args[1], c.types[0])


@row("parc.lookup.default")
def _(c: Call) -> Value:
    return _looked_up(c, c.args[0], c.args[1], c.types[0])


def _put_back(c: Call, g: Value, index: Value, type_: Type, padding: int) -> Value:
    marks, names = _marks(c, index, c.position(0, type_), padding)
    return c.tensors.product([marks, g], [[*names, "v"], [*names, "d"]], "vd")


@slope("aten.embedding.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [_put_back(c, g, c.args[1], c.types[0], c.at(2, -1)), None]


@row("aten.embedding_dense_backward.default")
def _(c: Call) -> Value:
    g, index, _, padding, _ = c.args
    c.demand(4, False)
    return _put_back(c, g, index, c.line.types[0], padding)


@row("parc.lookup_backward.default")
def _(c: Call) -> Value:
    g, index, _, padding = c.args
    return _put_back(c, g, index, c.line.types[0], padding)


# ---- losses


def _parts_of_loss(c: Call, x: Value, peak: Value, targets: Value, type_: Type) -> tuple[Value, Value, Value, Value]:
    """Return the exponentials of logits, marks of the targets, the sum of the one, and the logit of the other."""
    t = c.tensors
    below = t.plus(x, peak, by=(1, -1))
    exponentials = t.pointwise("exp", [below])
    marks, _ = _marks(c, targets, c.position(1, type_))
    return exponentials, marks, t.total(exponentials, [1]), t.total(t.times(marks, below), [1])


@row("parc.token_loss.default")
def _(c: Call) -> Value:
    t, (x, targets, ignore) = c.tensors, c.args
    _, _, total, target = _parts_of_loss(c, x, t.largest(x, [1], True), targets, c.types[0])
    loss = t.plus(t.pointwise("log", [total]), target, by=(1, -1))
    return t.times(loss, t.pointwise("ne", [targets, t.constant(ignore)]))


@slope("parc.token_loss.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    t, (x, targets, ignore) = c.tensors, c.args
    exponentials, marks, total, _ = _parts_of_loss(c, x, t.largest(x, [1], True), targets, c.types[0])
    g = t.unsqueeze(t.times(g, t.pointwise("ne", [targets, t.constant(ignore)])), 1)
    share = t.times(exponentials, inverse(t, t.unsqueeze(total, 1)))
    return [t.plus(t.times(g, share), t.times(g, marks), by=(1, -1)), None]


@row("parc.row_max")
def _(c: Call) -> Value:
    x, axes = c.args
    return c.tensors.largest(x, [len(x.dims) - 1], True, c.axes(axes))


@row("parc.loss_parts.default")
def _(c: Call) -> Value:
    t, (x, peak, targets) = c.tensors, c.args
    _, _, total, target = _parts_of_loss(c, x, peak, targets, c.types[0])
    return t.cat([t.unsqueeze(total, 0), t.unsqueeze(target, 0)], 0)


@row("parc.loss_parts_backward.default")
def _(c: Call) -> Value:
    t, (g, x, peak, targets) = c.tensors, c.args
    exponentials, marks, _, _ = _parts_of_loss(c, x, peak, targets, c.types[1])
    to_sum, to_target = (t.unsqueeze(t.select(g, 0, at), 1) for at in (0, 1))
    return t.plus(t.times(to_sum, exponentials), t.times(to_target, marks))


# ---- norms


def _norm(c: Call, x: Value, shape: Sequence[int], eps: float) -> tuple[Value, Value]:
    """Return the mean and the inverse deviation of the last dims, which a layer norm sees whole."""
    t, first = c.tensors, len(x.dims) - len(shape)
    names = list(range(len(x.dims)))
    result = [name if name < first else None for name in names]
    both = []
    for op, args in (("mean of norm", ()), ("inverse deviation of norm", number(eps))):
        v = t.opaque(op, args, [x], [names], [n for n in result if n is not None], names[first:])
        both.append(v._replace(dims=(*v.dims, *((),) * len(shape))))
    return both[0], both[1]


def _normalised(c: Call, x: Value, mean: Value, deviation: Value) -> Value:
    return c.tensors.times(c.tensors.plus(x, mean, by=(1, -1)), deviation)


def _weighted(t: Tensors, x: Value, weight: Value | None, bias: Value | None) -> Value:
    x = x if weight is None else t.times(x, weight)
    return x if bias is None else t.plus(x, bias)


@row("aten.native_layer_norm.default")
def _(c: Call) -> tuple[Value, ...]:
    x, shape, weight, bias, eps = c.args
    mean, deviation = _norm(c, x, shape, eps)
    return _weighted(c.tensors, _normalised(c, x, mean, deviation), weight, bias), mean, deviation


@row("aten.layer_norm.default")
def _(c: Call) -> Value:
    x, shape, weight, bias, eps = (*c.args, None, None, 1e-5)[:5] if len(c.args) < 5 else c.args[:5]
    mean, deviation = _norm(c, x, shape, eps)
    return _weighted(c.tensors, _normalised(c, x, mean, deviation), weight, bias)


def _norm_gradients(
    c: Call, g: Value, x: Value, shape: Sequence[int], mean: Value, deviation: Value, weight: Value | None
) -> tuple[Value, Value, Value]:
    """Return the gradients of a layer norm's operand, weight and bias."""
    t, first = c.tensors, len(x.dims) - len(shape)
    inner, outer, size = range(first, len(x.dims)), range(first), math.prod(shape)
    normal = _normalised(c, x, mean, deviation)
    inside = g if weight is None else t.times(g, weight)
    average = t.total(inside, inner, keep=True)
    along = t.total(t.times(inside, normal), inner, keep=True)
    share = Fraction(-1) / size
    gx = t.times(deviation, t.plus(inside, average, t.times(normal, along), by=(1, share, share)))
    return gx, t.total(t.times(g, normal), outer), t.total(g, outer)


@row("aten.native_layer_norm_backward.default")
def _(c: Call) -> tuple[Value, ...]:
    g, x, shape, mean, deviation, weight, _, wanted = c.args
    return tuple(
        value if want else c.tensors.table.zero
        for value, want in zip(_norm_gradients(c, g, x, shape, mean, deviation, weight), wanted, strict=True)
    )


@slope("aten.layer_norm.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    x, shape, weight, bias, eps = (*c.args, None, None, 1e-5)[:5] if len(c.args) < 5 else c.args[:5]
    gx, gw, gb = _norm_gradients(c, g, x, shape, *_norm(c, x, shape, eps), weight)
    return [gx, *([gw] if weight is not None else []), *([gb] if bias is not None else [])]


# ---- attention


def _scores(
    c: Call,
    q: Value,
    k: Value,
    mask: Value | None,
    key: Value | None,
    causal: bool,
    scale: float | None,
    p: float,
    types: tuple[Type, Type],
) -> tuple[list[Value], list[str], tuple[Hashable, ...]]:
    """Return what attention's probabilities are made of, with labels, and the other facts of them: queries [b, g, r, s,
    d] and keys [b, g, t, d], where ``r`` counts the queries' heads of one head of keys. A causal attention also reads
    which places come first, and one with dropout the numbers of all entries."""
    t, groups = c.tensors, k.shape[1]
    repeats = q.shape[1] // groups

    def by_group(x: Value) -> Value:
        return t.reshape(x, (x.shape[0], groups, repeats, *x.shape[2:]))

    values, labels = [by_group(q), k], ["bgrsd", "bgtd"]
    if mask is not None:
        mask = mask._replace(dims=(*((),) * (4 - len(mask.dims)), *mask.dims))
        values.append(by_group(mask) if mask.shape[1] > 1 else t.unsqueeze(mask, 1))
        labels.append("bgrst")
    if causal:
        both = Type("bool", (types[0].dims[2], types[1].dims[2]), ())
        values.append(t.piece(t.table.leaf("not after", (0, 0)), both))
        labels.append("st")
    if p:
        if key is None:
            raise Refused(f"{c.line.op} drops probabilities by no key")
        values += [key, c.position(0, types[0]), t.reshape(c.position(1, types[0]), (groups, repeats)),
                   c.position(2, types[0]), c.position(2, types[1])]  # fmt: skip
        labels += ["", "b", "gr", "s", "t"]
    return values, labels, (None if scale is None else number(scale), number(p), mask is not None, bool(causal))


def _by_head(t: Tensors, value: Value) -> Value:
    """Return [b, g, r, s, ...] as [b, h, s, ...]."""
    b, g, r, *rest = value.shape
    return t.reshape(value, (b, g * r, *rest))


@row("parc.attention.default")
def _attention(c: Call) -> tuple[Value, ...]:
    t, (q, k, v, mask, key, causal, scale, p) = c.tensors, c.args
    values, labels, facts = _scores(c, q, k, mask, key, causal, scale, p, (c.types[0], c.types[1]))
    out = t.opaque("attention", facts, [*values, v], [*labels, "bgte"], "bgrse", "dt")
    without = slice(None) if not p else slice(0, -5)
    mass = t.opaque("attention mass", (*facts[:1], 0, *facts[2:]), values[without], labels[without], "bgrs", "dt")
    return _by_head(t, out), _by_head(t, mass)


def _attention_gradients(
    c: Call,
    types: tuple[Type, Type],
    g: Value,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    key: Value | None,
    out: Value,
    mass: Value,
    causal: bool,
    scale: float | None,
    p: float,
) -> tuple[Value, Value, Value]:
    t, groups = c.tensors, k.shape[1]
    values, labels, facts = _scores(c, q, k, mask, key, causal, scale, p, types)

    def by_group(x: Value) -> Value:
        return t.reshape(x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))

    factor, g = t.factored(g)
    values = [by_group(g), *values, v, by_group(out), by_group(mass)]
    labels = ["bgrse", *labels, "bgte", "bgrse", "bgrs"]
    gq = t.opaque("attention gradient of q", facts, values, labels, "bgrsd", "dte")
    # every query adds its part to the gradients of keys and values
    gk = t.opaque("attention gradient of k", facts, values, labels, "bgrstd", "dte")
    gv = t.opaque("attention gradient of v", facts, values, labels, "bgrste", "dte")
    gk, gv = t.total(gk, (2, 3)), t.total(gv, (2, 3))
    return t.times(factor, _by_head(t, gq)), t.times(factor, gk), t.times(factor, gv)


@row("parc.attention_backward.default")
def _(c: Call) -> tuple[Value, ...]:
    return _attention_gradients(c, (c.types[1], c.types[2]), *c.args)


@slope("parc.attention.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    q, k, v, mask, key, causal, scale, p = c.args
    types = c.types[0], c.types[1]
    both = _attention_gradients(c, types, g, q, k, v, mask, key, y, c.results[1], causal, scale, p)
    return [*both, *(None for item in (mask, key) if item is not None)]


# ---- collectives


@row("parc.all_reduce")
def _(c: Call) -> Value:
    return c.tensors.over(c.args[0], c.axes(c.args[1]))


@row("parc.all_gather", "parc.all_gather_int8")
def _(c: Call) -> Value:
    x, axes, dim, outer = c.args
    return c.tensors.gathered(x, c.axes(axes), dim, outer)


@row("parc.reduce_scatter", "parc.reduce_scatter_int8")
def _(c: Call) -> Value:
    x, axes, dim, outer = c.args
    return c.tensors.own(c.tensors.over(x, c.axes(axes)), c.axes(axes), dim, outer)


@row("parc.shard")
def _(c: Call) -> Value:
    x, axes, dim, outer = c.args
    return c.tensors.own(x, c.axes(axes), dim, outer)


@row("parc.all_to_all")
def _(c: Call) -> Value:
    x, axes, dim, outer, to, to_outer = c.args
    return c.tensors.own(c.tensors.gathered(x, c.axes(axes), dim, outer), c.axes(axes), to, to_outer)


@row("parc.pad")
def _(c: Call) -> Value:
    x, axes, dim, outer = c.args
    return c.tensors.padded(x, c.axes(axes), dim, outer)


@row("parc.ring_attention", "parc.ring_attention_backward")
def _(c: Call) -> tuple[Value, ...]:
    """A ring is an attention on keys and values that are gathered along the sequence, and their gradients are summed
    over its ranks and scattered."""
    t, axes, backward = c.tensors, c.axes(c.args[1]), "backward" in c.line.op
    args = [c.args[0], *c.args[2:]]
    at = 2 if backward else 1
    keys = c.types[at + 1]
    outer = _outer(keys, 2, axes[0])
    whole = Type(keys.dtype, (*keys.dims[:2], ((Atom(keys.shape[2], ""),),), *keys.dims[3:]), ())
    args[at], args[at + 1] = (t.gathered(x, axes, 2, outer) for x in args[at : at + 2])
    if not backward:
        return _attention(replace(c, args=tuple(args), types={0: c.types[0], 1: whole}))
    gq, gk, gv = _attention_gradients(c, (c.types[2], whole), *args)
    return gq, *(t.own(t.over(g, axes), axes, 2, outer) for g in (gk, gv))


def _outer(type_: Type, dim: int, axis: str) -> int:
    """Return the parts of a rank's dim that an axis splits each of; negative where every second one is in reverse."""
    (stretch,) = type_.dims[dim]
    outer = 1
    for atom in stretch:
        if atom.axis.lstrip("~") == axis:
            return -outer if atom.axis.startswith("~") else outer
        outer *= 1 if atom.axis else atom.size
    raise Refused(f"its keys are not split over `{axis}`")


# ---- softmax, choices of the largest, entries by number


@row("aten.softmax.int", "aten._softmax.default")
def _(c: Call) -> Value:
    t, x, dim = c.tensors, c.args[0], c.args[1]
    c.kwargs.pop("dtype", None)
    return _softmax(t, x, dim)


def _softmax(t: Tensors, x: Value, dim: int) -> Value:
    exponentials = t.pointwise("exp", [t.plus(x, t.largest(x, [dim], True), by=(1, -1))])
    return t.times(exponentials, inverse(t, t.total(exponentials, [dim], keep=True)))


def _softmax_gradient(t: Tensors, g: Value, y: Value, dim: int) -> Value:
    return t.times(y, t.plus(g, t.total(t.times(g, y), [dim], keep=True), by=(1, -1)))


@slope("aten.softmax.int", "aten._softmax.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [_softmax_gradient(c.tensors, g, y, c.args[1])]


@row("aten._softmax_backward_data.default")
def _(c: Call) -> Value:
    g, y, dim, _ = c.args
    return _softmax_gradient(c.tensors, g, y, dim)


def _log_softmax_gradient(t: Tensors, g: Value, y: Value, dim: int) -> Value:
    return t.plus(g, t.times(t.pointwise("exp", [y]), t.total(g, [dim], keep=True)), by=(1, -1))


@row("aten.log_softmax.int", "aten._log_softmax.default")
def _(c: Call) -> Value:
    t, x, dim = c.tensors, c.args[0], c.args[1]
    c.kwargs.pop("dtype", None)
    below = t.plus(x, t.largest(x, [dim], True), by=(1, -1))
    return t.plus(below, t.pointwise("log", [t.total(t.pointwise("exp", [below]), [dim], keep=True)]), by=(1, -1))


@slope("aten.log_softmax.int", "aten._log_softmax.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [_log_softmax_gradient(c.tensors, g, y, c.args[1])]


@row("aten._log_softmax_backward_data.default")
def _(c: Call) -> Value:
    g, y, dim, _ = c.args
    return _log_softmax_gradient(c.tensors, g, y, dim)


def _one_hot(c: Call, index: Value, dim: int, size: int) -> tuple[Value, list[Hashable], list[Hashable]]:
    """Return 1 where an index along a dim is an entry's number, else 0, and the labels of index and entries."""
    t, names = c.tensors, [*range(len(index.dims))]
    count = c.position(0, Type("i64", (((Atom(size, ""),),),), ()))
    marks = t.pointwise("eq", [t.unsqueeze(index, len(names)), count])
    entries = [("entry" if at == dim % len(names) else name) for at, name in enumerate(names)]
    return marks, [*names, "entry"], entries


def _gathered(c: Call, x: Value, dim: int, index: Value) -> Value:
    if any(a != b for at, (a, b) in enumerate(zip(x.shape, index.shape, strict=True)) if at != dim % len(x.dims)):
        raise Refused(f"{c.line.op} of {list(x.shape)} by {list(index.shape)} has no rule")
    marks, names, entries = _one_hot(c, index, dim, x.shape[dim])
    return c.tensors.product([marks, x], [names, entries], names[:-1])


def _scattered(c: Call, part: Value, dim: int, index: Value, size: int) -> Value:
    marks, names, entries = _one_hot(c, index, dim, size)
    part = c.tensors.expand(part, index.shape) if part.shape != index.shape else part
    return c.tensors.product([marks, part], [names, names[:-1]], entries)


@row("aten.topk.default")
def _(c: Call) -> tuple[Value, Value]:
    x, count, dim = c.args[0], c.args[1], c.at(2, -1)
    names: list[Hashable] = ["along" if at == dim % len(x.dims) else at for at in range(len(x.dims))]
    result: list[Hashable] = ["chosen" if name == "along" else name for name in names]
    facts = count, c.at(3, True), c.at(4, True)
    index = c.tensors.opaque("largest at", facts, [x], [names], result, ["along"], {"chosen": count})
    return _gathered(c, x, dim, index), index


@slope("aten.topk.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    x, dim = c.args[0], c.at(2, -1)
    return [_scattered(c, g, dim, c.results[1], x.shape[dim])]


@row("aten.gather.default")
def _(c: Call) -> Value:
    c.kwargs.pop("sparse_grad", None)
    return _gathered(c, *c.args[:3])


@slope("aten.gather.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    x, dim, index = c.args[:3]
    return [_scattered(c, g, dim, index, x.shape[dim]), None]


@row("aten.scatter_add.default")
def _(c: Call) -> Value:
    x, dim, index, part = c.args
    return c.tensors.plus(x, _scattered(c, part, dim, index, x.shape[dim]))


def _distinct(c: Call, index: Value) -> None:
    """Refuse numbers that may name an entry twice: of these one would win."""
    if c.tensors.table.nodes[index.node].op != "largest at" or index.coefficient != 1:
        raise Refused(f"{c.line.op} by numbers that may be equal has no rule")


@row("aten.scatter.src", "aten.scatter.value")
def _(c: Call) -> Value:
    x, dim, index, part = c.args
    _distinct(c, index)
    t, size = c.tensors, x.shape[dim]
    new = _scattered(c, part if isinstance(part, Value) else t.constant(number(part), index.shape), dim, index, size)
    if not x.coefficient:
        return new
    gone = t.times(x, _scattered(c, t.constant(1, index.shape), dim, index, size))
    return t.plus(x, gone, new, by=(1, -1, 1))


@slope("aten.scatter.src", "aten.scatter.value")
def _(c: Call, g: Value, y: Value) -> Gradients:
    t, (x, dim, index, part) = c.tensors, c.args
    kept = _scattered(c, t.constant(1, index.shape), dim, index, x.shape[dim])
    left = t.times(g, t.plus(t.constant(1), kept, by=(1, -1)))
    return [left, None, *([_gathered(c, g, dim, index)] if isinstance(part, Value) else [])]


# ---- experts: packed rows are an array [experts, tokens, ...] of which some rows are absent. What is read of those is
# multiplied by ``chosen``, so that they may be anything, and all that meet have one ``chosen``.


def _rows_of(c: Call, rows: Value, chosen: Value) -> Value:
    """Return packed rows as [experts, tokens, ...].

    Raises:
        Refused: other rows are present.
    """
    have = rows.chosen
    if have is None or not (have == chosen or c.tensors.canonical(have, chosen)):
        raise Refused(f"{c.line.op} reads rows of other tokens than are chosen")
    return c.tensors.reshape(rows._replace(chosen=None), (*chosen.shape, *rows.shape[1:]))


def _packed(c: Call, value: Value, chosen: Value) -> Value:
    experts, tokens, *rest = value.shape
    return c.tensors.reshape(value, (experts * tokens, *rest))._replace(chosen=chosen)


def _pack(c: Call, x: Value, chosen: Value) -> Value:
    return _packed(c, c.tensors.expand(c.tensors.unsqueeze(x, 0), (chosen.shape[0], *x.shape)), chosen)


def _unpack(c: Call, rows: Value, chosen: Value) -> Value:
    return c.tensors.product([_rows_of(c, rows, chosen), chosen], ["eth", "et"], "th")


def _spread_rows(c: Call, x: Value, chosen: Value) -> Value:
    wide = c.tensors.expand(c.tensors.unsqueeze(x, 1), (*chosen.shape, x.shape[1]))
    return _packed(c, wide, chosen)


def _sum_of_experts(c: Call, rows: Value, chosen: Value) -> Value:
    return c.tensors.product([_rows_of(c, rows, chosen), chosen], ["etn", "et"], "en")


def _pick(c: Call, x: Value, chosen: Value) -> Value:
    return _packed(c, c.tensors.unsqueeze(x, 2), chosen)


def _unpick(c: Call, rows: Value, chosen: Value) -> Value:
    return c.tensors.times(c.tensors.squeeze(_rows_of(c, rows, chosen), [2]), chosen)


def _expert_linear(c: Call, rows: Value, chosen: Value, weight: Value, transposed: bool) -> Value:
    result = c.tensors.product([_rows_of(c, rows, chosen), weight], ["eth", "ehn" if transposed else "enh"], "etn")
    return _packed(c, result, chosen)


def _expert_outer(c: Call, rows: Value, grad: Value, chosen: Value, transposed: bool) -> Value:
    values = [_rows_of(c, rows, chosen), _rows_of(c, grad, chosen), chosen]
    return c.tensors.product(values, ["eth", "etn", "et"], "ehn" if transposed else "enh")


_ROUTES: dict[str, tuple[Callable[..., Value], Callable[..., Value]]] = {
    "pack": (_pack, _unpack), "unpack": (_unpack, _pack), "pick": (_pick, _unpick), "unpick": (_unpick, _pick),
    "spread": (_spread_rows, _sum_of_experts), "expert_sum": (_sum_of_experts, _spread_rows),
}  # fmt: skip
"""Operators on packed rows and ``chosen``, each with the one that gives its operand's gradient."""


def _enter_route(name: str, forward: Callable[..., Value], backward: Callable[..., Value]) -> None:
    def mean(c: Call) -> Value:
        _same_top(c, c.args[1], c.args[2])
        return forward(c, c.args[0], c.args[1])

    ROWS[f"parc.{name}.default"] = mean
    SLOPES[f"parc.{name}.default"] = lambda c, g, y: [
        backward(c, g._replace(chosen=c.args[1]), c.args[1]),
        None,
    ]


for _name, (_forward, _backward) in _ROUTES.items():
    _enter_route(_name, _forward, _backward)


def _same_top(c: Call, chosen: Value, top: int) -> None:
    """Refuse another number of experts of a token than the model has for it, by which ranks count rows."""
    if c.tensors.table.tops.setdefault(chosen.node, top) != top:
        raise Refused(f"{c.line.op} counts {top} experts of a token, and the model {c.tensors.table.tops[chosen.node]}")


@row("parc.expert_linear.default")
def _(c: Call) -> Value:
    rows, chosen, weight, transposed, top = c.args
    _same_top(c, chosen, top)
    return _expert_linear(c, rows, chosen, weight, transposed)


@row("parc.expert_outer.default")
def _(c: Call) -> Value:
    rows, grad, chosen, transposed, top = c.args
    _same_top(c, chosen, top)
    return _expert_outer(c, rows, grad, chosen, transposed)


@slope("parc.expert_linear.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    rows, chosen, weight, transposed, _ = c.args
    g = g._replace(chosen=chosen)
    weights = _expert_outer(c, g, rows, chosen, False) if transposed else _expert_outer(c, rows, g, chosen, False)
    return [_expert_linear(c, g, chosen, weight, not transposed), None, weights]


@row("parc.exchange")
def _(c: Call) -> Value:
    x, axes, dim, outer, to, to_outer, before, after = c.args
    t = c.tensors
    _rows_of(c, x, before)
    moved = t.own(t.gathered(x._replace(chosen=None), c.axes(axes), dim, outer), c.axes(axes), to, to_outer)
    return moved._replace(chosen=after)


@slope("parc.route.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [g, None]


OPERATORS = ROWS
"""All rows, those of this module among them."""
