"""Makers: the functions that make the programs of each kind of action."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import TensorType
from ...compiler.program.actions import (
    AVERAGING,
    BACKWARD,
    COUNTING,
    FORWARD,
    LOADS,
    REDUCE,
    RESCALE,
    SCALING,
    UNSHARD,
    Purpose,
    StageRanks,
    step_kinds,
)
from ...compiler.program.binding import Binding
from ...compiler.program.program import Program
from ...compiler.program.roles import SINGLE, Programs
from ...compiler.program.step_values import DYNAMIC, Bias, LossScale
from ..calls import outputs
from .assemble import Assembled, assemble_count
from .compress import Compressor
from .cut import Pipeline
from .loads import load_programs
from .reduce import losses, norm_dtype, reductions
from .scales import rescale_program, scale_program
from .segments import node_type
from .weights import unshard


@dataclass(frozen=True, slots=True)
class StepParts:
    """The materials of a step's programs: the typed graphs of the forward and of the count of targets, where there is
    one, and the work of every stage."""

    mesh: Mesh
    graph: fx.Graph
    count: fx.Graph | None
    counts: tuple[Binding, ...]
    """The denominators that ``count`` makes."""
    averaged: int
    """The number of parts of which the loss is the mean, where no count divides it."""
    microbatches: int
    made: Assembled
    pipeline: Pipeline | None
    loss_scale: LossScale = None
    compressor: Compressor = field(default_factory=Compressor)
    biases: Mapping[str, Bias] = field(default_factory=dict)
    """The biases that balance experts, by the module of these."""

    @property
    def ranks(self) -> StageRanks:
        """The number of the role that has each stage."""
        return self.pipeline.ranks if self.pipeline is not None else (0,)

    @property
    def roles(self) -> Sequence[str]:
        """The names of the roles."""
        axis = self.pipeline.axis if self.pipeline is not None else ""
        return [f"{axis}{rank}" for rank in range(self.mesh.size(axis))] if axis else [SINGLE]


Maker = Callable[[StepParts], Sequence[Program]]
"""A function that makes the programs of a kind: one for the whole step, or for each stage, or for each role, as its row
says; none where the step does not have the kind."""


def _count(parts: StepParts) -> Sequence[Program]:
    return [] if parts.count is None else [assemble_count(parts.count, parts.counts, parts.mesh, SINGLE)]


def _scale(parts: StepParts) -> Sequence[Program]:
    made = outputs(parts.count) if parts.count is not None else []
    counts = {key: node_type(node) for key, node in zip(parts.counts, made, strict=True)}
    weights = [noted(node).binding for node in parts.graph.find_nodes(op="placeholder")]
    terms = [key for key in weights if key.kind == "term"]
    dtype: torch.dtype = node_type(outputs(parts.graph)[0]).dtype
    scaled = parts.loss_scale is not None
    return [scale_program(counts, terms, parts.microbatches, dtype, parts.averaged, parts.mesh, SINGLE, scaled)]


def _rescale(parts: StepParts) -> Sequence[Program]:
    """Return RESCALE, where the loss scale is dynamic."""
    return [rescale_program(norm_dtype(parts.graph), parts.mesh, SINGLE)] if parts.loss_scale == DYNAMIC else []


def _work(kind: str) -> Maker:
    return lambda parts: [work[kind] for work in parts.made.work]


def _unshard(parts: StepParts) -> Sequence[Program]:
    """Return UNSHARD of every role, if any role has something to make in it."""
    read: dict[str, set[Binding]] = {name: set() for name in parts.roles}
    for at, work in enumerate(parts.made.work):
        for program in work.values():
            read[parts.roles[parts.ranks[at]]].update(program.main.bindings)
    programs = [unshard(parts.graph, parts.mesh, name, keys) for name, keys in read.items()]
    return programs if any(program.main.lines for program in programs) else []


def _loads(parts: StepParts) -> Sequence[Program]:
    """Return LOADS of every role, where the model routes tokens to experts."""
    made: list[dict[str, TensorType]] = [{} for _ in parts.roles]
    for rank, work in zip(parts.ranks, parts.made.work, strict=True):
        main = work[FORWARD].main
        values = main.values()
        made[rank].update((module, values[name].type) for module, name in main.returned("load").items())
    nodes = parts.graph.find_nodes(op="placeholder")
    buffers = {noted(node).binding.name: node_type(node) for node in nodes if noted(node).binding.kind == "buffer"}
    axis = parts.pipeline.axis if parts.pipeline is not None else ""
    order = [key.name for key in noted(parts.graph.output_node()).results if key.kind == "load"]
    return load_programs(made, order, parts.biases, buffers, parts.mesh, parts.roles, axis)


MAKERS: dict[str, Maker] = {
    LOADS: _loads,
    COUNTING: _count,
    SCALING: _scale,
    UNSHARD: _unshard,
    FORWARD: _work(FORWARD),
    BACKWARD: _work(BACKWARD),
    AVERAGING: lambda parts: [*losses(parts.mesh, parts.made, parts.pipeline, parts.loss_scale is not None)],
    REDUCE: lambda parts: [
        *reductions(parts.graph, parts.mesh, parts.made, parts.pipeline, parts.loss_scale is not None, parts.compressor)
    ],
    RESCALE: _rescale,
}


def make_roles(parts: StepParts, purpose: Purpose = "training") -> dict[str, Programs]:
    """Return the programs of every role that serve a purpose: those that all share, its stages' work and its own."""
    roles: dict[str, dict[str, Program]] = {name: {} for name in parts.roles}
    for row in step_kinds():
        if not row.serves(purpose):
            continue
        for at, program in enumerate(MAKERS[row.kind](parts) if row.program else ()):
            key = f"{at}{row.kind}" if row.program == "stage" and parts.pipeline is not None else row.kind
            for name in _holders(row.program, at, parts):
                roles[name][key] = program
    return dict(roles)


def _holders(program: str, at: int, parts: StepParts) -> Sequence[str]:
    """Return the roles that have the program of number ``at`` of a kind."""
    if program == "step":
        return parts.roles
    return [parts.roles[parts.ranks[at] if program == "stage" else at]]
