"""Residuals in checkpoints: what rounding left of gradients on each rank, for as many ranks or for others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Placement, Split, TensorType, along
from ...compiler.padding.pads import Pads
from ...compiler.padding.tensors import EntryRun, packed
from ...compiler.program.program import Value
from ...compiler.program.roles import Role
from ...compiler.program.step_values import residual_of
from .checkpoint import Checkpoint, CheckpointReader, refuse
from .layouts import StoredTensor
from .stacks import KEY


def _stacked(type_: TensorType, mesh: Mesh) -> TensorType:
    """Return the type of every rank's residual, one beside the other along a first dim."""
    axes = type_.placement.partial
    types = {axis: Split(kind.dim + 1, kind.outer) if isinstance(kind, Split) else kind
             for axis, kind in type_.placement.items()}  # fmt: skip
    placement = Placement.of(mesh, {**types, **along(axes, Split(0), mesh)})
    return replace(type_, shape=(len(mesh.groups(axes)[0]), *type_.shape), placement=placement)


def stored_residuals(roles: Sequence[Role], mesh: Mesh, pads: Pads) -> dict[str, StoredTensor]:
    """Return what a checkpoint holds of residuals, by its names of them: those of all ranks."""
    found: dict[str, tuple[Value, list[str]]] = {}
    for role in roles:
        for program in role.programs.values():
            for name, value in program.bound("state").items():
                if residual_of(value.binding):
                    found.setdefault(name, (value, []))[1].append(role.name)
    return {
        KEY + name: StoredTensor(
            _stacked(value.type, mesh),
            tuple(replace(pad, dim=pad.dim + 1) for pad in pads.get(residual_of(value.binding), ())),
            tuple(owners),
        )
        for name, (value, owners) in found.items()
    }


def check_residuals(checkpoint: Checkpoint, stored: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    """Check that the residuals of a checkpoint are those of this model's gradients, of however many ranks. Return the
    notes on those that are of other ranks, missing, or for nobody.

    Raises:
        RunError: one has another shape.
    """
    have = {key: shape for key, shape in checkpoint.shapes.items() if key.startswith(KEY)}
    want = {key: tensor.shape for key, tensor in stored.items() if key.startswith(KEY)}
    odd = [key for key, shape in want.items() if key in have and have[key][1:] != shape[1:]]
    refuse(checkpoint.folder, "is a checkpoint of another model", [f"`{key}` is {list(have[key])}" for key in odd])
    pairs = [(have.get(key, (0,))[0], want.get(key, (0,))[0]) for key in {**have, **want}]
    notes = []
    for there, here in sorted({pair for pair in pairs if pair[0] != pair[1]}):
        many = f"{pairs.count((there, here))} gradients"
        divided = f"the rounding errors of {many} on {there} ranks are divided equally over {here}"
        dropped = f"the rounding errors of {many} are dropped: no line compresses them"
        begun = f"the checkpoint holds no rounding errors of {many}: they start at zero"
        notes.append(begun if not there else dropped if not here else divided)
    return tuple(notes)


def read_residual(
    files: CheckpointReader, key: str, ranks: tuple[int, int], target: torch.Tensor, runs: Sequence[Sequence[EntryRun]]
) -> None:
    """Read what is left on this rank. ``ranks`` are those of the checkpoint and of this run: if they are not as many,
    each rank of this run gets an equal part of the sum."""
    there, here = ranks
    if there == here:
        files.fill(key, target, runs)
        return
    part = torch.zeros_like(target)
    target.zero_()
    for rank in range(there):
        part.zero_()
        files.fill(key, part, [packed(((rank, rank + 1),)), *runs[1:]])
        target += part / here
