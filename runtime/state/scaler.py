"""The state of steps on a rank: the numbers of a loss scale, which are the same on all ranks, and how they are told;
and what is left of gradients."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from ...compiler.program.binding import Binding
from ...compiler.program.program import Program
from ...compiler.program.step_values import LOSS_SCALE, SCALER, SKIPPED_STEPS
from .checkpoint import Checkpoint, refuse

LEAST = torch.finfo(torch.float16).tiny
"""The loss scale below which no step is skipped any more: the gradient of the loss itself, of size 1, is then no normal
number of float16, so a smaller scale makes no gradient finite."""


def first_state(
    programs: Mapping[str, Program], values: Mapping[str, float], device: torch.device, float64: bool = False
) -> dict[str, torch.Tensor]:
    """Return the state of steps before the first one, of the types that a role's programs read: zeros, where there are
    no ``values``."""
    found = {}
    for program in programs.values():
        for name, value in program.bound("state").items():
            dtype = torch.float64 if float64 and value.type.dtype.is_floating_point else value.type.dtype
            shape = value.type.local(program.mesh)
            found[name] = torch.full(shape, values.get(name, 0), dtype=dtype, device=device)
    return found


def scale_figures(state: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the numbers that a run tells of each step with a dynamic loss scale."""
    return {key.name: state[key.name].item() for key in (LOSS_SCALE, SKIPPED_STEPS) if changed_state(state)}


def skips(state: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], norm: float) -> bool:
    """Return whether a step is skipped: its gradients are not finite, and a smaller loss scale may help."""
    return SKIPPED_STEPS.name in after and not math.isfinite(norm) and float(state[LOSS_SCALE.name]) >= LEAST


def state_after(after: Mapping[str, torch.Tensor], skipped: bool) -> dict[str, torch.Tensor]:
    """Return the state of steps that a step leaves: a ``skipped`` one changes that of its loss scale alone."""
    return {name: value for name, value in after.items() if not skipped or Binding("state", name) in SCALER}


def changed_state(state: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the numbers that steps change, which a checkpoint holds among its facts: those of a dynamic loss scale. A
    float32 is itself in JSON."""
    return {key.name: state[key.name].item() for key in SCALER} if SKIPPED_STEPS.name in state else {}


def read_state(checkpoint: Checkpoint, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state of steps that a checkpoint holds, if it is that of a dynamic loss scale, which this run has too;
    else nothing.

    Raises:
        RunError: it is no state that steps leave.
    """
    values, names = checkpoint.facts.get("state") or {}, changed_state(state)
    if not values or not names:
        return {}
    known: Mapping[str, Any] = values if isinstance(values, dict) else {}
    faults = [f"`{name}` is {json.dumps(known.get(name))}" for name in names if not _left(known.get(name), state[name])]
    refuse(checkpoint.folder, "holds a loss scale that no step can have made", faults)
    return {name: torch.tensor(known[name], dtype=state[name].dtype, device=state[name].device) for name in names}


def _left(value: object, like: torch.Tensor) -> bool:
    """Return whether a number is one that steps may leave, beside one that they left."""
    if like.is_floating_point():
        return isinstance(value, float) and torch.finfo(like.dtype).tiny <= value <= torch.finfo(like.dtype).max
    return type(value) is int and 0 <= value < 2**53
