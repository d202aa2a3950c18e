"""Nodes of a recorded build, and their evaluation for any elements.

A *node* computes the elements of one storage by flat index; a *read* is a strided view of a node, as a tensor is of its
storage. So views need no rules of their own, and a write through a view is a node that asks two others. The kinds:
constants, literals, draws, elementwise operators, writes, and results of operators that are computed whole.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from . import counter

# ---- evaluation


BLOCK = 1 << 15  # elements evaluated at once: in the cache, and too few for torch to wake a second thread
_GPU_BLOCK = 1 << 22  # elements evaluated at once on a GPU: enough to fill it, in about 1 GiB
VECTOR = 128  # every evaluation is padded to a multiple of this: see `Elementwise`


class Replay:
    """One evaluation: the seed of all draws, and the results so far."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._wholes: dict[int, list[Tensor]] = {}
        self._block: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def elements(self, read: Read, index: Tensor, device: torch.device | None = None) -> Tensor:
        """Return the elements of ``read`` at flat indices (int64, one dim, any number), evaluated block by block on a
        device, or on that of the indices."""
        device = device or index.device
        out = torch.empty(index.numel(), dtype=read.dtype, device=device)
        block = BLOCK if device.type == "cpu" else _GPU_BLOCK
        for start in range(0, index.numel(), block):
            part = index[start : start + block].to(device)
            self._block = {}
            out[start : start + part.numel()] = self.read_padded(read, part)
        self._block = {}
        return out

    def read(self, read: Read, index: Tensor) -> Tensor:
        """Return the elements of ``read`` at one block of flat indices."""
        return self.at(read.node, index if read.is_whole else read.locate(index))

    def at(self, node: RecipeNode, index: Tensor) -> Tensor:
        """Return the elements of ``node`` at one block of storage indices, which are computed once."""
        key = (id(node), id(index))
        if key not in self._block:
            self._block[key] = (index, node.at(index, self))
        return self._block[key][1]

    def whole(self, read: Read) -> Tensor:
        """Return the whole tensor that ``read`` describes, contiguous."""
        outer = self._block
        flat = self.elements(read, torch.arange(math.prod(read.sizes)))
        self._block = outer
        return flat.reshape(read.sizes)

    def results(self, call: CallNode) -> list[Tensor]:
        """Return the results of an operator that is computed whole, once."""
        if id(call) not in self._wholes:
            self._wholes[id(call)] = call.run(self)
        return self._wholes[id(call)]

    def read_padded(self, read: Read, index: Tensor) -> Tensor:
        """Read elements as ``read`` does, with the last index repeated up to a multiple of ``VECTOR``."""
        missing = -index.numel() % VECTOR
        filled = torch.cat([index, index[-1:].expand(missing)]) if missing else index
        return self.read(read, filled)[: index.numel()]


@dataclass(frozen=True, eq=False)
class RecipeNode(ABC):
    """The values of one storage: ``count`` elements of one dtype."""

    count: int
    dtype: torch.dtype

    @abstractmethod
    def at(self, index: Tensor, replay: Replay) -> Tensor:
        """Return the elements at flat storage indices, of one dim."""

    def sources(self) -> Iterator[RecipeNode]:
        """Return the nodes whose elements this one reads."""
        return iter(())

    @property
    def anywhere(self) -> bool:
        """Return whether every device computes the same bits, from equal bits of the nodes that it reads."""
        return True


@dataclass(frozen=True, eq=False)
class Read:
    """A tensor as a strided view of a node."""

    node: RecipeNode
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def dtype(self) -> torch.dtype:
        return self.node.dtype

    @property
    def is_whole(self) -> bool:
        """Return whether flat indices of the tensor are flat indices of the storage."""
        return self.offset == 0 and math.prod(self.sizes) == self.node.count and is_contiguous(self.sizes, self.strides)

    def locate(self, index: Tensor) -> Tensor:
        """Return flat indices of the tensor as flat indices of the storage."""
        out = torch.full_like(index, self.offset)
        for size, stride in reversed(list(zip(self.sizes, self.strides, strict=True))):
            if size > 1:
                if stride:
                    out += torch.remainder(index, size) * stride
                index = torch.div(index, size, rounding_mode="floor")
        return out

    def expand(self, sizes: Sequence[int]) -> Read:
        """Return this tensor broadcast to ``sizes``."""
        missing = len(sizes) - len(self.sizes)
        strides = [0] * missing + [
            0 if size == 1 and wanted != 1 else stride
            for size, wanted, stride in zip(self.sizes, sizes[missing:], self.strides, strict=True)
        ]
        return Read(self.node, tuple(sizes), tuple(strides), self.offset)


@dataclass(frozen=True, eq=False)
class PartsNode(RecipeNode):
    """A storage of complex numbers viewed as one of reals: real and imaginary parts in turn."""

    whole: RecipeNode

    def at(self, index: Tensor, replay: Replay) -> Tensor:
        pairs = torch.view_as_real(replay.at(self.whole, index // 2))
        return pairs.gather(1, (index % 2)[:, None])[:, 0]

    def sources(self) -> Iterator[RecipeNode]:
        yield self.whole


@dataclass(frozen=True, eq=False)
class ComplexNode(RecipeNode):
    """A storage of reals viewed as one of complex numbers."""

    parts: RecipeNode

    def at(self, index: Tensor, replay: Replay) -> Tensor:
        return torch.complex(replay.at(self.parts, index * 2), replay.at(self.parts, index * 2 + 1))

    def sources(self) -> Iterator[RecipeNode]:
        yield self.parts


def seen_as(node: RecipeNode, dtype: torch.dtype) -> RecipeNode | None:
    """Return the same storage viewed as complex numbers or as their parts, that of a literal as any dtype; None for
    other dtypes."""
    if node.dtype == dtype:
        return node
    if isinstance(node, LiteralNode) and node.flat.nbytes % dtype.itemsize == 0:
        with unset_fake_temporarily():
            flat = node.flat.view(dtype)
        return LiteralNode(flat.numel(), dtype, flat)
    if node.dtype.is_complex and node.dtype.to_real() == dtype:
        return node.parts if isinstance(node, ComplexNode) else PartsNode(node.count * 2, dtype, node)
    if dtype.is_complex and dtype.to_real() == node.dtype:
        return node.whole if isinstance(node, PartsNode) else ComplexNode(node.count // 2, dtype, node)
    return None


def in_reals(read: Read) -> Read:
    """Return a tensor in the form that programs hold: complex numbers become parts along a last dim."""
    parts = seen_as(read.node, read.dtype.to_real()) if read.dtype.is_complex else None
    if parts is None:
        return read
    return Read(parts, (*read.sizes, 2), (*(2 * stride for stride in read.strides), 1), 2 * read.offset)


def dense(node: RecipeNode, sizes: Sequence[int]) -> Read:
    """Return a node as a dense tensor in C order."""
    return Read(node, tuple(sizes), contiguous_strides(sizes), 0)


def reachable(node: RecipeNode) -> list[RecipeNode]:
    """Return a node and all nodes that it reads, directly or not, each once."""
    seen: dict[int, RecipeNode] = {}
    todo = [node]
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen[id(one)] = one
            todo.extend(one.sources())
    return list(seen.values())


def is_contiguous(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether these are the strides of a dense tensor in C order; those of dims of size 1 do not matter."""
    pairs = zip(sizes, strides, contiguous_strides(sizes), strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in pairs)


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor in C order."""
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def cast(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to ``dtype``; float64 is rounded to 16 bits through float32, as on every device."""
    if numbers.dtype == torch.float64 and dtype in (torch.bfloat16, torch.float16):
        numbers = numbers.to(torch.float32)
    return numbers.to(dtype)


# ---- kinds of nodes


# The last elements of a run, or of a thread's part of it, may be computed by other code than the rest, with another
# last bit where a function is not exactly rounded. So operators with more than one right result get whole vectors only,
# in runs short enough for one thread.
ONE_THREAD_RUN = 1 << 14  # elements; torch's kernels give no thread less than twice this


@dataclass(frozen=True, eq=False)
class Fill(RecipeNode):
    """One number everywhere. Memory that nobody wrote counts as zeros."""

    value: float | int | bool | complex

    def at(self, index: Tensor, replay: Replay) -> Tensor:
        return torch.full(index.shape, self.value, dtype=self.dtype, device=index.device)


@dataclass(frozen=True, eq=False)
class LiteralNode(RecipeNode):
    """Numbers of the module's code, of real tensors in it, or of a file that it reads."""

    flat: Tensor

    def at(self, index: Tensor, replay: Replay) -> Tensor:
        if self.flat.numel() > index.numel():
            return self.flat[index.cpu()].to(index.device)
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
    stream: list[str] = field(default_factory=list)  # the name of its stream, once the parameter that owns it is known

    def key(self, seed: int) -> int:
        """Return the key of the random stream. A draw that is read while the model is built has one of the build."""
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
    """Return a tensor as it is: the function of copies and casts."""
    return entry


@dataclass(frozen=True, eq=False)
class Elementwise(RecipeNode):
    """An operator whose element i reads only element i of its operands (a ``Read`` each, broadcast to ``sizes``)."""

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
    """A storage after ``source`` was written over the entries of a tensor of its sizes, with these strides."""

    before: RecipeNode
    source: Read
    strides: tuple[int, ...]
    offset: int

    def at(self, index: Tensor, replay: Replay) -> Tensor:
        out = torch.empty(index.shape, dtype=self.dtype, device=index.device)
        todo = index  # the storage indices that no write so far has
        places = torch.arange(index.numel(), device=index.device)  # their places in `out`
        node: RecipeNode = self
        while isinstance(node, Write):  # a loop, not recursion: writes row by row are long chains
            hit, logical = node.find(todo)
            hits = hit.nonzero().squeeze(1)
            if hits.numel():
                out[places[hits]] = replay.read_padded(node.source, logical[hits])
                rest = (~hit).nonzero().squeeze(1)
                todo, places = todo[rest], places[rest]
                if not rest.numel():
                    return out
            node = node.before
        out[places] = replay.read_padded(dense(node, (node.count,)), todo)
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
    """An operator that is computed whole. Its results come first, then the arguments that it writes."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: tuple[int, ...]  # places among the flattened arguments
    draw: Draw | None  # the stream, when it is random

    def run(self, replay: Replay) -> list[Tensor]:
        """Return all results, contiguous, computed on one thread: they must not depend on how many a rank has."""
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
        return replay.results(self.call)[self.place].reshape(-1)[index].to(self.dtype)

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
