"""The operators that make each element from its own number: random laws, constants, copies, movements, pointwise
functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..ops.rules import facts
from . import counter
from .evaluate import Read, RecipeNode, contiguous_strides, dense
from .nodes import Count, Elementwise, Fill, Write, as_it_is

Bound = dict[str, Any]
Law = tuple[Callable[[int, Tensor], Tensor], float | None]
"""A distribution: a function from (key, index) to numbers in float64, and a bound, if any, that rounding to a dtype
must not reach."""


@dataclass(frozen=True)
class Elements:
    """An operator's call as the tables below see it: its reads, and the tensor that it makes or writes."""

    func: Any
    name: str  # without the underscore of the version that writes its first argument
    bound: Bound  # arguments by name, defaults filled in, tensors as reads
    reads: tuple[Any, Any]
    written: tuple[int, ...]  # where the written tensor is among the flattened arguments
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    def each(self, function: Callable[..., Tensor], *reads: Read, exact: bool = True) -> Elementwise:
        """A node that applies ``function`` to the reads, element by element."""
        return Elementwise(self.count, self.dtype, function, exact, reads, {}, self.sizes)


def bind_arguments(func: Any, args: tuple[Any, ...], kwargs: Bound) -> Bound:
    """An operator's arguments by the names of its schema."""
    bound: Bound = {}
    for place, argument in enumerate(func._schema.arguments):
        if place < len(args):
            bound[argument.name] = args[place]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value if argument.has_default_value() else None
    return bound


def _uniform(bound: Bound) -> Law:
    low, high = float(bound.get("from", 0.0)), float(bound.get("to", 1.0))
    return lambda key, index: counter.uniform(key, index).mul_(high - low).add_(low), high if high > low else None


def _normal(bound: Bound) -> Law | None:
    mean, std = bound.get("mean", 0.0), bound.get("std", 1.0)
    if isinstance(mean, Read) or isinstance(std, Read):
        return None
    return (lambda key, index: counter.normal(key, index).mul_(float(std)).add_(float(mean))), None


def _bernoulli(bound: Bound) -> Law | None:
    p = bound.get("p")
    if p is None or isinstance(p, Read):
        return None
    return (lambda key, index: counter.keep_mask(key, index, 1.0 - p).to(torch.float64)), None


def _integers(bound: Bound) -> Law | None:
    low = bound.get("low", bound.get("from")) or 0
    high = bound.get("high", bound.get("to"))
    if high is None or high - low > 1 << 53:
        return None
    return (lambda key, index: counter.uniform(key, index).mul_(float(high - low)).floor_().add_(float(low))), None


def _exponential(bound: Bound) -> Law | None:
    return (lambda key, index: counter.exponential(key, index).mul_(1.0 / bound["lambd"])), None


_LAWS: dict[str, Callable[[Bound], Law | None]] = {
    "uniform": _uniform, "normal": _normal, "integers": _integers, "bernoulli": _bernoulli, "exponential": _exponential,
}  # fmt: skip
"""The laws that rows name. A law returns None for a call whose numbers can only be drawn all together."""


def law_of(func: Any, bound: Bound, dtype: torch.dtype) -> Law | None:
    """Return the law by which an operator draws, or None if it does not draw each number by itself. Of a complex number
    both parts are drawn, as torch does: those of a normal number have half of the variance each."""
    name = facts(func).law
    if not name or not dtype.is_complex:
        return _LAWS[name](bound) if name else None
    if name == "normal" and not isinstance(std := bound.get("std", 1.0), Read):
        bound = {**bound, "std": std * math.sqrt(0.5)}
    if (law := _LAWS[name](bound)) is None:
        return None
    draw, _ = law
    return (lambda key, index: torch.complex(draw(key, 2 * index), draw(key, 2 * index + 1))), None


def elements_of(call: Elements) -> RecipeNode | None:
    """The node of an operator whose element i needs only element i of each operand; None for any other."""
    row = facts(call.func)
    if row.creates:
        return _filled(call, row.number_in(list(call.bound.values())))
    if row.moves == "copy" or row.casts:
        return _copied(call, call.bound["self"])
    if call.name in ELEMENT_MOVES:
        return ELEMENT_MOVES[call.name](call)
    return _pointwise(call)


def _filled(call: Elements, number: Any) -> RecipeNode | None:
    """A tensor that holds one number everywhere, which may be the one entry of another tensor."""
    return _copied(call, number) if isinstance(number, Read) else Fill(call.count, call.dtype, number)


def _copied(call: Elements, source: Read) -> RecipeNode:
    return call.each(as_it_is, source.expand(call.sizes))


def _arange(call: Elements) -> RecipeNode | None:
    start, step = call.bound.get("start") or 0, call.bound.get("step") or 1
    if not isinstance(start, int) or not isinstance(step, int):
        return None
    return Count(call.count, call.dtype, start, step)


def _joined(call: Elements) -> RecipeNode:
    """Tensors joined along a dim; a stack makes that dim, a concatenation has it."""
    stacks = call.name == "stack"
    dim = call.bound["dim"] % max(len(call.sizes), 1)
    strides = contiguous_strides(call.sizes)
    inner = strides[:dim] + strides[dim + 1 :] if stacks else strides
    node: RecipeNode = Fill(call.count, call.dtype, 0)
    start = 0
    for piece in call.bound["tensors"]:
        if math.prod(piece.sizes):
            node = Write(call.count, call.dtype, node, _as_dtype(piece, call.dtype), inner, start * strides[dim])
            start += 1 if stacks else piece.sizes[dim]
    return node


ELEMENT_MOVES: dict[str, Callable[[Elements], RecipeNode | None]] = {
    "copy": lambda call: _copied(call, call.bound["src"]),
    "fill": lambda call: _filled(call, call.bound["value"]),
    "arange": _arange,
    "cat": _joined,
    "stack": _joined,
}


def _pointwise(call: Elements) -> RecipeNode | None:
    if torch.Tag.pointwise not in call.func.tags and call.name != "masked_fill":
        return None
    leaves = pytree.tree_leaves(call.reads)
    operands = [leaf for leaf in leaves if isinstance(leaf, Read)]
    if not operands or tuple(torch.broadcast_shapes(*(read.sizes for read in operands))) != call.sizes:
        return None
    if call.name == "erfinv" and operands[0].dtype.is_floating_point:  # part of truncated normals: exact everywhere
        return call.each(counter.inverse_erf, operands[0])
    exact = facts(call.func).exact and not any(read.dtype.is_complex for read in operands)
    exact = exact and call.bound.get("alpha") in (None, 1) and call.bound.get("rounding_mode") is None
    function = _on_copies(call.func, call.written) if call.written else call.func
    return Elementwise(call.count, call.dtype, function, exact, *call.reads, call.sizes)


def _on_copies(func: Any, written: tuple[int, ...]) -> Callable[..., Tensor]:
    """Return an operator that writes into copies of these arguments, because others read the originals."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for place in written:
            leaves[place] = leaves[place].clone()
        copies, options = pytree.tree_unflatten(leaves, spec)
        result: Tensor = func(*copies, **options)
        return result

    return run


def _as_dtype(read: Read, dtype: torch.dtype) -> Read:
    if read.dtype == dtype:
        return read
    return dense(Elementwise(math.prod(read.sizes), dtype, as_it_is, True, (read,), {}, read.sizes), read.sizes)
