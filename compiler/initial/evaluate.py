"""The evaluation of recorded tensors: a graph of draws, constants and operators, computed at chosen elements only.

A *node* gives the elements of one storage by flat index; a *read* is a strided look at a node, as a tensor is at its
storage. So views need no rules of their own, and writing through one is a node that asks two others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 1 << 15  # elements evaluated at once: in the cache, and too few for torch to wake a second thread
_GPU_BLOCK = 1 << 22  # elements evaluated at once on a GPU: enough to fill it, and what is made of them takes 1 GiB
VECTOR = 128  # every evaluation is filled up to a multiple of this: see `Elementwise`


class Replay:
    """One evaluation: the seed of all draws, and what has been computed so far."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._wholes: dict[int, list[Tensor]] = {}
        self._block: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def elements(self, read: Read, index: Tensor, device: torch.device | None = None) -> Tensor:
        """The elements of ``read`` at flat indices (int64, one dim, any number), evaluated block by block on a device,
        or on that of the indices."""
        device = device or index.device
        out = torch.empty(index.numel(), dtype=read.dtype, device=device)
        block = BLOCK if device.type == "cpu" else _GPU_BLOCK
        for start in range(0, index.numel(), block):
            part = index[start : start + block].to(device)
            self._block = {}
            out[start : start + part.numel()] = self.any_number(read, part)
        self._block = {}
        return out

    def read(self, read: Read, index: Tensor) -> Tensor:
        """The elements of ``read`` at one block of flat indices."""
        return self.at(read.node, index if read.is_whole else read.locate(index))

    def at(self, node: RecipeNode, index: Tensor) -> Tensor:
        """The elements of ``node`` at one block of storage indices; a second request is answered from memory."""
        key = (id(node), id(index))
        if key not in self._block:
            self._block[key] = (index, node.at(index, self))
        return self._block[key][1]

    def whole(self, read: Read) -> Tensor:
        """The whole tensor that ``read`` describes, contiguous."""
        outer = self._block
        flat = self.elements(read, torch.arange(math.prod(read.sizes)))
        self._block = outer
        return flat.reshape(read.sizes)

    def once(self, owner: object, compute: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The result of ``compute`` for ``owner``, kept for as long as this evaluation lives."""
        if id(owner) not in self._wholes:
            self._wholes[id(owner)] = compute()
        return self._wholes[id(owner)]

    def any_number(self, read: Read, index: Tensor) -> Tensor:
        """Read elements, as ``read`` does, of indices whose number is not a multiple of ``VECTOR``: the last one is
        read again."""
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
        """The elements at flat storage indices, of one dim."""

    def sources(self) -> Iterator[RecipeNode]:
        """The nodes whose elements this one reads."""
        return iter(())

    @property
    def anywhere(self) -> bool:
        """Return whether every device computes the same bits of it, from equal bits of what it reads."""
        return True


@dataclass(frozen=True, eq=False)
class Read:
    """A tensor as a strided look at a node."""

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
        """Flat indices of the tensor as flat indices of the storage."""
        out = torch.full_like(index, self.offset)
        for size, stride in reversed(list(zip(self.sizes, self.strides, strict=True))):
            if size > 1:
                if stride:
                    out += torch.remainder(index, size) * stride
                index = torch.div(index, size, rounding_mode="floor")
        return out

    def expand(self, sizes: Sequence[int]) -> Read:
        """This tensor broadcast to ``sizes``."""
        missing = len(sizes) - len(self.sizes)
        strides = [0] * missing + [
            0 if mine == 1 and wanted != 1 else stride
            for mine, wanted, stride in zip(self.sizes, sizes[missing:], self.strides, strict=True)
        ]
        return Read(self.node, tuple(sizes), tuple(strides), self.offset)


@dataclass(frozen=True, eq=False)
class PartsNode(RecipeNode):
    """A storage of complex numbers, seen as one of reals: real and imaginary parts in turn."""

    whole: RecipeNode

    def at(self, index: Tensor, replay: Replay) -> Tensor:
        pairs = torch.view_as_real(replay.at(self.whole, index // 2))
        return pairs.gather(1, (index % 2)[:, None])[:, 0]

    def sources(self) -> Iterator[RecipeNode]:
        yield self.whole


@dataclass(frozen=True, eq=False)
class Joined(RecipeNode):
    """A storage of reals seen as one of complex numbers."""

    parts: RecipeNode

    def at(self, index: Tensor, replay: Replay) -> Tensor:
        return torch.complex(replay.at(self.parts, index * 2), replay.at(self.parts, index * 2 + 1))

    def sources(self) -> Iterator[RecipeNode]:
        yield self.parts


def seen_as(node: RecipeNode, dtype: torch.dtype) -> RecipeNode | None:
    """Return the same storage in another dtype: complex numbers as their parts, or parts as complex numbers; None for
    others."""
    if node.dtype == dtype:
        return node
    if node.dtype.is_complex and node.dtype.to_real() == dtype:
        return node.parts if isinstance(node, Joined) else PartsNode(node.count * 2, dtype, node)
    if dtype.is_complex and dtype.to_real() == node.dtype:
        return node.whole if isinstance(node, PartsNode) else Joined(node.count // 2, dtype, node)
    return None


def in_reals(read: Read) -> Read:
    """Return a tensor in the form that programs hold: complex numbers become parts along a last dim."""
    parts = seen_as(read.node, read.dtype.to_real()) if read.dtype.is_complex else None
    if parts is None:
        return read
    return Read(parts, (*read.sizes, 2), (*(2 * stride for stride in read.strides), 1), 2 * read.offset)


def dense(node: RecipeNode, sizes: Sequence[int]) -> Read:
    """A node as a dense tensor in C order."""
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
    """Return whether these strides are those of a dense tensor in C order; dims of size 1 do not count."""
    pairs = zip(sizes, strides, contiguous_strides(sizes), strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in pairs)


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor in C order."""
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def cast(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to ``dtype``. To 16 bits it goes through float32, as on every device."""
    if numbers.dtype == torch.float64 and dtype in (torch.bfloat16, torch.float16):
        numbers = numbers.to(torch.float32)
    return numbers.to(dtype)
