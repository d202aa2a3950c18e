"""Strategies that draw valid calls of the operators that move, cut, make or look up elements."""

from typing import Any

import torch

from .op_cases import Draw, Maker, named

# ---- views


def _regrouped(g: Draw) -> tuple[Any, ...]:
    total = g.pick(24, 36, 48, 72)
    return g.n(*g.regrouped(total)), g.regrouped(total)


def _flatten(g: Draw) -> tuple[Any, ...]:
    x = g.x()
    start = g.pick(*range(x.dim()))
    return x, start, g.pick(*range(start, x.dim()))


def _unflatten(g: Draw) -> tuple[Any, ...]:
    x = g.x()
    dim = g.dim(x.dim())
    return x, dim, g.regrouped(x.shape[dim])


def _expand(g: Draw) -> tuple[Any, ...]:
    shape = g.shape(1)
    return g.n(*g.narrowed(shape)), list(shape)


def _two_dims(g: Draw) -> tuple[Any, ...]:
    x = g.x(2)
    return x, g.dim(x.dim()), g.dim(x.dim())


def _permute(g: Draw) -> tuple[Any, ...]:
    x = g.x()
    return x, g.order(x.dim())


def _movedim(g: Draw) -> tuple[Any, ...]:
    x = g.x(3)
    a, b = g.order(3), g.order(3)
    return x, a[:2], b[:2]


def _squeezable(g: Draw) -> torch.Tensor:
    return g.n(*(g.pick(1, 6, 1, 2) for _ in range(3)))


def _repeat(g: Draw) -> tuple[Any, ...]:
    x = g.n(*g.shape(1, 2))
    return x, [g.pick(1, 2, 6) for _ in range(x.dim() + g.pick(0, 1))]


def _interleave(g: Draw) -> tuple[Any, ...]:
    x = g.n(*g.shape(1, 2))
    times = g.pick(1, 2, 3, 6)
    if g.flag():
        dim = g.dim(x.dim())
        sized = {"output_size": x.shape[dim] * times} if g.flag() else {}
        return x, times, dim, sized
    return x, times


VIEWS: dict[str, Maker] = {
    **named("view _unsafe_view reshape", _regrouped),
    **named("flatten.using_ints", _flatten),
    **named("unflatten.int", _unflatten),
    **named("expand", _expand),
    **named("expand_as", lambda g: (lambda x, shape: (x, g.n(*shape)))(*_expand(g))),
    **named("transpose.int swapaxes movedim.int", _two_dims),
    **named("t", lambda g: (g.n(*g.shape(0, 2)),)),
    **named("mT", lambda g: (g.x(2),)),
    **named("permute", _permute),
    **named("movedim.intlist", _movedim),
    **named("unsqueeze", lambda g: (lambda x: (x, g.dim(x.dim() + 1)))(g.x(0))),
    **named("squeeze", lambda g: (_squeezable(g),)),
    **named("squeeze.dim", lambda g: (_squeezable(g), g.dim(3))),
    **named("squeeze.dims", lambda g: (_squeezable(g), g.dims(3))),
    **named("repeat", _repeat),
    **named("repeat_interleave.self_int", _interleave),
}


# ---- cutting and joining


def _span(g: Draw) -> tuple[tuple[int, ...], int, Any, Any, int]:
    """Draw a shape, and a dim, start, end and step of a slice that is not empty."""
    shape = g.shape(1)
    dim = g.dim(len(shape))
    size = shape[dim]
    piece = g.pick(*(d for d in range(1, size + 1) if size % d == 0))
    start = g.pick(*range(0, size, piece))
    end = g.pick(*range(start + piece, size + 1, piece), 2**63 - 1)
    if g.flag() and start:
        start -= size
    step = g.pick(1, 1, 1, 2, 3)
    return shape, dim, start, end, step


def _slice(g: Draw) -> tuple[Any, ...]:
    shape, dim, start, end, step = _span(g)
    return g.n(*shape), dim, g.pick(start, start, None), g.pick(end, end, None), step


def _slice_backward(g: Draw) -> tuple[Any, ...]:
    shape, dim, start, end, step = _span(g)
    grad = torch.ops.aten.slice.Tensor(g.n(*shape), dim, start, end, step)
    return grad, list(shape), dim, start, end, step


def _slice_scatter(g: Draw) -> tuple[Any, ...]:
    shape, dim, start, end, step = _span(g)
    return g.n(*shape), torch.ops.aten.slice.Tensor(g.n(*shape), dim, start, end, step), dim, start, end, step


def _split(g: Draw) -> tuple[Any, ...]:
    x = g.x()
    dim = g.dim(x.dim())
    return x, g.pick(*range(1, x.shape[dim] + 2)), dim


def _split_sizes(g: Draw) -> tuple[Any, ...]:
    sizes = [g.pick(6, 12, 2, 3) for _ in range(g.pick(1, 2, 3))]
    shape = list(g.shape(0, 2))
    dim = g.pick(*range(len(shape) + 1))
    shape.insert(dim, sum(sizes))
    return g.n(*shape), sizes, dim


def _cat(g: Draw) -> tuple[Any, ...]:
    shape = list(g.shape(1))
    dim = g.dim(len(shape))
    parts = []
    for _ in range(g.pick(1, 2, 3)):
        shape[dim] = g.pick(6, 12, 1, 6)
        parts.append(g.n(*shape))
    return parts, dim


def _stack(g: Draw) -> tuple[Any, ...]:
    shape = g.shape(0, 2)
    return [g.n(*shape) for _ in range(g.pick(1, 2, 3))], g.dim(len(shape) + 1)


def _halved(g: Draw) -> tuple[Any, ...]:
    shape = list(g.shape(1))
    dim = g.dim(len(shape))
    grad = g.n(*shape)
    shape[dim] *= 2
    return grad, g.n(*shape), dim


def _select(g: Draw) -> tuple[Any, ...]:
    x = g.x()
    dim = g.dim(x.dim())
    return x, dim, g.pick(*range(-x.shape[dim], x.shape[dim]))


def _select_backward(g: Draw) -> tuple[Any, ...]:
    x, dim, index = _select(g)
    return x.select(dim, index), list(x.shape), dim, index


def _select_scatter(g: Draw) -> tuple[Any, ...]:
    x, dim, index = _select(g)
    return x, g.n(*x.select(dim, index).shape), dim, index


def _pads(g: Draw, *, high: int) -> list[int]:
    return [g.pick(0, 0, 1, 2) for _ in range(2 * high)]


def _unfold(g: Draw) -> tuple[Any, ...]:
    x = g.x()
    dim = g.dim(x.dim())
    return x, dim, g.pick(*range(1, x.shape[dim] + 1)), g.pick(1, 2)


def _unfold_backward(g: Draw) -> tuple[Any, ...]:
    x, dim, size, step = _unfold(g)
    return g.n(*x.unfold(dim, size, step).shape), list(x.shape), dim, size, step


def _with_dims(g: Draw) -> tuple[Any, ...]:
    x = g.x()
    return x, g.dims(x.dim())


def _diagonal(g: Draw) -> tuple[Any, ...]:
    x = g.x(2)
    return (x, 0, *g.pick((0, 1), (-1, 0), (1, 0)))


def _diagonal_backward(g: Draw) -> tuple[Any, ...]:
    x, offset, *dims = _diagonal(g)
    return g.n(*x.diagonal(offset, *dims).shape), list(x.shape), offset, *dims


SLICING: dict[str, Maker] = {
    **named("slice.Tensor", _slice),
    **named("slice_backward", _slice_backward),
    **named("slice_scatter", _slice_scatter),
    **named("split.Tensor chunk unsafe_split.Tensor", _split),
    **named("split.sizes split_with_sizes unsafe_split_with_sizes", _split_sizes),
    **named("cat", _cat),
    **named("stack", _stack),
    **named("glu", lambda g: _halved(g)[1:]),
    **named("glu_backward", _halved),
    **named("select.int", _select),
    **named("select_backward", _select_backward),
    **named("select_scatter", _select_scatter),
    **named("unbind.int", lambda g: _select(g)[:2]),
    **named("constant_pad_nd", lambda g: (g.x(2), _pads(g, high=2), g.pick(0, 0.5))),
    **named("unfold", _unfold),
    **named("unfold_backward", _unfold_backward),
    **named("diagonal", _diagonal),
    **named("diagonal_backward", _diagonal_backward),
    **named("flip", _with_dims),
    **named("roll", lambda g: (lambda x, dims: (x, [1] * len(dims), dims))(*_with_dims(g))),
    **named("tril triu", lambda g: (g.x(2), g.pick(0, 1))),
}


# ---- creation

FLOATS = {"dtype": torch.float64}

CREATION: dict[str, Maker] = {
    **named("zeros ones empty.memory_format", lambda g: (list(g.shape()), FLOATS)),
    **named("full", lambda g: (list(g.shape()), 0.5, FLOATS)),
    **named("new_zeros new_ones new_empty", lambda g: (g.n(*g.shape()), list(g.shape()))),
    **named("new_full", lambda g: (g.n(*g.shape()), list(g.shape()), 0.5)),
    **named("zeros_like ones_like empty_like", lambda g: (g.n(*g.shape()),)),
    **named("full_like fill.Scalar", lambda g: (g.n(*g.shape()), 0.5)),
}


# ---- lookups


def _indices(g: Draw, shape: tuple[int, ...]) -> list[Any]:
    asking = g.shape(0, 2)
    indices = [g.i(size, *g.narrowed(asking)) if g.flag() else None for size in shape]
    if all(index is None for index in indices):
        indices[0] = g.i(shape[0], *asking)
    while indices[-1] is None:
        indices.pop()
    return indices


def _index(g: Draw) -> tuple[Any, ...]:
    x = g.x()
    return x, _indices(g, tuple(x.shape))


def _index_put(g: Draw) -> tuple[Any, ...]:
    x, indices = _index(g)
    if g.pick(1, 2, 3) == 1:  # a boolean mask over some leading dims
        return x, [g.b(*x.shape[: g.pick(*range(1, x.dim() + 1))])], g.f()
    given = torch.ops.aten.index.Tensor(x, indices)
    accumulate = g.flag()
    values = g.n(*g.narrowed(given.shape)) if accumulate else torch.full((), 0.5, dtype=torch.float64)
    return x, indices, values, accumulate


def _gather(g: Draw, *, distinct: bool) -> tuple[torch.Tensor, int, torch.Tensor]:
    x = g.x()
    dim = g.dim(x.dim())
    shape = [size if g.pick(1, 1, 0) else max(1, size // 2) for size in x.shape]
    if distinct:  # what is written twice is left to chance
        index = torch.rand(x.shape, generator=g.generator).argsort(dim)
        return x, dim, index[tuple(slice(size) for size in shape)]
    shape[dim] = g.size()
    return x, dim, g.i(x.shape[dim], *shape)


def _scatter(value: str, *more: Any, distinct: bool = True) -> Maker:
    def make(g: Draw) -> tuple[Any, ...]:
        x, dim, index = _gather(g, distinct=distinct)
        source = g.pick(0, 0.5) if value == "number" else g.n(*index.shape)
        return x, dim, index, source, *more

    return make


def _positions(g: Draw) -> tuple[torch.Tensor, int, torch.Tensor]:
    x = g.x()
    dim = g.dim(x.dim())
    return x, dim, torch.randperm(x.shape[dim], generator=g.generator)[: g.pick(1, 2, 6)]


def _at_positions(g: Draw) -> tuple[Any, ...]:
    x, dim, index = _positions(g)
    shape = list(x.shape)
    shape[dim] = len(index)
    return x, dim, index, g.n(*shape)


def _embedding_backward(g: Draw) -> tuple[Any, ...]:
    lead, d, v = g.shape(1, 2), g.size(), g.size()
    return g.n(*lead, d), g.i(v, *lead), v, g.pick(-1, 0), g.flag()


def _lookup(g: Draw) -> tuple[Any, ...]:
    v = g.size()
    return g.n(v, g.size()), g.i(v, *g.shape(0, 2))


INDEXING: dict[str, Maker] = {
    **named("embedding", _lookup),
    **named("embedding_dense_backward", _embedding_backward),
    **named("one_hot", lambda g: (g.i(6, *g.shape()), 6)),
    **named("bucketize.Tensor", lambda g: (g.n(*g.shape(1)), torch.linspace(-1, 1, 6, dtype=torch.float64))),
    **named("index.Tensor _unsafe_index.Tensor", _index),
    **named("index_put _unsafe_index_put", _index_put),
    **named("gather", lambda g: _gather(g, distinct=False)),
    **named("scatter.value", _scatter("number")),
    **named("scatter.src", _scatter("tensor")),
    **named("scatter_add", _scatter("tensor", distinct=False)),
    **named("scatter_reduce.two", _scatter("tensor", "amax", distinct=False)),
    **named("index_select", lambda g: _positions(g)),
    **named("index_add index_copy", _at_positions),
    **named("index_fill.int_Scalar", lambda g: (*_positions(g), g.pick(0, 0.5))),
}

LAYOUT: dict[str, Maker] = {**VIEWS, **SLICING, **CREATION, **INDEXING}
