"""The loss scale: a number by which the loss is multiplied before its backward, so that small gradients of float16 do
not become zero, and by which gradients are divided again before anything else reads them.

A *dynamic* one is the state of steps: it grows after many good steps, and falls after a step whose gradients are not
finite, which is skipped. The numbers and the rule are those of ``torch.amp.GradScaler`` (torch/amp/grad_scaler.py and
``_amp_update_scale_`` in ATen), whose defaults are the constants here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from .binding import Binding

LossScale = float | Literal["dynamic"] | None
"""A plan's loss scale: a number, one that steps change, or none."""
DYNAMIC: Literal["dynamic"] = "dynamic"
LOSS_SCALE, GOOD_STEPS, SKIPPED_STEPS = (
    Binding("state", "loss_scale"), Binding("state", "good_steps"), Binding("state", "skipped_steps"),
)  # fmt: skip
"""The loss scale, the number of steps since it changed or would have, and the number of all skipped steps."""
INITIAL, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
NEXT_SCALE = "parc.next_loss_scale.default"
"""The operator that makes the state after a step from its gradients' norm and the state before it."""


class StateRow(NamedTuple):
    """A number among the state of steps: its type, and its value before the first step."""

    dtype: str
    initial: float


SCALER: Mapping[Binding, StateRow] = {
    LOSS_SCALE: StateRow("float32", INITIAL),
    GOOD_STEPS: StateRow("int64", 0),
    SKIPPED_STEPS: StateRow("int64", 0),
}
"""The state of a dynamic loss scale. A fixed one is ``LOSS_SCALE`` alone, which no program changes."""


def initial_state(loss_scale: LossScale) -> dict[str, float]:
    """Return the first values of the state of steps, by name: those of a ``dynamic`` loss scale, of a fixed one, or
    none.

    >>> initial_state("dynamic"), initial_state(1024.0)
    ({'loss_scale': 65536.0, 'good_steps': 0, 'skipped_steps': 0}, {'loss_scale': 1024.0})
    """
    if loss_scale == DYNAMIC:
        return {key.name: row.initial for key, row in SCALER.items()}
    return {} if loss_scale is None else {LOSS_SCALE.name: float(loss_scale)}
