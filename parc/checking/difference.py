"""The first difference: the first line of the forward whose value on all ranks is not one of the captured graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from parc.compiler.layout.mesh import Mesh
from parc.compiler.ops.rules import facts
from parc.compiler.program.actions import FORWARD
from parc.compiler.program.blocks import complete
from parc.compiler.program.program import Line
from parc.runtime.compare.agreement import TOLERANCE
from parc.runtime.compare.model_run import Case, ReferenceRun
from parc.runtime.compare.simulate import Simulation
from parc.runtime.data.random_batch import random_batch
from parc.runtime.ranks.gather import whole_tensor
from parc.runtime.step import Stepper

LinePlace = tuple[str, str, str, int]
"""The place of a line: module, source line, operator, number of elements."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first line whose whole value equals none that the captured graph has for its operator and place in code."""

    line: Line
    module: str

    def __str__(self) -> str:
        value = next(value.name for value in self.line.results if value is not None)
        origin = self.line.origin
        plan = f", placed by line {origin.plan} of the plan" if origin.plan else ""
        return f"`{value}` = {self.line.op} in `{self.module or 'model'}` at {origin.source}{plan}"


@dataclass(slots=True)
class _Seen:
    line: Line
    module: str
    signatures: list[tuple[float, ...]]
    sizes: list[int]


@final
class _Watch:
    """A hook that notes signatures of whole values. The call of a repeated block completes the names of modules in it:
    ``layers.*`` becomes ``layers.3``."""

    def __init__(self, mesh: Mesh, ranks: Sequence[int]) -> None:
        self.mesh, self.ranks = mesh, ranks
        self.seen: list[_Seen] = []
        self._open = 0

    def __call__(self, line: Line, environments: Sequence[Mapping[str, Any]]) -> None:
        if line.calls_function:
            for seen in self.seen[self._open :]:
                seen.module = complete(seen.module, line.origin.module)
            self._open = len(self.seen)
            return
        if not line.origin.source:
            return
        signatures, sizes = [], []
        for value in line.results:
            if value is not None and value.type.dtype.is_floating_point:
                pieces = [environment[value.name].detach() for environment in environments]
                held = dict(zip(self.ranks, pieces, strict=True))
                whole = pieces[0] if self.mesh.world == 1 else whole_tensor(held, value.type.placement, self.mesh)
                signatures.append(_signature(whole))
                sizes.append(whole.numel())
        if signatures:
            self.seen.append(_Seen(line, line.origin.module, signatures, sizes))


def _signature(tensor: torch.Tensor) -> tuple[float, ...]:
    """Return sums of a tensor's powers, which do not depend on its layout."""
    flat = tensor.reshape(-1).double()
    return (*(float((flat.abs() ** power).sum()) for power in (1, 2, 3)), float(flat.sum()))


def first_difference(case: Case) -> Difference | None:
    """Run the first microbatch's forward on all ranks and on one device, and compare; return None if no line
    differs."""
    batches = random_batch(case.reference, case.microbatches, torch.Generator().manual_seed(0))
    unsharded = _Watch(Mesh(), [0])
    reference = ReferenceRun(case)
    reference.machine.watch = unsharded
    reference.step(batches[:1], 0)
    simulation = Simulation(case)
    by_stage: dict[int, _Watch] = {}
    for stepper, backend in zip(simulation.steppers, simulation.backends, strict=True):
        for name, machine in stepper.machines.items():
            if machine.program.action == FORWARD:
                watch = by_stage[int(name[:-1] or 0)] = _Watch(case.mesh, backend.ranks)
                machine.watch = watch
    simulation.run(Stepper.loss, batches, 0)
    known: dict[LinePlace, list[tuple[float, ...]]] = {}
    for seen in unsharded.seen:
        for signature, size in zip(seen.signatures, seen.sizes, strict=True):
            place = (seen.module, seen.line.origin.source, seen.line.op, size)
            known.setdefault(place, []).append(signature)
    for seen in (seen for stage in sorted(by_stage) for seen in by_stage[stage].seen):
        op = facts(seen.line.op).stands_for or seen.line.op
        candidates = known.get((seen.module, seen.line.origin.source, op, seen.sizes[0]), ())
        if candidates and not any(_alike(seen.signatures[0], other) for other in candidates):
            return Difference(seen.line, seen.module)
    return None


def _alike(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    scale = max(first[0], second[0], 1e-30)
    sums = abs(first[0] - second[0]) <= TOLERANCE * scale and abs(first[3] - second[3]) <= TOLERANCE * scale
    powers = all(abs(a - b) <= TOLERANCE * max(a, b, 1e-30) for a, b in zip(first[1:3], second[1:3], strict=True))
    return sums and powers
