"""ZeRO 1 in float32: a rank keeps whole parameters, and its own part of each is some rows of the whole."""

from __future__ import annotations

from pathlib import Path

import torch

import parc
from parc.checking.checks import case_of
from parc.runtime.compare.simulate import Simulation
from parc.runtime.data.random_batch import random_batch
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import DATA, PLAN, batch, build

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


def test_a_part_that_is_handed_out_holds_no_whole_weight(tmp_path: Path) -> None:
    made = build(tmp_path, DATA + "zero 1 over dp\n", PLAN)
    for held in run_ranks(ranks_look, 2, str(made)):
        assert held == (2, 1)


def ranks_look(folder: str) -> tuple[int, int]:
    """Return the storage of a parameter, and of its part in ``state_dict``, in sizes of the part."""
    with parc.load(folder) as session:
        session.step(batch(0))
        part = session.state.parameters["blocks.0.mlp.up.weight"]
        handed = session.state_dict(local=True)["blocks.0.mlp.up.weight"].tensor
        return tuple(one.untyped_storage().nbytes() // part.nbytes for one in (part, handed))  # type: ignore[return-value]
