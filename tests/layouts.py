"""Layouts: whether the tensors of a rank lie in memory as their types in programs say, row after row. torch's fused
updates walk a parameter, its gradient and its moments with one index."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from parc.checking.checks import case_of
from parc.compiling.compiled import Compiled
from parc.runtime.compare.simulate import Simulation
from parc.runtime.data.random_batch import random_batch
from parc.runtime.ranks.work import RankState
from parc.runtime.state.initial import Initial
from parc.runtime.state.opening import task_of
from parc.runtime.state.optimizer import make_optimizer

CPU = torch.device("cpu")


def strided(
    state: RankState, optimizer: torch.optim.Optimizer, gradients: Mapping[str, torch.Tensor] | None = None
) -> list[str]:
    """Return the names of a rank's tensors that do not lie as their types say: parameters, gradients, buffers,
    residuals, moments and averages."""
    tables = {"parameter": state.parameters, "gradient": gradients or {}, "buffer": state.buffers, "state": state.steps}
    slots = {f"{slot} {name}": tensor for name, parameter in state.parameters.items()
             for slot, tensor in optimizer.state.get(parameter, {}).items()}  # fmt: skip
    every = {f"{kind} {name}": tensor for kind, table in tables.items() for name, tensor in table.items()} | slots
    return [name for name, tensor in every.items() if torch.is_tensor(tensor) and not tensor.is_contiguous()]


def strided_after_a_step(compiled: Compiled) -> list[str]:
    """Return what ``strided`` finds on any rank of a plan: in the state that ranks of a run begin with, and after the
    first step from it, in the programs' own types."""
    case, build = case_of(compiled), compiled.build
    ranks = Simulation(case, float64=False)
    for rank, state in enumerate(ranks.states):
        initial = Initial(build, task_of(build.manifest), case.mesh, case.mesh.coordinates(rank), CPU)
        types = {name: ranks.types[name] for name in state.parameters}
        buffers = {name: type_ for name, type_ in ranks._buffer_types().items() if name in state.buffers}
        ranks.states[rank] = initial.state(types, buffers)
        ranks.optimizers[rank] = make_optimizer(ranks.states[rank].parameters, case.optimizer)
    both = list(zip(ranks.states, ranks.optimizers, strict=True))
    places = [
        f"rank {rank}: {name}" for rank, (state, optimizer) in enumerate(both) for name in strided(state, optimizer)
    ]
    batches = random_batch(case.reference, case.microbatches, torch.Generator().manual_seed(1))
    dtypes = {name: value.type.dtype for name, value in case.reference.main.bound("input").items()}
    ranks.step([{name: value.to(dtypes[name]) for name, value in batch.items()} for batch in batches], 0)
    for rank, ((state, optimizer), gradients) in enumerate(zip(both, ranks.gradients, strict=True)):
        places += [f"rank {rank}, after a step: {name}" for name in strided(state, optimizer, gradients)]
    return places
