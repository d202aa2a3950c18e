"""Rows of pools, samplings and pads: sums along the last dims of how much of each entry is in each of the result."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from .layers import Labels, each_of
from .letters import number
from .meaning import Value
from .rows import Call, Gradients, row, slope
from .text import Refused


def _spread(c: Call, x: Value, leaves: Sequence[Value], back: bool = False) -> Value:
    """Return the sum, over the last dims, of entries times how much of each (from) an entry of the result has (to):
    leaves [from, to], one a dim; ``back`` does so from there to here."""
    labels: list[Hashable] = list(range(len(x.dims) - len(leaves)))
    one, other = ("to", "from") if back else ("from", "to")
    dims = range(len(leaves))
    rows: list[Labels] = [[*labels, *((one, at) for at in dims)], *([("from", at), ("to", at)] for at in dims)]
    return c.tensors.product([x, *leaves], rows, [*labels, *((other, at) for at in dims)])


Shares = Callable[[Call], list[Value]]


def _enter(ops: Sequence[str], shares: Shares, of_gradient: Shares) -> None:
    """Enter operators that spread entries, and those that put gradients back; both say how much of each is where."""
    row(*(f"{op}.default" for op in ops))(lambda c: _spread(c, c.args[0], shares(c)))
    slope(*(f"{op}.default" for op in ops))(lambda c, g, y: [_spread(c, g, shares(c), back=True)])
    row(*(f"{op}_backward.default" for op in ops))(lambda c: _spread(c, c.args[0], of_gradient(c), back=True))


def _rank(c: Call) -> int:
    """Return the number of the last dims that an operator reads: ``aten.avg_pool2d.default`` reads two."""
    match = re.search(r"(\d)d", c.line.op)
    assert match is not None
    return int(match[1])


# ---- averages


def _averages(c: Call, shape: Sequence[int], facts: Sequence[Any]) -> list[Value]:
    """Return the share of each entry in each average of a window: (kernel, stride, padding, ceil, include, divisor)."""
    defaults: tuple[Any, ...] = ([], 0, False, True, None)
    kernel, stride, padding, ceil, include, divisor = (*facts, *defaults[len(facts) - 1 :])
    if divisor is not None:
        raise Refused(f"{c.line.op} with a divisor has no rule")
    rank = _rank(c)
    kernel, stride, padding = (each_of(each, rank) for each in (kernel, stride or kernel, padding))
    leaves = []
    for size, k, s, p in zip(shape[-rank:], kernel, stride, padding, strict=True):
        out = (size + 2 * p - k + (s - 1 if ceil else 0)) // s + 1
        out -= ceil and (out - 1) * s >= size + p
        leaves.append(c.tensors.leaf("average", (size, out), (k, s, p, ceil, include)))
    return leaves


def _adaptive(c: Call, here: Sequence[int], there: Sequence[int]) -> list[Value]:
    """Return the share of each entry in each average of as many windows as the result has entries."""
    return [c.tensors.leaf("adaptive average", (size, out)) for size, out in zip(here, there, strict=True)]


_enter(
    ("aten.avg_pool2d", "aten.avg_pool3d"),
    lambda c: _averages(c, c.args[0].shape, c.args[1:]),
    lambda c: _averages(c, c.args[1].shape, c.args[2:]),
)
_enter(
    ("aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d"),
    lambda c: _adaptive(c, c.args[0].shape[-_rank(c) :], c.args[1]),
    lambda c: _adaptive(c, c.args[1].shape[-_rank(c) :], c.args[0].shape[-_rank(c) :]),
)


# ---- samplings: images of other sizes

_SAMPLINGS = (
    *(f"aten.{exact}{rank}d" for exact in ("upsample_nearest", "_upsample_nearest_exact") for rank in (1, 2, 3)),
    "aten.upsample_linear1d", "aten.upsample_bilinear2d", "aten.upsample_trilinear3d", "aten.upsample_bicubic2d",
)  # fmt: skip


def _sampled(c: Call, here: Sequence[int], there: Sequence[int], at: int) -> list[Value]:
    """Return the share of each entry in each of an image of another size. From an argument on stand how corners lie,
    but for the nearest entries, and a scale for each dim."""
    rank, facts, aligned = len(there), list(c.args[at:]), 0 if "nearest" in c.line.op else 1
    facts += [None] * (aligned + rank - len(facts))
    kind = c.line.op.removesuffix(".default").removesuffix("_backward")
    return [
        c.tensors.leaf(kind, (size, out), (*facts[:aligned], None if scale is None else number(scale)))
        for size, out, scale in zip(here[-rank:], there, facts[aligned:], strict=True)
    ]


def _sampled_back(c: Call) -> list[Value]:
    g, there, here = c.args[:3]
    if g.shape != (*here[:2], *there):
        raise Refused(f"a gradient of {list(g.shape)} is put back from {list(there)} to {list(here)}")
    return _sampled(c, here, there, 3)


_enter(_SAMPLINGS, lambda c: _sampled(c, c.args[0].shape, c.args[1], 2), _sampled_back)


# ---- pads by entries of the value itself

_PADS = tuple(f"aten.{kind}_pad{rank}d" for kind in ("reflection", "replication") for rank in (1, 2, 3))


def _around(c: Call, here: Sequence[int], pad: Sequence[int]) -> list[Value]:
    """Return which entry each of a padded value is. Pads are of the last dim first."""
    if min(pad) < 0:
        raise Refused(f"{c.line.op} by {list(pad)} has no rule")
    sides = [(pad[at], pad[at + 1]) for at in range(len(pad) - 2, -1, -2)]
    kind = c.line.op.split(".")[1].partition("_")[0]
    return [
        c.tensors.leaf(f"{kind} pad", (size, low + size + high), (low,))
        for size, (low, high) in zip(here[-len(sides) :], sides, strict=True)
    ]


_enter(_PADS, lambda c: _around(c, c.args[0].shape, c.args[1]), lambda c: _around(c, c.args[1].shape, c.args[2]))


# ---- the largest entries of windows

_FIXED = "aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default"
_ADAPTIVE = "aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default"
_FOUND = "largest of windows at"


def _windows(c: Call, shape: Sequence[int]) -> tuple[Hashable, list[int]]:
    """Return what is known of the windows of a pool, and the sizes of its result."""
    if c.line.op in _ADAPTIVE:
        return (), list(c.args[1])
    defaults: tuple[Any, ...] = ([], 0, 1, False)
    kernel, stride, padding, dilation, ceil = (*c.args[1:], *defaults[len(c.args) - 2 :])
    rank = _rank(c)
    facts = [each_of(each, rank) for each in (kernel, stride or kernel, padding, dilation)]
    out = []
    for size, k, s, p, d in zip(shape[-rank:], *facts, strict=True):
        count = (size + 2 * p - d * (k - 1) - 1 + (s - 1 if ceil else 0)) // s + 1
        out.append(count - (ceil and (count - 1) * s >= size + p))
    return (*map(tuple, facts), ceil), out


@row(*_FIXED, *_ADAPTIVE)
def _(c: Call) -> tuple[Value, Value]:
    t, x = c.tensors, c.args[0]
    facts, sizes = _windows(c, x.shape)
    out: dict[Hashable, int] = {("y", at): size for at, size in enumerate(sizes)}
    labels: list[Hashable] = list(range(len(x.dims) - len(out)))
    inner: list[Hashable] = [("x", at) for at in range(len(out))]
    index = t.opaque(_FOUND, facts, [x], [[*labels, *inner]], [*labels, *out], inner, out)
    marks, names, flat = _window_marks(c, index, x.shape, len(out))
    return t.product([marks, t.reshape(x, flat)], [names, [*labels, "p"]], names[:-1]), index


def _window_marks(c: Call, index: Value, shape: Sequence[int], rank: int) -> tuple[Value, list[Hashable], list[int]]:
    """Return 1 where an entry is the largest of a window, else 0, as [..., windows, p], and the shape of [..., p]."""
    places = math.prod(shape[-rank:])
    marks = c.tensors.pointwise("eq", [c.tensors.unsqueeze(index, len(index.dims)), c.places(places)])
    return marks, [*range(len(index.dims)), "p"], [*shape[:-rank], places]


def _to_largest(c: Call, g: Value, index: Value, shape: Sequence[int], rank: int) -> Value:
    marks, names, _ = _window_marks(c, index, shape, rank)
    return c.tensors.reshape(c.tensors.product([marks, g], [names, names[:-1]], [*names[: -1 - rank], "p"]), shape)


@slope(*_FIXED, *_ADAPTIVE)
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [_to_largest(c, g, c.results[1], c.args[0].shape, _rank(c))]


@row("aten.max_pool2d_with_indices_backward.default", "aten.max_pool3d_with_indices_backward.default")
def _(c: Call) -> Value:
    facts, index, rank = c.args[2:7], c.args[7], _rank(c)
    kernel, stride, padding, dilation = (tuple(each_of(each or facts[0], rank)) for each in facts[:4])
    padding = tuple(each_of(facts[2], rank))
    _demand_windows(c, index, (kernel, stride, padding, dilation, facts[4]))
    return _to_largest(c, c.args[0], index, c.args[1].shape, rank)


@row("aten.adaptive_max_pool2d_backward.default", "aten.adaptive_max_pool3d_backward.default")
def _(c: Call) -> Value:
    g, x, index = c.args
    _demand_windows(c, index, ())
    return _to_largest(c, g, index, x.shape, _rank(c))


def _demand_windows(c: Call, index: Value, facts: Hashable) -> None:
    """Refuse indices that are not of such windows."""
    node = c.tensors.table.node(index.node)
    if node.op != _FOUND or not isinstance(node.args, tuple) or node.args[0] != facts:
        raise Refused(f"{c.line.op} of other windows than its indices are of")
