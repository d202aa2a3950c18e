"""All ranks of a plan in one process, with states of given numbers: checkpoints without a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.pieces import take
from parc.compiler.padding.tensors import grow
from parc.runtime.ranks.lockstep import Lockstep
from parc.runtime.ranks.work import RankState
from parc.runtime.state.checkpoint import read_checkpoint
from parc.runtime.state.index import StoredTensor, shard_name, write_index
from parc.runtime.state.optimizer import make_optimizer
from parc.runtime.state.saving import StateFiles
from parc.runtime.state.shards import write_shard

CPU = torch.device("cpu")
ADAMW = {"name": "adamw", "lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "groups": []}
LIKE = ("exp_avg", "exp_avg_sq")


@dataclass
class Rank:
    """One rank: its files, its state, and its optimizer."""

    files: StateFiles
    state: RankState
    optimizer: torch.optim.Optimizer


def numbers(stored: Mapping[str, StoredTensor], seed: int) -> dict[str, torch.Tensor]:
    """Return a whole state of random numbers, by the names of a checkpoint: three steps were done."""
    draw = torch.Generator().manual_seed(seed)
    wholes: dict[str, torch.Tensor] = {}
    for key, tensor in stored.items():
        kind, _, name = key.partition(".")
        for full in (key, *(f"optimizer.{slot}.{name}" for slot in LIKE if kind == "parameter")):
            wholes[full] = torch.randint(1, 100, tensor.shape, generator=draw).to(tensor.type.dtype)
        if kind == "parameter":
            wholes[f"optimizer.step.{name}"] = torch.tensor(3.0)
    return wholes


def ranks_of(
    stored: Mapping[str, StoredTensor], mesh: Mesh, roles: Sequence[str], wholes: Mapping[str, torch.Tensor] | None
) -> list[Rank]:
    """Return all ranks with their parts of a whole state; without one, with zeros and an optimizer before its first
    step."""
    ranks = []
    for number, role in enumerate(roles):
        held = {key: one for key, one in stored.items() if role in one.owners}
        parts = {key: _part(one, mesh, number, wholes, key) for key, one in held.items()}
        state = RankState(_of("parameter", parts), _of("buffer", parts))
        optimizer = make_optimizer(state.parameters, ADAMW)
        for name, parameter in state.parameters.items() if wholes is not None else ():
            one = held[f"parameter.{name}"]
            slots = {slot: _part(one, mesh, number, wholes, f"optimizer.{slot}.{name}") for slot in LIKE}
            optimizer.state[parameter] = {"step": torch.tensor(3.0), **slots}
        ranks.append(Rank(StateFiles(stored, mesh, Lockstep(number, len(roles), CPU), roles), state, optimizer))
    return ranks


def _of(kind: str, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.removeprefix(f"{kind}."): part for key, part in parts.items() if key.startswith(f"{kind}.")}


def _part(
    one: StoredTensor, mesh: Mesh, rank: int, wholes: Mapping[str, torch.Tensor] | None, key: str
) -> torch.Tensor:
    whole = torch.zeros(one.shape, dtype=one.type.dtype) if wholes is None else wholes[key]
    return take(grow(whole, one.pads), one.type.placement, mesh, mesh.coordinates(rank))


def save_all(folder: Path, ranks: Sequence[Rank], stored: Mapping[str, StoredTensor], step: int = 3) -> None:
    """Write a checkpoint of all ranks."""
    folder.mkdir(parents=True)
    names = [key.partition(".")[2] for key in stored if key.startswith("parameter.")]
    slots = {name: {"step": torch.tensor(float(step)), **dict.fromkeys(LIKE)} for name in names}
    shards = []
    for number, rank in enumerate(ranks):
        pieces = rank.files.written(rank.state, rank.optimizer, slots)
        shards.append(write_shard(folder / shard_name(number, len(ranks)), pieces) if pieces else None)
    write_index(folder, ranks[0].files.index(shards, slots), {"step": step, "optimizer": "adamw"})


def restore_all(folder: Path, ranks: Sequence[Rank], stored: Mapping[str, StoredTensor]) -> None:
    """Check and read a checkpoint on all ranks."""
    checkpoint = read_checkpoint(folder)
    slots = {key.partition(".")[2]: ["step", *LIKE] for key in stored if key.startswith("parameter.")}
    for number, rank in enumerate(ranks):
        checkpoint.check_shards(range(number, len(checkpoint.index.files), len(ranks)))
        rank.files.read(checkpoint, slots, rank.state, rank.optimizer, keep_slots=False)


def hold(ranks: Sequence[Rank], expected: Sequence[Rank]) -> None:
    """Check that ranks have the state of others, to the bit."""
    for rank, wanted in zip(ranks, expected, strict=True):
        assert rank.state.parameters.keys() == wanted.state.parameters.keys()
        for name, parameter in wanted.state.parameters.items():
            assert torch.equal(rank.state.parameters[name], parameter), name
            slots = rank.optimizer.state[rank.state.parameters[name]]
            for slot, value in wanted.optimizer.state[parameter].items():
                assert torch.equal(slots[slot], value), (name, slot)
        for name, buffer in wanted.state.buffers.items():
            assert torch.equal(rank.state.buffers[name], buffer), name
