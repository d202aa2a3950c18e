"""Buffers of gradients: gradients that ranks sum in one message are made one behind the other in one buffer, so that
the message is one sum and nothing is copied for it.

    grad_up = mm(x, grad)       # entries 0 to 511 of the buffer of message 1
    grad_down = mm(h, grad)     # entries 512 to 1023
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch

from ...compiler.analysis.lifetimes import LyingGradient
from ...compiler.layout.mesh import Shape


@dataclass(slots=True)
class _Buffer:
    """The memory of one message's gradients of one dtype. It is allocated when the first of them is made."""

    dtype: torch.dtype
    device: torch.device
    entries: int = 0
    memory: torch.Tensor | None = None


@final
@dataclass(frozen=True, slots=True)
class BufferPart:
    """The part of a buffer that is for one gradient, from its entry ``begin`` on."""

    buffer: _Buffer
    begin: int
    shape: Shape

    def tensor(self) -> torch.Tensor:
        """Return the part, whose entries are not yet set."""
        buffer = self.buffer
        if buffer.memory is None:
            buffer.memory = torch.empty(buffer.entries, dtype=buffer.dtype, device=buffer.device)
        return buffer.memory[self.begin : self.begin + math.prod(self.shape)].view(self.shape)


def buffer_parts(together: Iterable[Sequence[LyingGradient]], device: torch.device) -> Iterator[tuple[str, BufferPart]]:
    """Yield the names of gradients that lie together, each with its part of a new buffer, which takes no memory yet."""
    for gradients in together:
        buffer = _Buffer(gradients[0].dtype, device)
        for gradient in gradients:
            yield gradient.name, BufferPart(buffer, buffer.entries, gradient.shape)
            buffer.entries += math.prod(gradient.shape)
