"""The state that steps leave on a rank beside weights and moments: the numbers of a dynamic loss scale, which are the
same on all ranks, and the residuals of compressed gradients. Also the loads of experts that a step reports."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch

from ...compiler.build.build import Build
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Placement, Split, TensorType, along
from ...compiler.padding.pads import Pads
from ...compiler.padding.tensors import EntryRun, packed
from ...compiler.program.binding import Binding
from ...compiler.program.program import Program, Value
from ...compiler.program.roles import Role
from ...compiler.program.step_values import LOAD, LOSS_SCALE, SCALER, SKIPPED_STEPS, TAKEN, residual_of
from .checkpoint import Checkpoint, CheckpointReader, refuse
from .index import KEY, StoredTensor

LEAST = torch.finfo(torch.float16).tiny
"""The loss scale below which no step is skipped any more. The gradient of the loss itself, 1 times the scale, would be
subnormal in float16, so a smaller scale makes no gradient finite."""


def first_state(
    programs: Mapping[str, Program], values: Mapping[str, float], device: torch.device, float64: bool = False
) -> dict[str, torch.Tensor]:
    """Return the state before the first step, in the types that a role's programs read. What has no entry in ``values``
    is zero."""
    state = {}
    for program in programs.values():
        for name, value in program.bound("state").items():
            dtype = torch.float64 if float64 and value.type.dtype.is_floating_point else value.type.dtype
            shape = value.type.local(program.mesh)
            state[name] = torch.full(shape, values.get(name, 0), dtype=dtype, device=device)
    return state


def scale_figures(state: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the metrics of a step with a dynamic loss scale; none without one."""
    return {key.name: state[key.name].item() for key in (LOSS_SCALE, SKIPPED_STEPS) if changed_state(state)}


def skips(state: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], norm: float) -> bool:
    """Return whether a step is skipped: its gradients are not finite, and a smaller loss scale may help."""
    return SKIPPED_STEPS.name in after and not math.isfinite(norm) and float(state[LOSS_SCALE.name]) >= LEAST


def state_after(after: Mapping[str, torch.Tensor], skipped: bool) -> dict[str, torch.Tensor]:
    """Return the state that a step leaves: one that is ``skipped`` changes only that of the loss scale."""
    return {name: value for name, value in after.items() if not skipped or Binding("state", name) in SCALER}


def changed_state(state: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the numbers of a dynamic loss scale, which a checkpoint holds among its facts: JSON keeps a float32
    exactly."""
    return {key.name: state[key.name].item() for key in SCALER} if SKIPPED_STEPS.name in state else {}


def read_state(checkpoint: Checkpoint, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the numbers of a checkpoint's dynamic loss scale, if this run has one too; else nothing.

    Raises:
        RunError: no step can have left them.
    """
    values, names = checkpoint.facts.get("state") or {}, changed_state(state)
    if not values or not names:
        return {}
    known: Mapping[str, Any] = values if isinstance(values, dict) else {}
    faults = [
        f"`{name}` is {json.dumps(known.get(name))}" for name in names if not _is_valid(known.get(name), state[name])
    ]
    refuse(checkpoint.folder, "holds a loss scale that no step can have made", faults)
    return {name: torch.tensor(known[name], dtype=state[name].dtype, device=state[name].device) for name in names}


def _is_valid(value: object, like: torch.Tensor) -> bool:
    """Return whether a saved value is valid for a number of the state that is ``like`` this one."""
    if like.is_floating_point():
        return isinstance(value, float) and torch.finfo(like.dtype).tiny <= value <= torch.finfo(like.dtype).max
    return type(value) is int and 0 <= value < 2**53


# ---- residuals: the rounding errors of compressed gradients on each rank, in checkpoints


def _all_ranks(type_: TensorType, mesh: Mesh) -> TensorType:
    """Return the type of the residuals of all ranks, concatenated along a new first dim."""
    axes = type_.placement.partial
    types = {axis: Split(kind.dim + 1, kind.outer) if isinstance(kind, Split) else kind
             for axis, kind in type_.placement.items()}  # fmt: skip
    placement = Placement.of(mesh, {**types, **along(axes, Split(0), mesh)})
    return replace(type_, shape=(len(mesh.groups(axes)[0]), *type_.shape), placement=placement)


def stored_residuals(roles: Sequence[Role], mesh: Mesh, pads: Pads) -> dict[str, StoredTensor]:
    """Return the residuals of all ranks, as a checkpoint stores and names them."""
    residuals: dict[str, tuple[Value, list[str]]] = {}
    for role in roles:
        for program in role.programs.values():
            for name, value in program.bound("state").items():
                if residual_of(value.binding):
                    residuals.setdefault(name, (value, []))[1].append(role.name)
    return {
        KEY + name: StoredTensor(
            _all_ranks(value.type, mesh),
            tuple(replace(pad, dim=pad.dim + 1) for pad in pads.get(residual_of(value.binding), ())),
            tuple(owners),
        )
        for name, (value, owners) in residuals.items()
    }


def check_residuals(checkpoint: Checkpoint, stored: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    """Check that a checkpoint's residuals have the shapes of this model's gradients. Return notes on those that are
    missing, of another number of ranks, or not used by this run.

    Raises:
        RunError: one has another shape.
    """
    have = {key: shape for key, shape in checkpoint.shapes.items() if key.startswith(KEY)}
    want = {key: tensor.shape for key, tensor in stored.items() if key.startswith(KEY)}
    misfits = [key for key, shape in want.items() if key in have and have[key][1:] != shape[1:]]
    refuse(checkpoint.folder, "is a checkpoint of another model", [f"`{key}` is {list(have[key])}" for key in misfits])
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
    """Read this rank's residual into ``target``. ``ranks`` are the numbers of ranks in the checkpoint and in this run;
    if they differ, each rank gets an equal part of the sum."""
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


# ---- loads: the tokens that each expert got in a step, and how far the busiest is above the mean


Loads = Mapping[str, Sequence[int]]
"""The tokens of each expert in a step, by the module of the experts."""


class Layer(NamedTuple):
    """A layer of ``experts``, which ``ranks`` share; each has as many as the others."""

    module: str
    experts: int
    ranks: int
    load: float
    """The load of the busiest rank, over the mean, for which memory was planned."""
    capacity: bool
    """True where experts leave tokens out."""


def layers_of(build: Build) -> tuple[Layer, ...]:
    """Return the layers of experts of a build, in the order in which its metric has their loads."""
    facts: Mapping[str, Any] = build.manifest.get("experts", {})
    known = [(name, facts[name]) for name in build.reference.main.returned("load") if name in facts]
    return tuple(
        Layer(name, fact["experts"], fact["ranks"], fact["load"], fact["capacity"] is not None) for name, fact in known
    )


def planned_load(build: Build) -> float:
    """Return the load of the busiest rank, over the mean, for which a build's memory was planned."""
    return max((layer.load for layer in layers_of(build)), default=1.0)


def loads_in(metrics: Mapping[str, torch.Tensor], layers: Sequence[Layer]) -> dict[str, list[int]]:
    """Return the loads of a step from its metrics. Where experts have a capacity, the counts of tokens that got a slot
    have names that end in ``TAKEN``."""
    if LOAD.name not in metrics:
        return {}
    sizes = {f"{layer.module}{end}": layer.experts for layer in layers for end in ("", TAKEN)[: 1 + layer.capacity]}
    parts = metrics[LOAD.name].split([*sizes.values()])
    return {name: part.tolist() for name, part in zip(sizes, parts, strict=True)}


def load_figures(loads: Loads, layers: Sequence[Layer]) -> dict[str, float]:
    """Return the load of the busiest expert, and of the busiest rank, over the mean: 1 is a perfect balance. Of several
    layers the worst counts. Where experts have a capacity, return the share of dropped choices too."""
    if not loads:
        return {}
    experts = (_over_mean(loads[layer.module]) for layer in layers)
    ranks = (_over_mean(_by_rank(loads[layer.module], layer.ranks)) for layer in layers)
    figures = {"imbalance": max(experts), "rank_imbalance": max(ranks)}
    bounded = [layer.module for layer in layers if layer.capacity]
    if bounded:
        chosen, taken = (sum(sum(loads[f"{module}{end}"]) for module in bounded) for end in ("", TAKEN))
        figures["drop_rate"] = 1 - taken / max(chosen, 1)
    return figures


def _by_rank(load: Sequence[int], ranks: int) -> list[int]:
    each = len(load) // ranks
    return [sum(load[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def _over_mean(load: Iterable[int]) -> float:
    tokens = list(load)
    return max(tokens) * len(tokens) / max(sum(tokens), 1)


@final
class LoadWatch:
    """A watch over the balance of experts: it warns when the busiest rank has had more than ``limit`` times the mean
    for ``patience`` steps on end, and when it first has more than ``planned`` times, if a plan states that.

    >>> watch = LoadWatch(patience=2)
    >>> watch.note(7, 1.9), watch.note(8, 1.8)[:42], watch.note(9, 1.8)
    ('', 'for 2 steps the busiest rank of experts ha', '')
    """

    def __init__(self, planned: float = 1.0, limit: float = 1.5, patience: int = 20) -> None:
        self._planned, self._limit, self._patience, self._steps = planned, limit, patience, 0

    def note(self, step: int, imbalance: float) -> str:
        """Take the imbalance of a step's ranks; return a warning, or an empty text."""
        if imbalance > self._planned > 1:
            planned, self._planned = self._planned, 1.0
            return (
                f"in step {step} the busiest rank of experts had {imbalance:.2f} times the mean of their rows: memory "
                f"was planned for {planned:g}; no token is lost as long as there is more"
            )
        self._steps = self._steps + 1 if imbalance > self._limit else 0
        if self._steps != self._patience:
            return ""
        return (
            f"for {self._patience} steps the busiest rank of experts has had more than {self._limit} times the mean "
            f"({imbalance:.2f} in step {step}); others wait for it: add a term such as `+ 0.01 output.aux_loss` to the "
            "loss, or `balance bias 0.001` to the line of `experts`"
        )
