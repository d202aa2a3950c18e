"""Guesses of a model's inputs: the tensors that its first layers might read, the likeliest first.

A picture may be read by a convolution, or cut into patches before the first product: of a width of 192 it has patches
of 8 x 8 with three channels, or of 4 x 4 with twelve. Tables of positions tell how many patches there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parc.compiler.sizes.size_range import BATCH

_PICTURES = (32, 64, 224, 28, 16)
_VOLUMES = (16, 32, 64)
_FRAMES = 4
_MOST_FRAMES = 64
_SOUND = 16000
_MOST = 400
"""The most guesses for one input."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A tensor for one parameter of a forward: its dtype, and its dims, each a number or the name of a size. ``place``
    is the parameter's name where the input has another, as for a forward that takes ``*inputs``."""

    dtype: str
    dims: tuple[int | str, ...]
    place: str = ""

    def text(self) -> str:
        """Return the type and the dims as an ``input`` line has them."""
        return f"{self.dtype} [{', '.join(map(str, self.dims))}]"


@dataclass(frozen=True, slots=True)
class ReadLayers:
    """The layers of a model, as far as they tell its inputs: dims and channels of convolutions, widths of linear
    layers, of recurrent ones and of patches. ``lookups``: it has embeddings; ``tokens_first``: before convolutions;
    ``attention``: it reads sequences; ``real``: the dtype of its weights; ``counts``: lengths of tables of
    positions."""

    channels: tuple[tuple[int, int], ...]
    widths: tuple[int, ...]
    recurrent: tuple[int, ...]
    patched: tuple[int, ...]
    counts: tuple[int, ...]
    lookups: bool
    tokens_first: bool
    attention: bool
    real: str

    @classmethod
    def of(cls, module: nn.Module) -> ReadLayers:
        """Read a model's layers in their order."""
        layers = list(module.modules())
        convolutions = [layer for layer in layers if isinstance(layer, torch.nn.modules.conv._ConvNd)]
        tables = [layer for layer in layers if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))]
        first = next((layer for layer in layers if layer in convolutions or layer in tables), None)
        recurrent = [layer for layer in layers if isinstance(layer, (nn.RNNBase, nn.RNNCellBase))]
        reals = [weight.dtype for weight in module.parameters() if weight.is_floating_point()]
        return cls(
            tuple(dict.fromkeys((len(layer.kernel_size), layer.in_channels) for layer in convolutions)),
            tuple(dict.fromkeys(layer.in_features for layer in layers if isinstance(layer, nn.Linear))),
            tuple(dict.fromkeys(int(layer.input_size) for layer in recurrent)),
            tuple(dict.fromkeys(width for layer in layers if (width := _read_width(layer))))[:4],
            _table_lengths(module),
            bool(tables),
            first in tables,
            any(isinstance(layer, nn.MultiheadAttention) for layer in layers),
            "float64" if reals[:1] == [torch.float64] else "float32",
        )

    def guesses(self, numbers: Sequence[int]) -> list[Guess]:
        """Return the tensors that such layers read; ``numbers`` are those in the model's attributes."""
        tokens = [(BATCH, "S")] if self.lookups else []
        guesses: dict[Guess, None] = {}
        for dims in (*(tokens if self.tokens_first else ()), *self._reals(numbers)):
            if dims == (BATCH,):
                guesses[Guess("int64", dims)] = None
            whole = dims == (BATCH, "S") and self.lookups
            guesses[Guess("int64" if whole else self.real, dims)] = None
        return list(guesses)[:_MOST]

    def _reals(self, numbers: Sequence[int]) -> Iterator[tuple[int | str, ...]]:
        for width in self.recurrent[:1]:
            yield from ((BATCH, "S", width), (BATCH, "S"), (BATCH, width)) if width == 1 else ((BATCH, "S", width),)
        for rank, channels in self.channels[:3]:
            yield from _signals(channels, numbers) if rank == 1 else _pictures(rank, channels, numbers)
        yield from [(BATCH, "S")] if self.lookups else []
        for width in self.widths[:8]:
            each: tuple[tuple[int | str, ...], ...] = (BATCH, width), (BATCH, "S", width)
            yield from reversed(each) if self.attention else each
        yield (BATCH,)
        yield from (("S", width) for width in (3, 2))
        for length in numbers[:12]:
            yield from ((BATCH, length, width) for width in (*self.widths[:4], *numbers[:4]))
        for width in self.widths[:8]:
            yield from ((BATCH, width // number) for number in numbers if width % number == 0 and width > number)
        for rank, channels in self.channels[:2]:
            yield from _clips(channels, numbers) if rank > 1 else ()
        for width in self.patched:
            yield from _patched(width, numbers, self.counts)


def _read_width(layer: nn.Module) -> int:
    """Return the length of the last dim that a layer reads, 0 if it does not say."""
    if isinstance(layer, nn.Linear):
        return layer.in_features
    if isinstance(layer, nn.LayerNorm):
        return int(layer.normalized_shape[-1])
    return layer.in_channels if isinstance(layer, torch.nn.modules.conv._ConvNd) else 0


def _table_lengths(module: nn.Module) -> tuple[int, ...]:
    """Return the lengths of tables that are no layer's weights, as those of positions, with and without one more for a
    class."""
    tables: list[Any] = [value for name, value in module.named_parameters() if name.rpartition(".")[2] != "weight"]
    tables += [value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor)]
    tables += [*module.buffers(), *(layer.weight for layer in module.modules() if isinstance(layer, nn.Embedding))]
    lengths = (size for table in tables if 2 <= table.dim() <= 4 for size in table.shape[:-1])
    return tuple(dict.fromkeys(length for size in lengths for length in (size, size - 1) if length > 1))[:12]


def _signals(channels: int, numbers: Sequence[int]) -> Iterator[tuple[int | str, ...]]:
    if channels == 1:
        yield (BATCH, _SOUND)
    lengths: tuple[int | str, ...] = ("S", *numbers, *(2 * size for size in numbers))
    for length in dict.fromkeys(lengths):
        yield (BATCH, channels, length)


def _pictures(rank: int, channels: int, numbers: Sequence[int]) -> Iterator[tuple[int | str, ...]]:
    sides = (_PICTURES[0], *numbers, *_PICTURES) if rank == 2 else (*_VOLUMES, *numbers)
    for side in dict.fromkeys(sides):
        yield (BATCH, channels, *(side,) * rank)


def _clips(channels: int, numbers: Sequence[int]) -> Iterator[tuple[int | str, ...]]:
    """Yield videos: frames first, or channels."""
    sides = [side for side in dict.fromkeys((_PICTURES[0], *numbers, *_PICTURES)) if side >= _PICTURES[-1]]
    for frames in dict.fromkeys((_FRAMES, *(number for number in numbers if number <= _MOST_FRAMES))):
        for side in sides[:6]:
            yield (BATCH, frames, channels, side, side)
            yield (BATCH, channels, frames, side, side)


def _patched(width: int, numbers: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[int | str, ...]]:
    """Yield the pictures, videos and signals of which patches have so many numbers."""
    for channels in (3, 1, 4, 2):
        for patch in _sides(width, channels):
            for side in _whole_pictures(patch, numbers, counts):
                yield (BATCH, channels, side, side)
    for channels in (3, 1):
        for depth in (2, 4, 1, 8):
            for patch in _sides(width, channels * depth):
                for frames, side in _whole_clips(patch, numbers, counts):
                    yield (BATCH, channels, frames * depth, side, side)
                    yield (BATCH, frames * depth, channels, side, side)
    for channels in (3, 1):
        if width % channels == 0:
            yield from ((BATCH, channels, width // channels * count) for count in (*counts[:4], 4))


def _sides(width: int, channels: int) -> list[int]:
    """Return the side of square patches of so many numbers in so many channels, if there is one."""
    side = math.isqrt(width // channels)
    return [side] if side > 1 and channels * side * side == width else []


def _whole_pictures(patch: int, numbers: Sequence[int], counts: Sequence[int]) -> Iterator[int]:
    roots = [math.isqrt(count) for count in counts if math.isqrt(count) ** 2 == count]
    usual = [4 * patch, 8 * patch, *(number for number in numbers if number % patch == 0)]
    sides = [*(patch * root for root in roots if root > 1), *usual]
    yield from (side for side in dict.fromkeys(sides) if patch < side <= 1024)


def _whole_clips(patch: int, numbers: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the frames of videos, in units of the frames of a patch, and the sides of their pictures."""
    for count in counts:
        for frames in (frames for frames in range(1, 17) if count % frames == 0):
            root = math.isqrt(count // frames)
            if root > 1 and root * root * frames == count:
                yield frames, root * patch
    frames_alone = [count for count in counts if count <= 16]
    yield from ((frames, side) for frames in (*frames_alone, 2) for side in _whole_pictures(patch, numbers, counts))


def model_numbers(module: nn.Module) -> tuple[int, ...]:
    """Return the whole numbers among a model's attributes and in its configuration, which may be sizes of inputs."""
    holders: list[Any] = [getattr(module, "config", None), *module.modules()]
    numbers: dict[int, None] = {}
    for holder in holders[:200]:
        for value in list(vars(holder).values() if hasattr(holder, "__dict__") else ()):
            for number in value if isinstance(value, (tuple, list)) and len(value) < 5 else [value]:
                if type(number) is int and 2 <= number <= 4096:
                    numbers[number] = None
    return tuple(numbers)


def named_dims(shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int | str, ...]:
    """Return the dims of a batched tensor; the second is named `S` if it is as long as sequences."""
    return tuple(
        BATCH if at == 0 else "S" if at == 1 and size == sizes["S"] else int(size) for at, size in enumerate(shape)
    )
