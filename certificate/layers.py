"""Rows of layers: products and convolutions, what is looked up, losses and norms."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import Any

from .letters import Number, number
from .meaning import Value
from .padding import real_entries
from .rows import Call, Gradients, exp, inverse, like, product_gradients, row, slope
from .tensors import Tensors
from .text import Refused, within

Labels = Sequence[Hashable]


@row("parc.square_sum.default")
def _(c: Call) -> Value:
    return c.tensors.squares(c.args[0])


@row("parc.next_loss_scale.default")
def _(c: Call) -> tuple[Value, ...]:
    norm, scale, good, skipped, *numbers = c.args
    if numbers != [2.0, 0.5, 2000]:
        raise Refused(f"{c.line.op} by {numbers} has no rule")
    values = [norm, scale, good, skipped]
    return tuple(c.tensors.pointwise(f"next {name}", values) for name in ("loss_scale", "good_steps", "skipped_steps"))


# ---- products


def _names(c: Call) -> tuple[list[Value], list[Labels], Labels]:
    """Return the values of a product that its operator names no letters of, their labels and the result's."""
    if c.line.op == "aten.einsum.default":
        equation, values = c.args
        reads, arrow, result = equation.replace(" ", "").partition("->")
        if not arrow:
            raise Refused(f"{c.line.op} of `{equation}` has no rule")
        rows: list[Labels] = [_letters(part, len(x.dims)) for part, x in zip(reads.split(","), values, strict=True)]
        most = max(len([name for name in row if isinstance(name, int)]) for row in rows)
        return list(values), rows, _letters(result, len(result.replace("...", "")) + most)
    x, y = c.args[:2]
    if c.line.op == "aten.linear.default":
        return [x, y], [[*range(1 - len(x.dims), 0), "k"], "nk"], [*range(1 - len(x.dims), 0), "n"]
    rows = [[*range(2 - len(x.dims), 0), *"mk"[2 - min(len(x.dims), 2) :]],
            [*range(2 - len(y.dims), 0), *"kn"[: len(y.dims)]]]  # fmt: skip
    batch = range(2 - max(len(x.dims), len(y.dims), 2), 0)
    return [x, y], rows, [*batch, *"m" * (len(x.dims) > 1), *"n" * (len(y.dims) > 1)]


def _letters(labels: str, rank: int) -> list[Hashable]:
    """Return the labels of an operand of an einsum; those of ``...`` count from the last one back."""
    before, dots, behind = labels.partition("...")
    return [*before, *range(len(before) + len(behind) - rank, 0), *behind] if dots else list(labels)


@row("aten.matmul.default", "aten.einsum.default", "aten.linear.default")
def _(c: Call) -> Value:
    result = c.tensors.product(*_names(c))
    return c.tensors.plus(result, c.args[2]) if c.line.op == "aten.linear.default" and c.at(2) is not None else result


@slope("aten.matmul.default", "aten.einsum.default", "aten.linear.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    parts = product_gradients(c.tensors, g, *_names(c))
    bias = c.at(2) if c.line.op == "aten.linear.default" else None
    return parts if bias is None else [*parts, like(c.tensors, g, bias.shape)]


# ---- convolutions: products with ``window 0[p, k, y]``, which is 1 where place k of the window of entry y is p


def each_of(value: Any, count: int) -> list[int]:
    """Return an argument that is a number for all dims, or one for each."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _convolution(
    c: Call, x: Value, w: Value, stride: Any, padding: Any, dilation: Any, groups: int, beyond: Any = None
) -> tuple[list[Value], list[Labels], list[Hashable], tuple[int, ...]]:
    """Return what a convolution is a product of, with labels, those of its result by groups, and its shape. If it is
    transposed, its result is the longer one, by ``beyond`` places more than the windows reach."""
    t, rank = c.tensors, len(w.dims) - 2
    if len(x.dims) != rank + 2:
        raise Refused(f"{c.line.op} of {list(x.shape)} by {list(w.shape)} has no rule")
    kernel, strides, dilations = w.shape[2:], each_of(stride, rank), each_of(dilation, rank)
    reach = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    if padding == "same":
        padding = [each // 2 for each in reach]
        for at, each in enumerate(reach):  # one place more behind than before
            x = t.place(x, 2 + at, 0, x.shape[2 + at] + each % 2)
    around, places = each_of(0 if padding == "valid" else padding, rank), x.shape[2:]
    values = [
        t.reshape(x, (x.shape[0], groups, x.shape[1] // groups, *places)),
        t.reshape(w, (groups, w.shape[0] // groups, *w.shape[1:])),
    ]
    here, there, channels = ("p", "y", "oc") if beyond is None else ("y", "p", "co")
    rows: list[Labels] = [["b", "g", "c", *((here, at) for at in range(rank))],
                          ["g", *channels, *(("k", at) for at in range(rank))]]  # fmt: skip
    if x.shape[1] != (w.shape[1] * groups if beyond is None else w.shape[0]):
        raise Refused(f"{c.line.op} of {list(x.shape)} by {list(w.shape)} in {groups} groups")
    out = []
    for at, (size, k, s, d) in enumerate(zip(places, kernel, strides, dilations, strict=True)):
        if beyond is None:
            out.append((size + 2 * around[at] - reach[at] - 1) // s + 1)
        else:
            out.append((size - 1) * s - 2 * around[at] + reach[at] + each_of(beyond, rank)[at] + 1)
        windows = (size, k, out[at]) if beyond is None else (out[at], k, size)
        values.append(t.leaf(f"window {at}", windows, (s, around[at], d)))
        rows.append([("p", at), ("k", at), ("y", at)])
    result: list[Hashable] = ["b", "g", "o", *((there, at) for at in range(rank))]
    return values, rows, result, (x.shape[0], w.shape[0] if beyond is None else w.shape[1] * groups, *out)


def _convolution_gradients(c: Call, g: Value, x: Value, w: Value, *facts: Any) -> list[Value]:
    values, rows, result, shape = _convolution(c, x, w, *facts)
    groups = facts[3]
    by_group = c.tensors.reshape(g, (shape[0], groups, shape[1] // groups, *shape[2:]))
    parts = product_gradients(c.tensors, by_group, values, rows, result, 2)
    gx = c.tensors.reshape(parts[0], (*x.shape[:2], *values[0].shape[3:]))
    for dim, size in enumerate(x.shape):
        gx = c.tensors.part(gx, dim, 0, size)
    gw = c.tensors.reshape(parts[1], w.shape)
    return [gx, gw, c.tensors.total(g, [0, *range(2, len(shape))])]


_PLAIN = tuple(f"aten.conv{rank}d.{way}" for rank in (1, 2, 3) for way in ("default", "padding"))


@row(*_PLAIN, "aten.convolution.default")
def _(c: Call) -> Value:
    values, rows, result, shape = _convolution(c, *c.args[:2], *_facts(c))
    y = c.tensors.reshape(c.tensors.product(values, rows, result), shape)
    bias = c.at(2)
    return y if bias is None else c.tensors.plus(y, c.tensors.reshape(bias, (shape[1], *(1,) * (len(shape) - 2))))


def _facts(c: Call) -> tuple[Any, ...]:
    """Return stride, padding, dilation and groups of a convolution, and what is beyond the windows of a transposed
    one."""
    if c.line.op in _PLAIN:
        return c.at(3, 1), c.at(4, 0), c.at(5, 1), c.at(6, 1)
    at = 4 if "_backward" in c.line.op else 3
    stride, padding, dilation, transposed, beyond, groups = c.args[at : at + 6]
    if any(beyond) and not transposed:
        raise Refused(f"{c.line.op} with {beyond!r} beyond its windows has no rule")
    return stride, padding, dilation, groups, *([beyond] if transposed else [])


@slope(*_PLAIN, "aten.convolution.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return _convolution_gradients(c, g, *c.args[:2], *_facts(c))[: 2 if c.at(2) is None else 3]


@row("aten.convolution_backward.default")
def _(c: Call) -> tuple[Value, ...]:
    return _wanted(c, _convolution_gradients(c, *c.args[:3], *_facts(c)), c.args[10])


def _wanted(c: Call, parts: Sequence[Value], mask: Sequence[bool]) -> tuple[Value, ...]:
    """Return the gradients that a line asks for."""
    return tuple(part if want else c.tensors.table.zero for part, want in zip(parts, mask, strict=True))


# ---- lookups


def _marks(c: Call, index: Value, place: Value, skip: int = -1) -> tuple[Value, list[Hashable]]:
    """Return 1 where an index is a place and else 0, as [..., place]; 0 at the place ``skip``."""
    t = c.tensors
    names: list[Hashable] = list(range(len(index.dims)))
    marks = t.pointwise("eq", [t.unsqueeze(index, len(names)), place])
    if skip >= 0:
        marks = t.times(marks, t.pointwise("ne", [place, t.constant(skip)]))
    return marks, names


def _looked_up(c: Call, table: Value, index: Value, place: Value) -> Value:
    marks, names = _marks(c, index, place)
    return c.tensors.product([marks, table], [[*names, "v"], ["v", "d"]], [*names, "d"])


@row("aten.embedding.default")
def _(c: Call) -> Value:
    c.demand(3, False)
    c.demand(4, False)
    return _looked_up(c, c.args[0], c.args[1], c.places(c.args[0].shape[0]))


@row("parc.lookup.default")
def _(c: Call) -> Value:
    return _looked_up(c, c.args[0], c.args[1], c.position(0, c.types[0]))


def _put_back(c: Call, g: Value, index: Value, place: Value, padding: int) -> Value:
    marks, names = _marks(c, index, place, padding)
    return c.tensors.product([marks, g], [[*names, "v"], [*names, "d"]], "vd")


@slope("aten.embedding.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [_put_back(c, g, c.args[1], c.places(c.args[0].shape[0]), c.at(2, -1)), None]


@row("aten.embedding_dense_backward.default")
def _(c: Call) -> Value:
    g, index, count, padding, _ = c.args
    c.demand(4, False)
    return _put_back(c, g, index, c.places(count), padding)


@row("parc.lookup_backward.default")
def _(c: Call) -> Value:
    g, index, _, padding = c.args
    c.demand(2, c.line.types[0].local[0])
    return _put_back(c, g, index, c.position(0, c.line.types[0]), padding)


@row(
    "aten.index.Tensor", "aten._unsafe_index.Tensor", "aten.index_select.default", "aten.repeat_interleave.self_Tensor"
)
def _(c: Call) -> Value:
    c.kwargs.pop("output_size", None)
    return c.tensors.product(*_indexed(c, *_indices(c)))


@slope(
    "aten.index.Tensor", "aten._unsafe_index.Tensor", "aten.index_select.default", "aten.repeat_interleave.self_Tensor"
)
def _(c: Call, g: Value, y: Value) -> Gradients:
    x, indices = _indices(c)
    values, rows, result = _indexed(c, x, indices)
    (part,) = product_gradients(c.tensors, g, values, rows, result, 1)
    return [part, *(None for index in indices if index is not None)]


def _indices(c: Call) -> tuple[Value, list[Value | None]]:
    """Return what is indexed, and the numbers for each of its dims."""
    if c.line.op.startswith(("aten.index_select.", "aten.repeat_interleave.")):
        x, one, other = c.args
        dim, index = (other, _repeats(c, one)) if ".repeat_interleave." in c.line.op else (one, other)
        return x, [*[None] * (within(dim, len(x.dims))), index]
    if c.line.op.startswith(("aten.index_add.", "aten.index_copy.", "aten.index_fill.")):
        x, dim, index = c.args[:3]
        return x, [*[None] * (within(dim, len(x.dims))), index]
    x, indices = c.args[:2]
    return x, indices


@row("aten.repeat_interleave.Tensor", constant=True)
def _(c: Call) -> Value:
    c.kwargs.pop("output_size", None)
    return _repeats(c, c.args[0])


def _repeats(c: Call, counts: Value) -> Value:
    """Return the numbers of entries, each as often as it is repeated."""
    size = c.line.kwargs.get("output_size")
    if type(size) is not int:
        raise Refused(f"{c.line.op} to {size} entries has no rule")
    return c.tensors.opaque("repeated", (), [counts], [["r"]], ["out"], ["r"], {"out": size})


def _indexed(c: Call, x: Value, indices: Sequence[Value | None]) -> tuple[list[Value], list[Labels], list[Hashable]]:
    """Return what indexing by numbers is a product of, with labels: negative numbers count from the end."""
    t = c.tensors
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if dims != list(range(dims[0], dims[-1] + 1)) or _has_mask(c):
        raise Refused(f"{c.line.op} of such dims has no rule")
    used = [index for index in indices if index is not None]
    rank = max(len(index.dims) for index in used)
    values, rows = [x], [[("x", dim) for dim in range(len(x.dims))]]
    for dim, index in zip(dims, used, strict=True):
        size = x.shape[dim]
        last = t.unsqueeze(index, len(index.dims))
        marks = [t.pointwise("eq", [t.plus(last, t.constant(more)), c.places(size)]) for more in (0, size)]
        values.append(t.plus(*marks))
        rows.append([*range(rank - len(index.dims), rank), ("x", dim)])
    return values, list(rows), [*rows[0][: dims[0]], *range(rank), *rows[0][dims[-1] + 1 :]]


def _has_mask(c: Call) -> bool:
    """Return whether truth values are among the indices: those of a list, or the argument behind a dim."""
    listed_ = isinstance(c.args[1], list)
    return any(t.dtype == "bool" for at, t in c.types.items() if (isinstance(at, tuple) if listed_ else at == 2))


_PUTS = (
    "aten.index_put.default", "aten._unsafe_index_put.default", "aten.index_add.default", "aten.index_copy.default",
    "aten.index_fill.int_Scalar",
)  # fmt: skip


def _put(c: Call) -> tuple[Value, bool, Number]:
    """Return what is put at entries, whether it is added to them, as what is put at none may be too, and by how much it
    is multiplied."""
    none = any(index is not None and 0 in index.shape for index in _indices(c)[1])
    if ".index_put." in c.line.op or "._unsafe" in c.line.op:
        return c.args[2], c.at(3, False) or none, 1
    part = c.args[3] if isinstance(c.args[3], Value) else c.tensors.constant(number(c.args[3]))
    c.kwargs.pop("alpha", None)
    return part, ".index_add." in c.line.op or none, number(c.line.kwargs.get("alpha", 1))


@row(*_PUTS)
def _(c: Call) -> Value:
    t, (x, indices), (part, adds, by) = c.tensors, _indices(c), _put(c)
    if adds:
        values, rows, result = _indexed(c, x, indices)
        sizes: dict[Hashable, int] = {}
        for value, names in zip(values, rows, strict=True):
            sizes.update({name: size for name, size in zip(names, value.shape, strict=True) if size != 1})
        part = t.expand(part, [sizes.get(name, 1) for name in result])
        return t.plus(x, t.product([part, *values[1:]], [result, *rows[1:]], rows[0]), by=(1, by))
    last, flat, shape = _last(c, x, indices)
    if _has_mask(c):
        return t.plus(x, t.times(x, last), t.times(part, last), by=(1, -1, 1))
    whole = t.reshape(x, flat)
    kept = t.plus(whole, t.times(whole, _present(t, last)), by=(1, -1))
    part = t.reshape(t.expand(part, shape), (flat[0], math.prod(shape) // (flat[0] * flat[2]), flat[2]))
    marks = t.pointwise("eq", [t.unsqueeze(last, 1), c.places(part.shape[1])])
    return t.reshape(t.plus(kept, t.product([marks, part], ["tj", "bja"], "bta")), x.shape)


def _present(t: Tensors, last: Value) -> Value:
    return t.unsqueeze(t.pointwise("ge", [last, t.constant(0)]), 1)


def _last(c: Call, x: Value, indices: Sequence[Value | None]) -> tuple[Value, list[int], list[int]]:
    """Return the number of the last of some entries that is put at each, -1 where none is; the shape of what these are
    put in, with the indexed dims as one, and of what is put. Of a mask return itself."""
    t, shape = c.tensors, x.shape
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    used = [index for index in indices if index is not None]
    if dims != list(range(dims[0], dims[-1] + 1)):
        raise Refused(f"{c.line.op} of such dims has no rule")
    if _has_mask(c):
        if len(indices) > 1 or any(part.dims for part in c.args[2:3] if isinstance(part, Value)):
            raise Refused(f"{c.line.op} of several values at a mask has no rule")
        mask = used[0]
        return t.reshape(mask, (*mask.shape, *[1] * (len(shape) - len(mask.dims)))), [], []
    row = t.constant(0)
    for dim, index in zip(dims, used, strict=True):
        below = t.pointwise("lt", [index, t.constant(0)])
        row = t.plus(row, index, below, by=(shape[dim], 1, shape[dim]))
    before, size, behind = shape[: dims[0]], math.prod(shape[dim] for dim in dims), shape[dims[-1] + 1 :]
    asked = t.reshape(row, (math.prod(row.shape),))
    last = t.opaque("last of", (), [asked], [["j"]], ["t"], ["j"], {"t": size})
    return last, [math.prod(before), size, math.prod(behind)], [*before, *row.shape, *behind]


@slope(*_PUTS)
def _(c: Call, g: Value, y: Value) -> Gradients:
    t, (x, indices), (part, adds, by) = c.tensors, _indices(c), _put(c)
    none = [None for index in indices if index is not None]
    if _has_mask(c):
        mask, _, _ = _last(c, x, indices)
        of_part = like(t, t.times(g, mask), part.shape)
    else:
        values, rows, result = _indexed(c, g, indices)
        of_part = t.scaled(like(t, t.product(values, rows, result), part.shape), by)
    if adds:
        return [g, *none, of_part]
    if not _has_mask(c):
        last, flat, _ = _last(c, x, indices)
        mask = t.expand(_present(t, last), flat)
        mask = t.reshape(mask, x.shape)
    return [t.plus(g, t.times(g, mask), by=(1, -1)), *none, *([of_part] if isinstance(c.args[-1], Value) else [])]


@row("aten.one_hot.default", constant=True)
def _(c: Call) -> Value:
    x, count = c.args
    return c.tensors.pointwise("eq", [c.tensors.unsqueeze(x, len(x.dims)), c.places(count)])


# ---- losses


def _parts_of_loss(c: Call, x: Value, peak: Value, targets: Value, place: Value) -> tuple[Value, Value, Value, Value]:
    """Return the exponentials of logits, marks of the targets, the sum of the one, and the logit of the other."""
    t = c.tensors
    below = t.plus(x, peak, by=(1, -1))
    exponentials = exp(t, below)
    marks, _ = _marks(c, targets, place)
    return exponentials, marks, t.total(exponentials, [1]), t.total(t.times(marks, below), [1])


@row("parc.token_loss.default")
def _(c: Call) -> Value:
    t, (x, targets, ignore) = c.tensors, c.args
    _, _, total, target = _parts_of_loss(c, x, t.largest(x, [1], True), targets, c.places(x.shape[1]))
    loss = t.plus(t.pointwise("log", [total]), target, by=(1, -1))
    return t.times(loss, t.pointwise("ne", [targets, t.constant(ignore)]))


@slope("parc.token_loss.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    t, (x, targets, ignore) = c.tensors, c.args
    exponentials, marks, total, _ = _parts_of_loss(c, x, t.largest(x, [1], True), targets, c.places(x.shape[1]))
    g = t.unsqueeze(t.times(g, t.pointwise("ne", [targets, t.constant(ignore)])), 1)
    share = t.times(exponentials, inverse(t, t.unsqueeze(total, 1)))
    return [t.plus(t.times(g, share), t.times(g, marks), by=(1, -1)), None]


@row("parc.row_max")
def _(c: Call) -> Value:
    x, axes = c.args
    if (padded := real_entries(c, x, c.types[0])) is not None:
        return c.tensors.largest(padded[0], [len(x.dims) - 1], True)
    return c.tensors.largest(x, [len(x.dims) - 1], True, c.axes(axes))


def _entries_of_loss(c: Call, at: int) -> tuple[Value, Value, Value]:
    """Return, for the logits at a position among operands: exponentials, marks of the targets, and the marked logits
    below the largest, each on a rank's part of the classes."""
    t, (x, peak, targets) = c.tensors, c.args[at : at + 3]
    padded = real_entries(c, x, c.types[at])
    real, place = (x, c.position(1, c.types[at])) if padded is None else (padded[0], c.places(padded[0].shape[1]))
    below = t.plus(real, peak, by=(1, -1))
    exponentials, (marks, _) = exp(t, below), _marks(c, targets, place)
    entries = exponentials, marks, t.times(marks, below)
    return entries if padded is None else tuple(map(padded[1], entries))  # type: ignore[return-value]


@row("parc.loss_parts.default")
def _(c: Call) -> Value:
    t, (exponentials, _, below) = c.tensors, _entries_of_loss(c, 0)
    return t.cat([t.unsqueeze(t.total(each, [1]), 0) for each in (exponentials, below)], 0)


@row("parc.loss_parts_backward.default")
def _(c: Call) -> Value:
    t, g, (exponentials, marks, _) = c.tensors, c.args[0], _entries_of_loss(c, 1)
    to_sum, to_target = (t.unsqueeze(t.select(g, 0, at), 1) for at in (0, 1))
    return t.plus(t.times(to_sum, exponentials), t.times(to_target, marks))


# ---- norms


def _demand_last(c: Call, x: Value, shape: Sequence[int]) -> None:
    """Refuse other sizes of the last dims than a value has."""
    if x.shape[len(x.dims) - len(shape) :] != tuple(shape):
        raise Refused(f"{c.line.op} of {list(shape)} reads {list(x.shape)}")


def _norm(c: Call, x: Value, shape: Sequence[int], eps: float) -> tuple[Value, Value]:
    """Return the mean and the inverse deviation of the last dims, which a layer norm sees whole."""
    t, first = c.tensors, len(x.dims) - len(shape)
    _demand_last(c, x, shape)
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


def _layer_norm(c: Call) -> tuple[Value, Sequence[int], Value | None, Value | None, float]:
    """Return the arguments of a layer norm; how it is computed is none of them."""
    return c.args[0], c.args[1], c.at(2), c.at(3), c.at(4, 1e-5)


@row("aten.layer_norm.default")
def _(c: Call) -> Value:
    x, shape, weight, bias, eps = _layer_norm(c)
    mean, deviation = _norm(c, x, shape, eps)
    return _weighted(c.tensors, _normalised(c, x, mean, deviation), weight, bias)


def _norm_gradients(
    c: Call, g: Value, x: Value, mean: Value, deviation: Value, weight: Value | None, count: int, shape: Sequence[int]
) -> tuple[Value, Value, Value]:
    """Return the gradients of the operand of a norm of the last dims, ``count`` of them, and of its weight and bias of
    a shape."""
    t, inner = c.tensors, range(len(x.dims) - count, len(x.dims))
    normal = _normalised(c, x, mean, deviation)
    inside = g if weight is None else t.times(g, weight)
    average = t.total(inside, inner, keep=True)
    along = t.total(t.times(inside, normal), inner, keep=True)
    share = Fraction(-1) / math.prod(x.shape[-count:])
    gx = t.times(deviation, t.plus(inside, average, t.times(normal, along), by=(1, share, share)))
    return gx, like(t, t.times(g, normal), shape), like(t, g, shape)


@row("aten.native_layer_norm_backward.default")
def _(c: Call) -> tuple[Value, ...]:
    g, x, shape, mean, deviation, weight, _, wanted = c.args
    _demand_last(c, x, shape)
    return _wanted(c, _norm_gradients(c, g, x, mean, deviation, weight, len(shape), shape), wanted)


@slope("aten.layer_norm.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    x, shape, weight, bias, eps = _layer_norm(c)
    gx, gw, gb = _norm_gradients(c, g, x, *_norm(c, x, shape, eps), weight, len(shape), shape)
    return [gx, *([gw] if weight is not None else []), *([gb] if bias is not None else [])]


def _by_groups(c: Call, x: Value, groups: int, *others: Value | None) -> list[Any]:
    """Return [b, channels, ...] as [b, group, channel, place], and weights of the channels to go with it."""
    t, (b, channels, *places) = c.tensors, x.shape
    whole = t.reshape(x, (b, groups, channels // groups, math.prod(places)))
    return [whole, *(w if w is None else t.reshape(w, (groups, channels // groups, 1)) for w in others)]


def _group_norm(c: Call, x: Value, weight: Value | None, bias: Value | None, groups: int, eps: float) -> list[Value]:
    whole, by_channel, more = _by_groups(c, x, groups, weight, bias)
    mean, deviation = _norm(c, whole, whole.shape[2:], eps)
    y = c.tensors.reshape(_weighted(c.tensors, _normalised(c, whole, mean, deviation), by_channel, more), x.shape)
    return [y, mean, deviation]


def _group_norm_gradients(
    c: Call, g: Value, x: Value, mean: Value, deviation: Value, weight: Value | None, groups: int
) -> list[Value]:
    whole, by_channel = _by_groups(c, x, groups, weight)
    (wide,) = _by_groups(c, g, groups)
    shape = (groups, x.shape[1] // groups, 1)
    gx, gw, gb = _norm_gradients(c, wide, whole, mean, deviation, by_channel, 2, shape)
    return [c.tensors.reshape(gx, x.shape), *(c.tensors.reshape(part, (x.shape[1],)) for part in (gw, gb))]


def _demand_sizes(c: Call, x: Value, sizes: Sequence[int]) -> None:
    """Refuse other numbers of rows, channels and places than a value has."""
    if tuple(sizes) != (*x.shape[:2], math.prod(x.shape[2:])):
        raise Refused(f"{c.line.op} of {list(sizes)} reads {list(x.shape)}")


@row("aten.group_norm.default")
def _(c: Call) -> Value:
    x, groups = c.args[:2]
    return _group_norm(c, x, c.at(2), c.at(3), groups, c.at(4, 1e-5))[0]


@slope("aten.group_norm.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    x, groups = c.args[:2]
    _, mean, deviation = _group_norm(c, x, c.at(2), c.at(3), groups, c.at(4, 1e-5))
    gx, *others = _group_norm_gradients(c, g, x, mean, deviation, c.at(2), groups)
    return [gx, *(part for part, of in zip(others, (c.at(2), c.at(3)), strict=True) if of is not None)]


@row("aten.native_group_norm.default")
def _(c: Call) -> tuple[Value, ...]:
    x, weight, bias, *sizes, groups, eps = c.args
    _demand_sizes(c, x, sizes)
    y, *both = _group_norm(c, x, weight, bias, groups, eps)
    return y, *(c.tensors.squeeze(value, [2, 3]) for value in both)


@row("aten.native_group_norm_backward.default")
def _(c: Call) -> tuple[Value, ...]:
    t, (g, x, mean, deviation, weight, *sizes, groups, wanted) = c.tensors, c.args
    _demand_sizes(c, x, sizes)
    mean, deviation = (t.reshape(value, (*value.shape, 1, 1)) for value in (mean, deviation))
    return _wanted(c, _group_norm_gradients(c, g, x, mean, deviation, weight, groups), wanted)


def _square_norm(c: Call) -> tuple[Value, Value, Value | None, int]:
    """Return what an rms norm normalises, the inverse root of its mean square, its weight, and how many dims."""
    t, x, shape, eps = c.tensors, c.args[0], c.args[1], c.at(3)
    if eps is None:
        raise Refused(f"{c.line.op} without an eps has no rule")
    dims = range(len(x.dims) - len(shape), len(x.dims))
    _demand_last(c, x, shape)
    mean = t.scaled(t.total(t.times(x, x), dims, keep=True), Fraction(1, math.prod(shape)))
    return x, t.pointwise("rsqrt", [t.plus(mean, t.constant(number(eps)))]), c.at(2), len(shape)


@row("aten.rms_norm.default")
def _(c: Call) -> Value:
    x, root, weight, _ = _square_norm(c)
    return _weighted(c.tensors, c.tensors.times(x, root), weight, None)


@slope("aten.rms_norm.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    t, (x, root, weight, count) = c.tensors, _square_norm(c)
    inside = g if weight is None else t.times(g, weight)
    along = t.total(t.times(inside, x), range(len(x.dims) - count, len(x.dims)), keep=True)
    share = Fraction(-1, math.prod(x.shape[-count:]))
    gx = t.plus(t.times(inside, root), t.times(x, along, root, root, root), by=(1, share))
    return [gx, *([] if weight is None else [like(t, t.times(g, x, root), weight.shape)])]
