"""The update: torch's own optimizers on a rank's pieces, after clipping by the global norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..grammar.codes_build import BAD_STATE
from .faults import RunError
from .state import Checkpoint


def make_optimizer(parameters: Mapping[str, torch.Tensor], line: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The plan's optimizer over tensors that require no autograd of their own."""
    tensors = list(parameters.values())
    if line["name"] == "sgd":
        return torch.optim.SGD(
            tensors, lr=line["lr"], momentum=line["momentum"], weight_decay=line["weight_decay"],
            nesterov=line["nesterov"], foreach=True,
        )  # fmt: skip
    return torch.optim.AdamW(
        tensors, lr=line["lr"], betas=tuple(line["betas"]), eps=line["eps"], weight_decay=line["weight_decay"],
        fused=all(tensor.is_floating_point() for tensor in tensors) or None,
    )  # fmt: skip


def update(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    grad_norm: torch.Tensor | None,
    clip: float | None,
    lr: float | None = None,
) -> None:
    """One update; gradients are scaled so that their global norm is at most ``clip``."""
    for group in optimizer.param_groups:
        if lr is not None:
            group["lr"] = lr
    for name, parameter in parameters.items():
        parameter.grad = gradients.get(name)
    if clip is not None and grad_norm is not None:
        factor = torch.clamp(clip / (grad_norm + 1e-6), max=1.0)
        torch._foreach_mul_([p.grad for p in parameters.values() if p.grad is not None], factor)
    optimizer.step()
    for parameter in parameters.values():
        parameter.grad = None


def restore_optimizer(checkpoint: Checkpoint, name: str) -> dict[str, list[str]]:
    """Which slots of the optimizer's state a checkpoint holds for each parameter.

    Raises:
        RunError: they are another optimizer's.
    """
    saved = checkpoint.facts.get("optimizer")
    if saved != name:
        raise RunError(
            BAD_STATE, f"`{checkpoint.folder}` holds the state of `{saved}`, the plan's optimizer is `{name}`",
            "name the optimizer that the checkpoint was made with",
        )  # fmt: skip
    slots: dict[str, list[str]] = {}
    for key in checkpoint.shapes:
        kind, _, rest = key.partition(".")
        slot, _, owner = rest.partition(".")
        if kind == "optimizer":
            slots.setdefault(owner, []).append(slot)
    return slots
