"""The numbers of a table's nodes, by torch: what each node means, beside which rows are compared."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from certificate.letters import Read
from certificate.meaning import Table, Value
from certificate.nodes import Node

T = torch.Tensor
CONSTANTS = {"torch.float64": torch.float64, "torch.int64": torch.int64, "torch.bool": torch.bool}


def _grid(sizes: Sequence[int]) -> list[T]:
    """Return the number of each letter, as arrays that broadcast to all of them."""
    return [
        torch.arange(n).reshape([-1 if at == dim else 1 for dim in range(len(sizes))]) for at, n in enumerate(sizes)
    ]


def _window(k: T, y: T, args: Any) -> T:
    stride, low, dilation = args
    return y * stride - low + k * dilation


def _average(p: T, y: T, sizes: Sequence[int], args: Any) -> T:
    (kernel, stride, padding, _, include), size = args, sizes[0]
    start = y * stride - padding
    end = torch.clamp(start + kernel, max=size + padding)
    inside = (p >= start) & (p < end)
    count = end - start if include else torch.clamp(end, max=size) - torch.clamp(start, min=0)
    return inside.double() / count


def _sampled(name: str, node: Node) -> T:
    """Return how much of each entry is in each of an image of another size, by torch's own operator on unit vectors."""
    size, out = node.sizes
    args: Any = node.args
    *facts, scale = args
    rank = int(name[-2])
    image = torch.eye(size, dtype=torch.float64).reshape(size, 1, size, *[1] * (rank - 1))
    operator = getattr(torch.ops.aten, name.removeprefix("aten.")).default
    scales = [None if scale is None else float(scale), *[None] * (rank - 1)]
    return operator(image, [out, *[1] * (rank - 1)], *facts, *scales).reshape(size, out)


def _adaptive(p: T, y: T, sizes: Sequence[int], args: Any) -> T:
    size, out = sizes
    start, end = y * size // out, -(-(y + 1) * size // out)
    return ((p >= start) & (p < end)).double() / (end - start)


def _rolled(p: T, y: T, sizes: Sequence[int], args: Any) -> T:
    return ((p + args[0]) % sizes[0] == y).double()


def _reflected(p: T, y: T, sizes: Sequence[int], args: Any) -> T:
    at = (y - args[0]).abs()
    return (torch.minimum(at, 2 * (sizes[0] - 1) - at) == p).double()


def _replicated(p: T, y: T, sizes: Sequence[int], args: Any) -> T:
    return ((y - args[0]).clamp(0, sizes[0] - 1) == p).double()


LEAVES = {
    "average": _average, "adaptive average": _adaptive, "rolled": _rolled, "reflection pad": _reflected,
    "replication pad": _replicated,
}  # fmt: skip
"""The shares of each entry in each of a result, of what moves or averages entries of a dim."""


SLOPE: dict[str, Callable[..., T]] = {"silu": torch.nn.functional.silu, "gelu": lambda x,
     a: torch.nn.functional.gelu(x, approximate=a),
    "softplus": lambda x, b, t: torch.nn.functional.softplus(x, float(b), float(t)),
         "hardsigmoid": torch.nn.functional.hardsigmoid,
    "hardswish": torch.nn.functional.hardswish, "mish": torch.nn.functional.mish,
    "elu": torch.ops.aten.elu.default, "logit": torch.logit,
    **{name: getattr(torch.nn.functional, name) for name in ("leaky_relu", "hardshrink", "softshrink")},
    "smooth_l1": lambda x, beta: torch.nn.functional.smooth_l1_loss(x, 0 * x, reduction="none", beta=float(beta)),
    "huber": lambda x, delta: torch.nn.functional.huber_loss(x, 0 * x, reduction="none", delta=float(delta)),
}  # fmt: skip


def _any(args: Any) -> Any:
    return args


def _slope(name: str, x: Any, *others: Any) -> T:
    x = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(SLOPE[name](x, *others).sum(), x)
    return slope


def _in_bin(x: T, place: T, bins: float, low: float, high: float) -> T:
    at = ((x - low) / (high - low) * bins).floor()
    return (torch.where(x == high, bins - 1, at) == place) & (x >= low) & (x <= high)


def _last_of(index: T, facts: Any, size: int) -> T:
    last = torch.full((*index.shape[:-1], size), -1)
    for at, entry in enumerate(index.long().unbind(-1)):
        last.scatter_(-1, entry[..., None], at)
    return last


def _slots(chosen: T, facts: Any, size: int) -> T:
    places = torch.where(chosen != 0, torch.arange(chosen.shape[-1]), chosen.shape[-1]).sort(-1)[0][..., :size]
    return torch.where(places < chosen.shape[-1], places, -1)


FOUND: dict[str, Callable[..., T]] = {
    "largest of all at": lambda x, facts, _: x.argmax(-1, True),
    "smallest of all at": lambda x, facts, _: x.argmin(-1, True),
    "median at": lambda x, facts, _: x.median(-1, True)[1],
    "most frequent at": lambda x, facts, _: x.mode(-1, True)[1],
    "smallest ones at": lambda x, facts, _: x.kthvalue(facts[0], -1, True)[1],
    "largest so far at": lambda x, facts, _: x.cummax(-1)[1],
    "smallest so far at": lambda x, facts, _: x.cummin(-1)[1],
    "product so far": lambda x, facts, _: x.cumprod(-1),
    "repeated": lambda x, facts, _: torch.repeat_interleave(x.long()),
    "last of": _last_of,
    "slots": _slots,
}
"""The functions that find something along a dim, of its entries and the number of results."""


def _scalar(value: Any) -> float:
    return value.flatten()[0].item() if isinstance(value, T) else value


def _whole_numbers(name: str) -> Callable[..., T]:
    return lambda x, y: getattr(torch, name)(x.long(), y.long())


FUNCTIONS: dict[str, Callable[..., T]] = {
    "mish": SLOPE["mish"], "logit": lambda x, eps: torch.logit(x, None if eps is None else _scalar(eps)),
    **{name: lambda x, *n, name=name: SLOPE[name](x, *map(_scalar, n))
       for name in ("elu", "leaky_relu", "hardshrink", "softshrink", "smooth_l1", "huber")},
    **{name: getattr(torch, name) for name in ("exp2", "expm1", "log1p", "log2", "log10", "logaddexp", "logaddexp2",
         "tan", "asin", "atan", "atan2", "hypot", "sinc", "sinh", "cosh", "asinh", "acosh", "atanh", "lgamma",
         "digamma", "i0", "erfc", "erfinv", "ceil", "trunc", "frac", "heaviside", "nextafter", "copysign", "fmax",
         "fmin", "isnan",
         "isinf", "isposinf", "isneginf", "signbit", "fmod")},
    **{name: getattr(torch.special, name) for name in ("i0e", "i1", "i1e")},
    **{name: _whole_numbers(name) for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift",
         "bitwise_right_shift")},
    "polygamma": lambda n, x: torch.polygamma(int(_scalar(n)), x),
    "rounded": lambda x, n: torch.round(x, decimals=int(_scalar(n))),
    "nan_to_num": lambda x, *n: torch.nan_to_num(x, *map(_scalar, n)),
    "binary_cross_entropy": lambda x, to: torch.nn.functional.binary_cross_entropy(x, to, reduction="none"),
    **{name: getattr(torch, name) for name in ("ne", "eq", "lt", "le", "gt", "ge", "exp", "log", "sqrt", "rsqrt",
         "sin", "cos",
       "acos", "erf", "tanh", "sigmoid", "relu", "abs", "sign", "floor", "maximum", "minimum", "remainder")},
    "silu": torch.nn.functional.silu, "gelu": SLOPE["gelu"], "softplus": SLOPE["softplus"], "inverse": lambda x: 1 / x,
    "hardsigmoid": torch.nn.functional.hardsigmoid, "hardswish": torch.nn.functional.hardswish, "power": torch.pow,
    "above": lambda x, y: x > y, "pow": lambda x, e: x ** float(e),
    "quotient": lambda x, y, mode: torch.div(x, y, rounding_mode=mode),
    "clamp": torch.clamp,
    "whole": lambda x, dtype: x.to(CONSTANTS[dtype]),
}  # fmt: skip


def _attention(node: Node, reads: Sequence[T]) -> T:
    """Return attention, or a gradient of it, for one query: it looks along a head's numbers, keys and (in a gradient)
    the numbers of values. Loops of the result's own are the first."""
    facts: Any = node.args
    (scale, _, mask, causal), (size, keys, *more) = facts
    own = {"attention gradient of q": 1, "attention gradient of k": 2, "attention gradient of v": 2}.get(node.op, 0)
    values = [x[(0,) * own].reshape(*node.sizes[own:], size, keys, *(more or [1])) for x in reads]
    g = values.pop(0)[..., 0, 0, :] if own else None
    q, k = values.pop(0)[..., 0], values.pop(0)[..., 0]
    scale = size**-0.5 if scale is None else float(scale)
    scores = (q * k).sum(-2) * scale
    for kind in [mask] * bool(mask) + ["hides"] * causal:
        seen = values.pop(0)[..., 0, :, 0]
        scores = scores + seen if kind == "adds" else torch.where(seen != 0, scores, -math.inf)
    mass = scores.logsumexp(-1)
    if node.op == "attention mass":
        return mass
    shares = (scores - mass[..., None]).exp()
    v = values.pop(0)[..., 0, :, :]
    if g is None:
        return (shares * v[..., 0]).sum(-1)
    out = values.pop(0)[..., 0, 0, :]
    of_scores = shares * ((g[..., None, :] * v).sum(-1) - (g * out).sum(-1, keepdim=True)) * scale
    if node.op == "attention gradient of q":
        return (of_scores[..., None, :] * k).sum(-1).movedim(-1, 0)
    if node.op == "attention gradient of k":
        return (of_scores[..., None] * q[..., :1].mT).movedim((-2, -1), (0, 1))
    return (shares[..., None] * g[..., None, :]).movedim((-2, -1), (0, 1))


class Numbers:
    """The numbers of a table's nodes, from those of the tensors that are read from outside."""

    def __init__(self, table: Table, given: dict[str, T]) -> None:
        self.table, self.given = table, given
        self.known: dict[int, T] = {}

    def read(self, read: Read, letters: dict[Any, T]) -> T:
        """Return a read for all numbers of its letters."""
        node = self.table.nodes[read.node]
        letters = {**letters, **self.turned(read, letters)}
        index = [
            offset + sum((stride * letters[key] for key, stride in terms), torch.tensor(0))
            for offset, terms in read.maps
        ]
        factor = float(read.coefficient)
        if node.op == "delta":
            return factor * (index[0] == index[1]).double()
        if node.op == "count":
            return factor * index[0].double()
        if node.op == "not after":
            return factor * (index[1] <= index[0]).double()
        if node.op.startswith("window "):
            return factor * (index[0] == _window(index[1], index[2], node.args)).double()
        if node.op in LEAVES:
            return factor * LEAVES[node.op](index[0], index[1], node.sizes, node.args)
        value = self.node(read.node)
        return factor * (value[tuple(index)] if index else value)

    def turned(self, read: Read, letters: dict[Any, T]) -> dict[Any, T]:
        """Return the places of ranks that count in reverse in every second part of a dim."""
        places = {}
        for _, terms in read.maps:
            for axis, stride in terms:
                if isinstance(axis, str) and axis[0] == "~":
                    rank, size = letters[axis[1:]], self.table.mesh[axis[1:]]
                    (part,) = (letters[key] for key, other in terms if other == stride * size)
                    places[axis] = torch.where(part % 2 == 1, size - 1 - rank, rank)
        return places

    def node(self, at: int) -> T:
        if at not in self.known:
            self.known[at] = self.computed(self.table.nodes[at]).double()
        return self.known[at]

    def computed(self, node: Node) -> T:
        if node.op == "one":
            return torch.tensor(1.0)
        if node.op == "infinity":
            return torch.tensor(math.inf)
        if node.op in self.given:
            return self.given[node.op]
        if node.op.startswith(("aten.upsample", "aten._upsample")):
            return _sampled(node.op, node)
        sizes, args = (*node.sizes, *node.inner), _any(node.args)
        letters = dict(enumerate(_grid(sizes)))
        reads = [self.read(r, letters).expand(sizes) for r in node.reads]
        entries, inner = len(node.sizes), list(range(len(node.sizes), len(sizes)))
        if node.op == "sum":
            return sum(reads[1:], reads[0])
        if node.op == "product":
            total = math.prod(reads[1:], start=reads[0])
            return total.sum(inner) if inner else total
        if node.op == "largest":
            return reads[0].amax(inner)
        if node.op == "squares":
            return (reads[0] ** 2).sum(inner)
        if node.op == "mean of norm":
            return reads[0].mean(inner)
        if node.op == "inverse deviation of norm":
            return (reads[0].var(inner, correction=0) + float(args[0])).rsqrt()
        if node.op in FOUND or node.op in ("largest at", "order", "largest of windows at"):
            return self.found(node, reads[0].reshape(*reads[0].shape[:entries], -1))
        if node.op == "in bin":
            return _in_bin(reads[0], reads[1], *map(float, args))
        if node.op.startswith("attention"):
            return _attention(node, reads)
        if node.op in ("pow", "whole"):
            return FUNCTIONS[node.op](reads[0], node.args)
        words, values = dict(args), list(reads)
        items = [words[at] if at in words else values.pop(0) for at in range(len(words) + len(values))]
        if node.op.startswith("slope_of_"):
            return _slope(
                node.op.removeprefix("slope_of_"), *(_scalar(item) if at else item for at, item in enumerate(items))
            )
        if node.op == "softplus":
            items[1:] = map(_scalar, items[1:])
        return FUNCTIONS[node.op](*items)

    def found(self, node: Node, along: T) -> T:
        """Return which entries an operator finds along the letters that it looks along: its own loops are the first."""
        facts = _any(node.args)[0]
        own = [
            at
            for at in range(len(node.sizes))
            if not any(at == key for r in node.reads for _, terms in r.maps for key, _ in terms)
        ]
        base = along[tuple(0 if at in own else slice(None) for at in range(along.dim()))]
        if node.op == "largest of windows at":
            image = base.reshape(-1, 1, *node.inner)
            rank = len(node.inner)
            if facts:
                kernel, stride, padding, dilation, ceil = facts
                operator = getattr(torch.ops.aten, f"max_pool{rank}d_with_indices").default
                result = operator(image, kernel, stride, padding, dilation, ceil)[1]
            else:
                operator = getattr(torch.ops.aten, f"adaptive_max_pool{rank}d").default
                result = operator(image, [node.sizes[at] for at in own])[1]
            result = result.reshape(*base.shape[:-1], *result.shape[-rank:])
        elif node.op == "largest at":
            result = base.topk(facts[0], -1, facts[1], facts[2])[1]
        elif node.op == "order":
            result = base.argsort(-1, facts[0])
        else:
            result = FOUND[node.op](base, facts, math.prod(node.sizes[at] for at in own))
        sizes = [node.sizes[at] for at in own]
        result = result.reshape(*base.shape[:-1], *sizes)
        return result.movedim(list(range(-len(sizes), 0)), own) if own else result.reshape(node.sizes)

    def value(self, value: Value, ranks: dict[str, int]) -> T:
        """Return a value on one rank."""
        sizes = [size for dim in value.dims for size in dim]
        letters: dict[Any, T] = dict(enumerate(_grid(sizes)))
        letters |= {axis: torch.tensor(at) for axis, at in ranks.items()}
        return self.read(Read(value.coefficient, value.node, value.maps), letters).expand(sizes).reshape(value.shape)
