"""Rows of what moves entries: types, views, creation, and what is placed or found along a dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from .letters import Instead, number
from .meaning import Value
from .rows import FLOATS, ROWS, WHOLE, Call, Gradients, demand_type, demand_whole, like, listed, row, slope
from .tensors import Tensors
from .text import Refused, within

# ---- types


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
    dtype, have = c.kwargs.pop("dtype").text, c.types[0].dtype
    wider = have in WHOLE and dtype in _WIDER[WHOLE.index(have) :] and (have, dtype) != ("u8", "torch.int8")
    if dtype in FLOATS or wider:
        return c.operand(0)
    return c.tensors.pointwise("whole", [c.args[0]], dtype)


_WIDER = ("torch.bool", "torch.uint8", "torch.int8", "torch.int16", "torch.int32", "torch.int64")


@slope("aten._to_copy.default", "aten.clone.default", "aten.alias.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [g]


# ---- views


@row("aten.reshape.default", "aten.view.default")
def _(c: Call) -> Value:
    return c.tensors.reshape(*c.args)


@slope("aten.reshape.default", "aten.view.default", "aten.unsqueeze.default", "aten.squeeze.default",
       "aten.squeeze.dim", "aten.squeeze.dims")  # fmt: skip
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
    return c.tensors.permute(x, [within(dim, len(order)) for dim in order])


@slope("aten.permute.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    order = [within(dim, len(c.args[1])) for dim in c.args[1]]
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


@row("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
def _(c: Call) -> Value:
    x = c.args[0]
    return c.tensors.squeeze(x, listed(c.at(1), len(x.dims)))


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


def _without(t: Tensors, x: Value, dim: int, start: int, size: int, step: int = 1) -> Value:
    """Return a value with zeros in the place of some entries."""
    return t.plus(x, t.place(t.part(x, dim, start, size, step), dim, start, x.shape[dim], step), by=(1, -1))


@row("aten.slice_scatter.default")
def _(c: Call) -> Value:
    x, part, dim, step = c.args[0], c.args[1], c.at(2, 0), c.at(5, 1)
    start, size = _bounds(x.shape[dim], c.at(3), c.at(4), step)
    if size != part.shape[dim]:
        raise Refused(f"{part.shape[dim]} entries are put in the place of {size}")
    new = c.tensors.place(part, dim, start, x.shape[dim], step)
    return c.tensors.plus(_without(c.tensors, x, dim, start, size, step), new)


@slope("aten.slice_scatter.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    dim, step = c.at(2, 0), c.at(5, 1)
    start, size = _bounds(g.shape[dim], c.at(3), c.at(4), step)
    return [_without(c.tensors, g, dim, start, size, step), c.tensors.part(g, dim, start, size, step)]


@row("aten.select_scatter.default")
def _(c: Call) -> Value:
    x, part, dim, at = c.args
    dim, at = within(dim, len(x.dims)), within(at, x.shape[dim])
    return c.tensors.plus(_without(c.tensors, x, dim, at, 1), _put(c.tensors, part, dim, at, x.shape[dim]))


@slope("aten.select_scatter.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    dim = within(c.args[2], len(g.dims))
    at = within(c.args[3], g.shape[dim])
    return [_without(c.tensors, g, dim, at, 1), c.tensors.select(g, dim, at)]


@row("aten.select.int")
def _(c: Call) -> Value:
    return c.tensors.select(*c.args)


@slope("aten.select.int")
def _(c: Call, g: Value, y: Value) -> Gradients:
    x, dim, at = c.args
    return [_put(c.tensors, g, within(dim, len(x.dims)), within(at, x.shape[dim]), x.shape[dim])]


def _put(t: Tensors, g: Value, dim: int, at: int, size: int) -> Value:
    return t.place(t.unsqueeze(g, dim), dim, at, size)


@row("aten.select_backward.default")
def _(c: Call) -> Value:
    g, shape, dim, at = c.args
    return _put(c.tensors, g, within(dim, len(shape)), within(at, shape[dim]), shape[dim])


def _parts(c: Call) -> tuple[int, list[int]]:
    """Return the dim of a split, and the sizes of its parts."""
    x, sizes, dim = c.args[0], c.args[1], c.at(2, 0)
    whole = x.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)]
    if sum(sizes) != whole:
        raise Refused(f"a dim of {whole} is split into {sizes}")
    return dim, list(sizes)


_SPLITS = tuple(f"aten.{safe}{op}" for safe in ("", "unsafe_") for op in ("split.Tensor", "split_with_sizes.default"))


@row(*_SPLITS)
def _(c: Call) -> tuple[Value, ...]:
    dim, sizes = _parts(c)
    return tuple(c.tensors.part(c.args[0], dim, sum(sizes[:at]), size) for at, size in enumerate(sizes))


@slope(*_SPLITS)
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


@row("aten.unbind.int")
def _(c: Call) -> tuple[Value, ...]:
    x, dim = c.args[0], c.at(1, 0)
    return tuple(c.tensors.select(x, dim, at) for at in range(x.shape[dim]))


@slope("aten.unbind.int")
def _(c: Call, g: Value, y: Value) -> Gradients:
    x, (dim,), t = c.args[0], listed(c.at(1, 0), len(c.args[0].dims)), c.tensors
    return [t.plus(*(_put(t, g, dim, at, x.shape[dim]) for at, g in enumerate(c.grads) if g is not None))]


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
    dtype, fill = c.kwargs.pop("dtype").text, number(c.args[1])
    if dtype not in FLOATS and (not isinstance(fill, int) or (dtype == "torch.bool" and fill not in (0, 1))):
        raise Refused(f"{c.line.op} of {fill} in {dtype} has no rule")
    return c.tensors.constant(fill, c.args[0])


@row("parc.iota.default", "aten.arange.default", "aten.arange.start", "aten.arange.start_step", constant=True)
def _(c: Call) -> Value:
    if c.line.op == "parc.iota.default":
        (size, start, step, dtype), local = c.args, c.line.types[0].local[0]
    else:
        start, end = (0, c.args[0]) if len(c.args) == 1 else c.args[:2]
        step, dtype, local = c.at(2, 1), c.kwargs.pop("dtype"), c.line.types[0].local[0]
        demand_whole(c, c.line.types[0], 0)
        size = math.ceil((number(end) - number(start)) / Fraction(number(step)))
    start, step = number(start), number(step)
    if size != local or (dtype.text not in FLOATS and not (isinstance(start, int) and isinstance(step, int))):
        raise Refused(f"{c.line.op} of other entries than its type says")
    return c.tensors.plus(c.position(0, c.line.types[0]), c.tensors.constant(start), by=(step, 1))


@row("aten.linspace.default", constant=True)
def _(c: Call) -> Value:
    (start, end), count, dtype = map(number, c.args[:2]), c.args[2], c.kwargs.pop("dtype")
    demand_whole(c, c.line.types[0], 0)
    if dtype.text not in FLOATS or count < 2:
        raise Refused(f"{c.line.op} of {count} in {dtype.text} has no rule")
    step = Fraction(end - start) / (count - 1)
    return c.tensors.plus(c.places(count), c.tensors.constant(start), by=(step, 1))


@row("aten.eye.default", "aten.eye.m", constant=True)
def _(c: Call) -> Value:
    c.kwargs.pop("dtype")
    demand_whole(c, c.line.types[0], 0, 1)
    return c.tensors.leaf("delta", (c.args[0], c.at(1, c.args[0])), (), (0, 0))


@row("parc.stream_key.default", constant=True)
def _(c: Call) -> Value:
    rng, name, seed = c.args
    return c.tensors.opaque("stream", (name, seed), [rng], [["n"]], [], ["n"])


@row("parc.dropout_mask.default", constant=True)
def _(c: Call) -> Value:
    key, shape, chance, _ = c.args
    return _drawn(c, key, shape, ("dropout", number(chance)))


@row("parc.random.default", constant=True)
def _(c: Call) -> Value:
    key, shape, kind, dtype = c.args
    return _drawn(c, key, shape, (kind, dtype.text))


def _drawn(c: Call, key: Value, shape: Sequence[int], facts: tuple[Any, ...]) -> Value:
    """Return what a generator draws for each entry of a whole value, by a key and the entry's place."""
    type_ = c.line.types[0]
    if tuple(shape) != type_.local:
        raise Refused(f"{c.line.op} draws {shape}, and its type says {list(type_.local)}")
    return c.tensors.pointwise("drawn", [key, *c.positions(type_)], (*facts, type_.shape))


# ---- along dims


@row("aten.triu.default", "aten.tril.default")
def _(c: Call) -> Value:
    return c.tensors.times(c.args[0], _triangle(c))


@slope("aten.triu.default", "aten.tril.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [c.tensors.times(g, _triangle(c))]


def _triangle(c: Call) -> Value:
    """Return 1 in the triangle that an operator keeps of the last two dims, else 0."""
    t, (rows, columns) = c.tensors, map(c.places, c.args[0].shape[-2:])
    beyond = t.plus(columns, t.unsqueeze(rows, 1), by=(1, -1))
    return t.pointwise("ge" if ".triu." in c.line.op else "le", [beyond, t.constant(c.at(1, 0))])


@row("aten.repeat.default")
def _(c: Call) -> Value:
    x, times = c.args
    shape = (*(1,) * (len(times) - len(x.dims)), *x.shape)
    wide = c.tensors.reshape(x, [size for each in shape for size in (1, each)])
    wide = c.tensors.expand(wide, [size for pair in zip(times, shape, strict=True) for size in pair])
    return c.tensors.reshape(wide, [count * size for count, size in zip(times, shape, strict=True)])


@slope("aten.repeat.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    x, times = c.args
    shape = (*(1,) * (len(times) - len(x.dims)), *x.shape)
    each = c.tensors.reshape(g, [size for pair in zip(times, shape, strict=True) for size in pair])
    return [c.tensors.reshape(c.tensors.total(each, range(0, 2 * len(shape), 2)), x.shape)]


@row("aten.flip.default")
def _(c: Call) -> Value:
    return flip(c.tensors, *c.args)


def flip(t: Tensors, x: Value, dims: Sequence[int]) -> Value:
    """Return a value with the entries of some dims in reverse."""
    _, letters, sizes = t.table.letters(x)
    gone = {letter for dim in listed(dims, len(x.dims)) for letter in letters[dim]}
    index = Instead({letter: (sizes[letter] - 1, ((letter, -1),)) for letter in gone})
    return t.view(x, letters, index, sizes)


@slope("aten.flip.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [flip(c.tensors, g, c.args[1])]


@row("aten.roll.default")
def _(c: Call) -> Value:
    return _rolled(c, c.args[0], 1)


@slope("aten.roll.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [_rolled(c, g, -1)]


def _rolled(c: Call, x: Value, sign: int) -> Value:
    """Return a value with the last entries of some dims before the first; of all together where none is named."""
    t, shape, shifts, dims = c.tensors, x.shape, c.args[1], c.at(2, [])
    if not dims:
        x, dims = t.reshape(x, (math.prod(shape),)), [0]
    dims = listed(dims, len(x.dims))
    if len(set(dims)) < len(dims):
        raise Refused(f"{c.line.op} of one dim twice has no rule")
    names: list[Any] = [("from" if at in dims else "stays", at) for at in range(len(x.dims))]
    leaves = [t.leaf("rolled", (size, size), (sign * shift % size,))
              for size, shift in zip([x.shape[dim] for dim in dims], shifts, strict=True)]  # fmt: skip
    rows = [[("from", dim), ("stays", dim)] for dim in dims]
    return t.reshape(t.product([x, *leaves], [names, *rows], [("stays", at) for at in range(len(names))]), shape)


@row("aten.diff.default")
def _(c: Call) -> Value:
    c.demand(1, 1)
    x, (dim,) = c.args[0], listed(c.at(2, -1), len(c.args[0].dims))
    after, before = (c.tensors.part(x, dim, start, x.shape[dim] - 1) for start in (1, 0))
    return c.tensors.plus(after, before, by=(1, -1))


@slope("aten.diff.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    (dim,), size = listed(c.at(2, -1), len(g.dims)), g.shape[c.at(2, -1)] + 1
    return [c.tensors.plus(*(c.tensors.place(g, dim, start, size) for start in (1, 0)), by=(1, -1))]


@row("aten.glu.default")
def _(c: Call) -> Value:
    one, gate = _halves(c, c.args[0], c.at(1, -1))
    return c.tensors.times(one, c.tensors.pointwise("sigmoid", [gate]))


def _halves(c: Call, x: Value, dim: int) -> list[Value]:
    half = x.shape[dim] // 2
    return [c.tensors.part(x, dim, start, half) for start in (0, half)]


def _of_halves(c: Call, g: Value, x: Value, dim: int) -> Value:
    """Return the gradient of a value of which one half gates the other."""
    t, (one, gate) = c.tensors, _halves(c, x, dim)
    open_ = t.pointwise("sigmoid", [gate])
    return t.cat([t.times(g, open_), t.times(t.plus(t.constant(1), open_, by=(1, -1)), open_, g, one)], dim)


@slope("aten.glu.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [_of_halves(c, g, c.args[0], c.at(1, -1))]


@row("aten.glu_backward.default")
def _(c: Call) -> Value:
    return _of_halves(c, *c.args)


@row("aten.diagonal.default")
def _(c: Call) -> Value:
    t, x = c.tensors, c.args[0]
    one, other, size, starts = _diagonal(x.shape, c.at(1, 0), c.at(2, 0), c.at(3, 1))
    x = t.part(t.part(x, one, starts[0], size), other, starts[1], size)
    names = ["both" if at in (one, other) else at for at in range(len(x.dims))]
    return t.product([x], [names], [*(name for name in names if name != "both"), "both"])


def _diagonal(shape: Sequence[int], offset: int, one: int, other: int) -> tuple[int, int, int, tuple[int, int]]:
    """Return the two dims of a diagonal, its size, and where it begins along each."""
    one, other = listed([one, other], len(shape))
    starts = max(-offset, 0), max(offset, 0)
    return one, other, min(shape[one] - starts[0], shape[other] - starts[1]), starts


def _on_diagonal(c: Call, g: Value, shape: Sequence[int], *facts: int) -> Value:
    t, (one, other, size, starts) = c.tensors, _diagonal(shape, *facts)
    names: list[Any] = [name for name in range(len(shape)) if name not in (one, other)]
    if g.shape != (*(shape[name] for name in names), size):
        raise Refused(f"a gradient of {list(g.shape)} is put back to {list(shape)}")
    same = t.leaf("delta", (size, size), (), (0, 0))
    g = t.product([g, same], [[*names, one], [one, other]], range(len(shape)))
    return t.place(t.place(g, one, starts[0], shape[one]), other, starts[1], shape[other])


@slope("aten.diagonal.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [_on_diagonal(c, g, c.args[0].shape, c.at(1, 0), c.at(2, 0), c.at(3, 1))]


@row("aten.diagonal_backward.default")
def _(c: Call) -> Value:
    return _on_diagonal(c, *c.args)


@row("aten.cumsum.default")
def _(c: Call) -> Value:
    demand_type(c, c.kwargs.pop("dtype", None))
    return running(c.tensors, *c.args)


@slope("aten.cumsum.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    t, dim = c.tensors, c.args[1]
    return [flip(t, running(t, flip(t, g, [dim]), dim), [dim])]


def running(t: Tensors, x: Value, dim: int) -> Value:
    """Return the sum of all entries of a dim up to each."""
    if not x.dims or x.shape[dim] == 1:
        return x
    size, labels = x.shape[dim], list[Any](range(len(x.dims)))
    until = t.leaf("not after", (size, size), (), (0, 0))
    result = [*labels]
    result[dim] = "until"
    return t.product([x, until], [labels, ["until", labels[dim]]], result)


@row("aten.constant_pad_nd.default")
def _(c: Call) -> Value:
    x, pad = c.args[:2]
    fill = number(c.at(2, 0))
    y = _padded(c.tensors, x, pad)
    if not fill:
        return y
    inside = _padded(c.tensors, c.tensors.constant(1, x.shape), pad)
    rest = c.tensors.plus(c.tensors.constant(1), inside, by=(1, -1))
    return c.tensors.plus(y, c.tensors.times(rest, c.tensors.constant(fill)))


@slope("aten.constant_pad_nd.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [_padded(c.tensors, g, [-each for each in c.args[1]])]


def _padded(t: Tensors, x: Value, pad: Sequence[int]) -> Value:
    """Return a value with zeros before and behind the entries of its last dims, or without some of these."""
    for at in range(0, len(pad), 2):
        dim, (low, high) = len(x.dims) - 1 - at // 2, pad[at : at + 2]
        size = x.shape[dim]
        x = t.part(x, dim, max(-low, 0), size - max(-low, 0) - max(-high, 0))
        low, high = max(low, 0), max(high, 0)
        x = t.place(x, dim, low, x.shape[dim] + low + high)
    return x


# ---- windows


@row("aten.unfold.default")
def _(c: Call) -> Value:
    x, dim, size, step = c.args
    (dim,) = listed(dim, len(x.dims))
    return c.tensors.picked(x, dim, 0, ((x.shape[dim] - size) // step + 1, step), (size, 1))


def _folded(c: Call, g: Value, whole: int, dim: int, size: int, step: int) -> Value:
    """Return the sum of all windows that have an entry of a dim."""
    names: list[Any] = list(range(len(g.dims) - 1))
    (dim,) = listed(dim, len(names))
    windows = c.tensors.leaf("window 0", (whole, size, g.shape[dim]), (step, 0, 1))
    result = ["entry" if name == dim else name for name in names]
    return c.tensors.product([g, windows], [[*names, "k"], ["entry", "k", dim]], result)


@slope("aten.unfold.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    x, dim, *facts = c.args
    return [_folded(c, g, x.shape[dim], dim, *facts)]


@row("aten.unfold_backward.default")
def _(c: Call) -> Value:
    g, shape, dim, *facts = c.args
    (dim,) = listed(dim, len(shape))
    if (*g.shape[:dim], *g.shape[dim + 1 : -1]) != (*shape[:dim], *shape[dim + 1 :]) or g.shape[-1] != facts[0]:
        raise Refused(f"a gradient of {list(g.shape)} is put back to {list(shape)}")
    return _folded(c, g, shape[dim], dim, *facts)
