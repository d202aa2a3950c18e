"""ZeRO 1 in float32: a rank keeps whole parameters, and its own part of each is some rows of the whole."""

from __future__ import annotations

import torch

from parc.checking.checks import case_of
from parc.runtime.compare.simulate import Simulation
from parc.runtime.data.random_batch import random_batch

from ..passes.test_zero import built


def test_the_part_that_is_updated_lies_in_the_gathered_whole() -> None:
    case = case_of(built("zero 1 over dp"))
    simulation = Simulation(case)
    batch = random_batch(case.reference, 1, torch.Generator().manual_seed(0))
    for step in range(2):
        simulation.step(batch, step)
    for rank, state in enumerate(simulation.states):
        part = state.parameters["blocks.0.mlp.up.weight"]
        whole = part.untyped_storage().nbytes()
        assert whole == 2 * part.nbytes and part.storage_offset() == rank * part.numel()
