"""Buffers of gradients: gradients that ranks sum in one message are made one behind the other in one buffer, so that
the message is one sum and nothing is copied for it.

    grad_up = mm(x, grad)       # entries 0 to 511 of the buffer of message 1
    grad_down = mm(h, grad)     # entries 512 to 1023
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch

from ...compiler.layout.collectives import MESSAGE, SUMS
from ...compiler.layout.mesh import Shape
from ...compiler.program.program import Program
from ...compiler.program.totals import adds_up

_ALIGNED = 64
"""The bytes of which every part begins at a multiple, as torch's own allocations do: products are slower elsewhere."""


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


@dataclass(frozen=True, slots=True)
class _Gradient:
    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def aligns(self) -> bool:
        """True where what lies behind the gradient is aligned if the gradient is."""
        return math.prod(self.shape) * self.dtype.itemsize % _ALIGNED == 0


@final
class GradientBuffers:
    """The buffers of a program's gradients, each of one message and one dtype. ``able`` are the gradients that can be
    made in a given place; ``read`` returns the dtype as which a machine reads one of the program."""

    def __init__(
        self, program: Program, able: Collection[str], read: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype
    ) -> None:
        together: dict[tuple[object, torch.dtype], list[_Gradient]] = {}
        for message, name in _sent(program):
            if name in able:
                type_ = program.main.values()[name].type
                gradient = _Gradient(name, type_.local(program.mesh), read(type_.dtype))
                together.setdefault((message, gradient.dtype), []).append(gradient)
        lying = map(_in_order, together.values())
        self._lying = [gradients for gradients in lying if len(gradients) > 1]

    def __bool__(self) -> bool:
        return bool(self._lying)

    def parts(self, device: torch.device) -> Iterator[tuple[str, BufferPart]]:
        """Yield the names of the gradients, each with its part of a new buffer, which takes no memory yet."""
        for gradients in self._lying:
            buffer = _Buffer(gradients[0].dtype, device)
            for gradient in gradients:
                yield gradient.name, BufferPart(buffer, buffer.entries, gradient.shape)
                buffer.entries += math.prod(gradient.shape)


def _in_order(gradients: Sequence[_Gradient]) -> list[_Gradient]:
    """Return the gradients that can lie one behind the other, in that order: at most the last does not align."""
    others = [gradient for gradient in gradients if not gradient.aligns]
    return [*(gradient for gradient in gradients if gradient.aligns), *others[:1]]


def _sent(program: Program) -> Iterator[tuple[object, str]]:
    """Yield the number of each message that sums gradients, with the name of each gradient in it. With several
    microbatches that is the name of the last one's, which is added to the others."""
    if (last := program.last) is None:
        return
    added = {line.made[0].name: [*line.uses()][1] for line in last.lines if adds_up(last, line)}
    for line in last.lines:
        message = dict(line.kwargs).get(MESSAGE)
        if message is not None and line.op == SUMS[0]:
            (name,) = line.uses()
            yield message, added.get(name, name)
