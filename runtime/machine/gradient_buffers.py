"""Buffers of gradients: gradients that ranks sum in one message are made one behind the other in one buffer, so that
the message is one sum and nothing is copied for it.

    grad_up = mm(x, grad)       # entries 0 to 511 of the buffer of message 1
    grad_down = mm(h, grad)     # entries 512 to 1023
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch

from ...compiler.layout.mesh import Shape
from ...compiler.program.program import Program
from ...compiler.program.together import gradients_together
from ...compiler.program.totals import LineChoice


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


@final
class GradientBuffers:
    """The buffers of a program's gradients, each of one message and one dtype. ``chosen`` lines can make them in
    a given place; ``read`` returns the dtype as which a machine reads one of the program."""

    def __init__(
        self,
        program: Program,
        chosen: LineChoice,
        read: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
    ) -> None:
        self._lying = gradients_together(program, chosen, read)

    def __bool__(self) -> bool:
        return bool(self._lying)

    def parts(self, device: torch.device) -> Iterator[tuple[str, BufferPart]]:
        """Yield the names of the gradients, each with its part of a new buffer, which takes no memory yet."""
        for gradients in self._lying:
            buffer = _Buffer(gradients[0].dtype, device)
            for gradient in gradients:
                yield gradient.name, BufferPart(buffer, buffer.entries, gradient.shape)
                buffer.entries += math.prod(gradient.shape)
