"""Cost: bytes that a rank holds, by liveness over its programs. Units are in names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .placement import TensorType
from .program import Function, Program

# These look at their operand's storage in another shape, so they hold nothing of their own.
VIEWS = frozenset({
    "aten.reshape.default", "aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.unsqueeze.default",
    "aten.squeeze.dim", "aten.squeeze.default", "aten.squeeze.dims", "aten.expand.default", "aten.slice.Tensor",
    "aten.select.int", "aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank. ``activations`` is the most that is alive beside the rest, during forward and backward."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def peak_bytes(self) -> int:
        """All together."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def local_bytes(type_: TensorType, program: Program) -> int:
    """Bytes of one rank's piece."""
    return math.prod(type_.local(program.mesh)) * type_.dtype.itemsize


class _Liveness:
    """Peak bytes of a program's functions, each looked at once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.peaks: dict[str, int] = {}

    def peak(self, function: Function) -> int:
        """The most that a function's own values hold at once, results included, parameters not."""
        if function.name in self.peaks:
            return self.peaks[function.name]
        last: dict[str, int] = {name: len(function.lines) for _, name in function.returns}
        for index, line in enumerate(function.lines):
            for name in line.uses():
                last[name] = max(last.get(name, 0), index)
        # a view keeps its source alive
        source: dict[str, str] = {}
        sizes: dict[str, int] = {}
        for index, line in reversed(list(enumerate(function.lines))):
            if line.op in VIEWS:
                owner = next(line.uses())
                for value in line.results:
                    if value is not None:
                        source[value.name] = owner
                        last[owner] = max(last.get(owner, 0), last.get(value.name, index))
        live = most = 0
        dying: dict[int, int] = {}
        for index, line in enumerate(function.lines):
            inner = self.peak(self.program.function(line.op)) if line.calls_function else 0
            made = 0
            for value in line.results:
                if value is None or value.name in source:
                    continue
                sizes[value.name] = local_bytes(value.type, self.program)
                made += sizes[value.name]
                end = last.get(value.name, index)
                dying[end] = dying.get(end, 0) + sizes[value.name]
            most = max(most, live + max(made, inner))
            live += made - dying.get(index, 0)
        self.peaks[function.name] = most
        return most


def estimate_memory(
    programs: Mapping[str, Program], stored: Mapping[str, TensorType], moments: Mapping[str, int]
) -> Memory:
    """Memory of a rank that runs its microbatches one after the other; ``moments`` says how many tensors of optimizer
    state each parameter has."""
    forward, backward = programs["F"], programs["B"]
    sizes = {name: local_bytes(type_, forward) for name, type_ in stored.items()}
    optimizer = sum(moments.get(name, 0) * size for name, size in sizes.items())
    values = backward.main.values()
    gradients = sum(local_bytes(values[name].type, backward) for _, name in backward.main.returns)
    kept = forward.main.values()
    saved = sum(local_bytes(kept[name].type, forward) for key, name in forward.main.returns if key.startswith("saved "))
    transient = max(_Liveness(forward).peak(forward.main), saved + _Liveness(backward).peak(backward.main))
    return Memory(sum(sizes.values()), gradients, optimizer, transient)
