"""Gradients that lie together: those that ranks sum in one message, and that a machine makes one behind the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..layout.collectives import MESSAGE, SUMS
from ..layout.mesh import Shape
from ..ops.rules import facts
from .aliases import adds_up
from .products import Products
from .program import Function, Line, Program
from .totals import LineChoice, addable

_ALIGNED = 64
"""The bytes of which every part begins at a multiple, as torch's own allocations do: products are slower elsewhere."""


@dataclass(frozen=True, slots=True)
class LyingGradient:
    """A gradient on one rank that lies in a buffer with others."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def aligns(self) -> bool:
        """True where what lies behind the gradient is aligned if the gradient is."""
        return math.prod(self.shape) * self.dtype.itemsize % _ALIGNED == 0


def made_in_place(op: str) -> bool:
    """Return whether a machine can make an operator's result in a given place: it is a product that can be added to a
    total."""
    return facts(op).addable and facts(op).precision == "product"


def gradients_together(
    program: Program,
    chosen: LineChoice,
    read: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
) -> list[list[LyingGradient]]:
    """Return the gradients of each message and dtype that lie one behind the other, in that order. ``chosen`` lines
    make them; ``read`` returns the dtype as which a machine reads one of the program."""
    able = addable(program, chosen)[program.main.name]
    together: dict[tuple[object, torch.dtype], list[LyingGradient]] = {}
    for message, name in _sent(program):
        if name in able:
            type_ = program.main.values()[name].type
            gradient = LyingGradient(name, type_.local(program.mesh), read(type_.dtype))
            together.setdefault((message, gradient.dtype), []).append(gradient)
    lying = map(_in_order, together.values())
    return [gradients for gradients in lying if len(gradients) > 1]


def buffers_within(program: Program, products: Products) -> dict[str, dict[str, int]]:
    """Return, for each function, the number of the buffer of each value that is made in one. The calls of a function
    are taken to be alike."""

    def in_place(function: Function, line: Line) -> bool:
        return made_in_place(line.op) and not products.apart(line, function, program.mesh)

    lying = {value.name: at for at, values in enumerate(gradients_together(program, in_place)) for value in values}
    within: dict[str, dict[str, int]] = {function.name: {} for function in program.functions}
    within.update((main.name, dict(lying)) for main in program.mains)
    for function in reversed(program.functions) if lying else ():  # callers first
        for line in (line for line in function.lines if line.calls_function):
            callee = program.function(line.op)
            for value, (_, name) in zip(line.results, callee.returns, strict=True):
                if value is not None and value.name in within[function.name]:
                    within[callee.name].setdefault(name, within[function.name][value.name])
    return within


def _in_order(gradients: Sequence[LyingGradient]) -> list[LyingGradient]:
    """Return the gradients that can lie one behind the other, in that order: at most the last does not align."""
    others = [gradient for gradient in gradients if not gradient.aligns]
    return [*(gradient for gradient in gradients if gradient.aligns), *others[:1]]


def _sent(program: Program) -> Iterator[tuple[object, str]]:
    """Yield the number of each message that sums gradients, with the name of each gradient in it. With several
    microbatches that is the name of the last one's, which is added to the others."""
    if (last := program.last) is None:
        return
    added = {line.made[0].name: line.uses[1] for line in last.lines if adds_up(last, line)}
    for line in last.lines:
        message = dict(line.kwargs).get(MESSAGE)
        if message is not None and line.op == SUMS[0]:
            (name,) = line.uses
            yield message, added.get(name, name)
