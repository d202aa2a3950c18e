"""Rows of reductions: norms, deviations, products and running products, counts and distances."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from .letters import Number, number
from .meaning import Value
from .rows import Call, Gradients, demand_type, inverse, like, listed, power, row, slope, wide
from .tensors import Tensors
from .text import Refused, within
from .views import flip

# ---- norms


def _dims_of_norm(c: Call) -> tuple[Any, Any, bool]:
    """Return the power of a norm, its dims, and whether these stay."""
    demand_type(c, c.kwargs.pop("dtype", None))
    p = number(c.at(1, 2))
    return p, c.at(2), c.at(3, False)


_NORMS = "aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim", "aten.norm.Scalar"


@row(*_NORMS)
def _(c: Call) -> Value:
    return norm(c.tensors, c.args[0], *_dims_of_norm(c))


def norm(t: Tensors, x: Value, p: Any, dims: Any, keep: bool) -> Value:
    """Return a norm over some dims: the root of the sum of powers, the largest entry, or the count of those that are
    not 0."""
    dims = listed(dims, len(x.dims))
    if p == 2:
        return t.pointwise("sqrt", [t.total(t.times(x, x), dims, keep)])
    if p == 0:
        return t.total(t.pointwise("ne", [x, t.constant(0)]), dims, keep)
    size = t.pointwise("abs", [x])
    if p in (math.inf, -math.inf):
        sign = 1 if p > 0 else -1
        return t.scaled(t.largest(t.scaled(size, sign), dims, keep), sign)
    total = t.total(power(t, size, p), dims, keep)
    return total if p == 1 else power(t, total, 1 / Fraction(p))


@slope(*_NORMS)
def _(c: Call, g: Value, y: Value) -> Gradients:
    t, x, (p, dims, _) = c.tensors, c.args[0], _dims_of_norm(c)
    return [slope_of_norm(t, wide(t, g, x, dims), x, wide(t, y, x, dims), p, dims)]


def slope_of_norm(t: Tensors, g: Value, x: Value, y: Value, p: Any, dims: Any) -> Value | None:
    """Return the gradient of what a norm is of, from those of its shape: the norm and its gradient."""
    if p == 0:
        return None
    size, sign, none = t.pointwise("abs", [x]), t.pointwise("sign", [x]), t.pointwise("eq", [y, t.constant(0)])
    some = t.plus(t.constant(1), none, by=(1, -1))
    if p == 2:
        return t.times(g, some, x, inverse(t, y))
    if p == 1:
        return t.times(g, sign)
    if p in (math.inf, -math.inf):
        equal, odd = t.pointwise("eq", [size, y]), t.pointwise("isnan", [size])
        most = t.plus(equal, odd, t.times(equal, odd), by=(1, 1, -1))
        return t.times(sign, g, inverse(t, t.total(most, listed(dims, len(x.dims)), keep=True)), most)
    if p < 1:
        there = t.plus(t.constant(1), t.pointwise("eq", [x, t.constant(0)]), by=(1, -1))
        return t.times(sign, there, power(t, size, p - 1), g, power(t, y, 1 - p))
    scale = t.times(g, some, inverse(t, power(t, y, p - 1)))
    return t.times(sign, power(t, size, p - 1), scale) if p < 2 else t.times(x, power(t, size, p - 2), scale)


# ---- variances: of all entries, divided by their count less a correction


_VARIANCES = tuple(
    f"aten.{name}.{way}" for name in ("var", "std", "var_mean", "std_mean") for way in ("correction", "dim")
)


def _facts(c: Call, kwargs: dict[str, Any]) -> tuple[Any, bool, Value, Number]:
    """Return the dims of a variance, whether these stay, the mean in the operand's shape, and what divides the sum."""
    t, x, dims = c.tensors, c.args[0], c.at(1)
    if c.line.op.endswith(".dim"):
        correction, keep = int(c.at(2, True)), c.at(3, False)
    else:
        correction, keep = number(kwargs.pop("correction", 1)), kwargs.pop("keepdim", False)
    correction = 1 if correction is None else correction
    dims = listed(dims, len(x.dims))
    count = math.prod(x.shape[dim] for dim in dims)
    if count <= correction:
        raise Refused(f"{c.line.op} of {count} entries has no rule")
    mean = t.scaled(t.total(x, dims, keep=True), Fraction(1, count))
    return dims, keep, mean, count - correction


@row(*_VARIANCES)
def _(c: Call) -> Value | tuple[Value, Value]:
    t, x, (dims, keep, mean, count) = c.tensors, c.args[0], _facts(c, c.kwargs)
    apart = t.plus(x, mean, by=(1, -1))
    y = t.scaled(t.total(t.times(apart, apart), dims, keep), 1 / Fraction(count))
    y = t.pointwise("sqrt", [y]) if "std" in c.line.op else y
    return (y, t.total(mean, dims, keep)) if "_mean" in c.line.op else y


@slope(*_VARIANCES)
def _(c: Call, g: Value, y: Value) -> Gradients:
    t, x, (dims, _, mean, count) = c.tensors, c.args[0], _facts(c, dict(c.line.kwargs))
    parts = []
    if c.grads[0] is not None:
        if "std" in c.line.op:
            some = t.plus(t.constant(1), t.pointwise("eq", [y, t.constant(0)]), by=(1, -1))
            g = t.times(g, some, inverse(t, t.scaled(y, 2)))
        parts.append(t.scaled(t.times(wide(t, g, x, dims), t.plus(x, mean, by=(1, -1))), 2 / Fraction(count)))
    if len(c.grads) > 1 and (of_mean := c.grads[1]) is not None:
        whole = math.prod(x.shape[dim] for dim in dims)
        parts.append(t.scaled(wide(t, of_mean, x, dims), Fraction(1, whole)))
    return [t.plus(*parts)]


# ---- products


def _running(t: Tensors, x: Value, dim: int) -> Value:
    """Return the product of all entries of a dim up to each."""
    names: list[Any] = list(range(len(x.dims)))
    result = ["until" if name == dim else name for name in names]
    return t.opaque("product so far", (), [x], [names], result, [dim], {"until": x.shape[dim]})


@row("aten.cumprod.default")
def _(c: Call) -> Value:
    demand_type(c, c.kwargs.pop("dtype", None))
    x, (dim,) = c.args[0], listed(c.args[1], len(c.args[0].dims))
    return _running(c.tensors, x, dim)


def _dim_of_product(c: Call) -> tuple[Value, int, bool]:
    """Return what a product is of, its dim, and whether this stays."""
    demand_type(c, c.kwargs.pop("dtype", None))
    x = c.args[0]
    if c.line.op == "aten.prod.default":
        return c.tensors.reshape(x, (math.prod(x.shape),)), 0, False
    return x, within(c.args[1], len(x.dims)), c.at(2, False)


@row("aten.prod.dim_int", "aten.prod.default")
def _(c: Call) -> Value:
    x, dim, keep = _dim_of_product(c)
    size = x.shape[dim]
    y = c.tensors.part(_running(c.tensors, x, dim), dim, size - 1, 1)
    return y if keep else c.tensors.squeeze(y, [dim])


@slope("aten.prod.dim_int", "aten.prod.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    t, (x, dim, keep) = c.tensors, _dim_of_product(c)
    size, shape = x.shape[dim], [1 if at == dim else size for at, size in enumerate(x.shape)]
    first, last = t.part(x, dim, 0, size - 1), t.part(x, dim, 1, size - 1)
    before = _running(t, t.cat([t.constant(1, shape), first], dim), dim)
    behind = flip(t, _running(t, t.cat([t.constant(1, shape), flip(t, last, [dim])], dim), dim), [dim])
    g = g if keep else t.reshape(g, shape)
    return [t.reshape(t.times(g, before, behind), c.args[0].shape)]


# ---- counts and distances


@row("aten.histc.default", constant=True)
def _(c: Call) -> Value:
    t, x, bins, low, high = c.tensors, c.args[0], c.at(1, 100), number(c.at(2, 0)), number(c.at(3, 0))
    if low == high:
        raise Refused(f"{c.line.op} between the least and the largest entry has no rule")
    names: list[Any] = list(range(len(x.dims)))
    marks = t.pointwise("in bin", [t.unsqueeze(x, len(names)), c.places(bins)], (bins, low, high))
    return t.total(marks, names)


@row("aten.bucketize.Tensor", "aten.searchsorted.Tensor", constant=True)
def _(c: Call) -> Value:
    t, (x, bounds) = c.tensors, c.args if ".bucketize." in c.line.op else c.args[::-1]
    c.kwargs.pop("out_int32", None)
    below = "le" if c.kwargs.pop("right", False) else "lt"
    if len(bounds.dims) != 1:
        raise Refused(f"{c.line.op} of bounds of {list(bounds.shape)} has no rule")
    return t.total(t.pointwise(below, [bounds, t.unsqueeze(x, len(x.dims))]), [len(x.dims)])


def _apart(t: Tensors, x: Value, y: Value) -> Value:
    """Return the difference of every two rows, as [..., rows of x, rows of y, entries]."""
    return t.plus(t.unsqueeze(x, len(x.dims) - 1), t.unsqueeze(y, len(y.dims) - 2), by=(1, -1))


def _power(c: Call, at: int) -> Any:
    p = number(c.args[at])
    if p not in (1, 2):
        raise Refused(f"{c.line.op} with {c.args[at]!r} as its power has no rule")
    return p


@row("aten._cdist_forward.default")
def _(c: Call) -> Value:
    x, y = c.args[:2]  # how it is computed is no number
    return norm(c.tensors, _apart(c.tensors, x, y), _power(c, 2), [-1], False)


def _of_rows(c: Call, g: Value, x: Value, y: Value, p: Any, distance: Value) -> Value:
    """Return the gradient of the rows of ``x`` from that of their distances."""
    t, apart, last = c.tensors, _apart(c.tensors, x, y), len(distance.dims)
    wide_g, wide_distance = (t.expand(t.unsqueeze(v, last), apart.shape) for v in (g, distance))
    each = slope_of_norm(t, wide_g, apart, wide_distance, p, [-1])
    assert each is not None
    return like(t, t.total(each, [last - 1]), x.shape)


@slope("aten._cdist_forward.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    (one, other), p, t = c.args[:2], _power(c, 2), c.tensors
    g_back, y_back = (t.transpose(value, -2, -1) for value in (g, y))
    return [_of_rows(c, g, one, other, p, y), _of_rows(c, g_back, other, one, p, y_back)]


@row("aten._cdist_backward.default")
def _(c: Call) -> Value:
    g, x, y, _, distance = c.args
    return _of_rows(c, g, x, y, _power(c, 3), distance)
