"""The results of a step: those that one rank has before the update, and the report that all have behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..grammar.codes_run import RESULT_TAKEN
from .faults import RunError


@dataclass(slots=True)
class StepResult:
    """The results of a step on one rank, before its update: the loss (0 without one) and the gradients' norm before
    clipping (the same on all ranks), this rank's parts of the gradients, the numbers of other actions, and state of
    steps such as the loss scale.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    gradients: dict[str, torch.Tensor]
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    returned: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """The rank's parts of the tensors that the model returns, by name and microbatch, where they were asked for."""
    taken: bool = False
    """True once an update has used it."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """A finished step, the same on every rank: its number (from 1), the loss of the whole batch, the gradients' norm
    before clipping, and the learning rate. ``metrics`` are further numbers by name, such as the imbalance of experts.
    ``skipped`` is True if a dynamic loss scale skipped the step. ``loads`` are the tokens of each expert by module.
    ``seconds``, ``waited_for_data`` and ``waited_for_ranks`` are a rank's own: the time of the step, and the parts of
    it in which the rank waited. On GPUs, waits for other ranks are not counted.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = False
    loads: Mapping[str, Sequence[int]] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)
    waited_for_data: float = field(default=0.0, compare=False)
    waited_for_ranks: float = field(default=0.0, compare=False)


def consume(result: object) -> None:
    """Note that an update uses a result of ``session.gradients``.

    Raises:
        RunError: it is none, or an update has used it before.
    """
    if not isinstance(result, StepResult):
        help_ = "write `session.update(session.gradients(batch))`; `session.step(batch)` does both"
        raise RunError(RESULT_TAKEN, f"an update takes what `session.gradients` returns, not {_name(result)}", help_)
    if result.taken:
        help_ = "give the result of another `session.gradients`; only `schedule microbatches` adds up batches"
        raise RunError(RESULT_TAKEN, "an update has used these gradients already", help_)
    result.taken = True


def _name(result: object) -> str:
    return "the report of a step" if isinstance(result, StepReport) else type(result).__name__
