"""The kinds of nodes in a recorded build: constants, literals, draws, elementwise operators, writes and whole calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import counter
from .evaluate import VECTOR, Read, RecipeNode, Replay, cast, dense

# The last elements of a run, or of a thread's part of it, may be computed by other code than the rest, with another
# last bit where a function is not exactly rounded: of operators with more than one right result, those see whole
# vectors only, in runs short enough for one thread.
ONE_THREAD_RUN = 1 << 14  # elements; torch's kernels give no thread less than twice this


@dataclass(frozen=True, eq=False)
class Fill(RecipeNode):
    """One number everywhere. Memory that nobody wrote counts as zeros."""

    value: float | int | bool | complex

    def at(self, index: Tensor, replay: Replay) -> Tensor:
        return torch.full(index.shape, self.value, dtype=self.dtype, device=index.device)


@dataclass(frozen=True, eq=False)
class LiteralNode(RecipeNode):
    """Numbers that were written in the module's code."""

    flat: Tensor

    def at(self, index: Tensor, replay: Replay) -> Tensor:
        return self.flat.to(index.device)[index]


@dataclass(frozen=True, eq=False)
class Count(RecipeNode):
    """``start + step * index`` in integers."""

    start: int
    step: int

    def at(self, index: Tensor, replay: Replay) -> Tensor:
        return (index * self.step).add_(self.start).to(self.dtype)


@dataclass(frozen=True, eq=False)
class Draw(RecipeNode):
    """Random numbers: ``law(key, index)`` returns them in float64, and rounding must not reach the bound ``below``."""

    law: Callable[[int, Tensor], Tensor]
    order: int
    below: float | None = None
    stream: list[str] = field(default_factory=list)  # its name, once, when the parameter that owns it is known

    def key(self, seed: int) -> int:
        """The key of the random stream. A draw that is read while the model is built has a stream of the build."""
        if not self.stream:
            self.stream.append(f"init:#{self.order}")
        return counter.stream(seed, self.stream[0])

    def at(self, index: Tensor, replay: Replay) -> Tensor:
        numbers = cast(self.law(self.key(replay.seed), index), self.dtype)
        if self.below is None:
            return numbers
        bound = torch.full((), self.below, dtype=self.dtype, device=index.device)
        return torch.minimum(numbers, torch.nextafter(bound, torch.full_like(bound, -math.inf)))


def as_it_is(entry: Tensor) -> Tensor:
    """Return a tensor's entries: the function of copies and casts."""
    return entry


@dataclass(frozen=True, eq=False)
class Elementwise(RecipeNode):
    """An operator whose element i needs only element i of its operands (a ``Read`` each, broadcast to ``sizes``)."""

    function: Callable[..., Tensor]
    exact: bool  # every implementation of it gives the same bits
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sizes: tuple[int, ...]

    def at(self, index: Tensor, replay: Replay) -> Tensor:
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        values = [self._operand(leaf, index, replay) if isinstance(leaf, Read) else leaf for leaf in leaves]
        length = index.numel() if self.exact else ONE_THREAD_RUN
        runs = []
        for start in range(0, index.numel(), length):
            parts = [v[start : start + length] if isinstance(v, Tensor) and v.dim() else v for v in values]
            args, kwargs = pytree.tree_unflatten(parts, spec)
            runs.append(self.function(*args, **kwargs))
        result = cast(runs[0] if len(runs) == 1 else torch.cat(runs), self.dtype)
        return result if result.dim() else result.expand(index.shape)

    @property
    def anywhere(self) -> bool:
        return self.function in (as_it_is, counter.inverse_erf)

    def _operand(self, read: Read, index: Tensor, replay: Replay) -> Tensor:
        if not read.sizes:  # stays without dims: type promotion asks for that
            return replay.read(read, index.new_zeros(VECTOR))[0]
        return replay.read(read if read.sizes == self.sizes else read.expand(self.sizes), index)

    def sources(self) -> Iterator[RecipeNode]:
        return (leaf.node for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Read))


@dataclass(frozen=True, eq=False)
class Write(RecipeNode):
    """A storage after an operator wrote ``source`` over the entries of a tensor with given sizes and strides."""

    before: RecipeNode
    source: Read
    strides: tuple[int, ...]
    offset: int

    def at(self, index: Tensor, replay: Replay) -> Tensor:
        out = torch.empty(index.shape, dtype=self.dtype, device=index.device)
        todo = index  # storage indices not yet found
        places = torch.arange(index.numel(), device=index.device)  # where they go in `out`
        node: RecipeNode = self
        while isinstance(node, Write):  # a loop, not recursion: code that writes row by row makes long chains
            hit, logical = node.find(todo)
            hits = hit.nonzero().squeeze(1)
            if hits.numel():
                out[places[hits]] = replay.any_number(node.source, logical[hits])
                rest = (~hit).nonzero().squeeze(1)
                todo, places = todo[rest], places[rest]
                if not rest.numel():
                    return out
            node = node.before
        out[places] = replay.any_number(dense(node, (node.count,)), todo)
        return out

    def find(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return a mask of the storage indices that were overwritten, and for these the indices of ``source``."""
        sizes = self.source.sizes
        rest = index - self.offset
        hit = rest >= 0
        logical = torch.zeros_like(index)
        below = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
        for dim in sorted((d for d, size in enumerate(sizes) if size > 1), key=lambda d: -self.strides[d]):
            place = torch.div(rest, self.strides[dim], rounding_mode="floor")
            hit &= place < sizes[dim]
            rest = rest - place * self.strides[dim]
            logical += place * below[dim]
        return hit & (rest == 0), logical

    def sources(self) -> Iterator[RecipeNode]:
        yield self.before
        yield self.source.node


@dataclass(frozen=True, eq=False)
class CallNode:
    """An operator that is computed whole: its results, then the arguments that it writes, whose positions are
    ``written``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: tuple[int, ...]  # places among the flattened arguments
    draw: Draw | None  # the stream, when it is random

    def run(self, replay: Replay) -> list[Tensor]:
        """All results, contiguous, computed on one thread so that they do not depend on how many a rank has."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        values = [replay.whole(leaf) if isinstance(leaf, Read) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(values, spec)
        with _one_thread(), torch.random.fork_rng(devices=[], enabled=self.draw is not None):
            if self.draw is not None:
                torch.manual_seed(self.draw.key(replay.seed))
            out = self.function(*args, **kwargs)
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        return [result.contiguous() for result in [*results, *(values[place] for place in self.written)]]


@dataclass(frozen=True, eq=False)
class Result(RecipeNode):
    """One result of an operator that is computed whole."""

    call: CallNode
    place: int

    def at(self, index: Tensor, replay: Replay) -> Tensor:
        return replay.once(self.call, lambda: self.call.run(replay))[self.place].reshape(-1)[index].to(self.dtype)

    @property
    def anywhere(self) -> bool:
        return False

    def sources(self) -> Iterator[RecipeNode]:
        if self.call.draw is not None:
            yield self.call.draw
        for leaf in pytree.tree_leaves((self.call.args, self.call.kwargs)):
            if isinstance(leaf, Read):
                yield leaf.node


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
