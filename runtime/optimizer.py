"""The update: torch's own optimizers on a rank's pieces, after clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..grammar.codes_build import BAD_STATE
from .faults import RunError
from .state import Checkpoint


def make_optimizer(parameters: Mapping[str, torch.Tensor], line: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The plan's optimizer over tensors that require no autograd of their own."""
    tensors = list(parameters.values())
    kept = [value for name, value in parameters.items() if name not in line["no_decay"]]
    free = [value for name, value in parameters.items() if name in line["no_decay"]]
    groups: list[dict[str, Any]] = (
        [{"params": kept}, {"params": free, "weight_decay": 0.0}] if free else [{"params": kept}]
    )
    if line["name"] == "sgd":
        return torch.optim.SGD(
            groups, lr=line["lr"], momentum=line["momentum"], weight_decay=line["weight_decay"],
            nesterov=line["nesterov"], foreach=True,
        )  # fmt: skip
    return torch.optim.AdamW(
        groups, lr=line["lr"], betas=tuple(line["betas"]), eps=line["eps"], weight_decay=line["weight_decay"],
        fused=all(tensor.is_floating_point() for tensor in tensors) or None,
    )  # fmt: skip


def rate(line: Mapping[str, Any], step: int) -> float:
    """The learning rate of a step, counted from 1: a rise in ``warmup`` steps, then constant, or a fall to ``to`` which
    it reaches at step ``over``.

    >>> line = {"shape": "linear", "lr": 1.0, "warmup": 2, "to": 0.5, "over": 6}
    >>> [rate(line, step) for step in range(1, 8)]
    [0.5, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    """
    peak = float(line["lr"])
    if step <= line["warmup"]:
        return peak * step / int(line["warmup"])
    if line["shape"] == "constant":
        return peak
    done = min(1.0, (step - line["warmup"]) / (line["over"] - line["warmup"]))
    left = 1 - done if line["shape"] == "linear" else (1 + math.cos(math.pi * done)) / 2
    return float(line["to"] + (peak - line["to"]) * left)


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
