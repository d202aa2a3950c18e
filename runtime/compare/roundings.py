"""Roundings: the distance by which one rounding of weights and inputs moves a step of the captured graph, in float64.

It is the measure of a step's errors (as in TTrace, arXiv 2506.09280): what ranks add up in another order is rounded
otherwise, and a deep model amplifies that as much as it does a rounding of what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...compiler.program.binding import LOSS, Binding
from .model_run import Case, Microbatches, ReferenceRun, Watch, largest_difference
from .returned import stacked

_TIMES = 16
"""The factor on the measured distance: sums in another order round more often than weights and inputs do."""
_MOST = 1e-6
"""The most that is forgiven, relative to a tensor's largest entry. A model that one rounding moves further cannot be
tested."""


@dataclass(slots=True)
class _Begin:
    """The state and the batches at the beginning of a step."""

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    batches: Microbatches
    step: int


class Roundings:
    """The measure of the effect of one rounding in each step of a reference run.

    It is taken once it is asked for: all steps are then taken again beside the run, each from the same state but for
    one rounding, with an optimizer of their own.
    """

    def __init__(self, case: Case, watch: Watch | None = None) -> None:
        self._case, self._watch, self._steps = case, watch, list[_Begin]()
        self._run: ReferenceRun | None = None
        self._taken = 0
        self._found: dict[Binding, torch.Tensor] = {}
        self.amplified = ""
        """The message about the first value that one rounding moves further than can be tested."""

    def begin(self, reference: ReferenceRun, batches: Microbatches, step: int) -> None:
        """Keep the state at the beginning of the reference's next step."""
        parameters = {name: value.detach().clone() for name, value in reference.parameters.items()}
        self._steps.append(_Begin(parameters, dict(reference.buffers), batches, step))

    def beyond(self, what: Binding, expected: torch.Tensor, apart: float, least: float, top: float) -> float:
        """Return the part of the error ``apart`` that rounding does not explain. An error of at most ``least`` is small
        enough, and is returned as it is. ``expected`` is the value of ``what`` in the reference's last step; errors are
        relative to ``top``."""
        if not least < apart < float("inf"):
            return apart
        moved = _TIMES * largest_difference(self._made()[what], expected)
        if moved > _MOST * top and not self.amplified:
            text = f"gradient of {what.name}" if what.kind == "gradient" else str(what)
            self.amplified = f"one rounding of weights and inputs changes the {text} by more than a test can allow"
        return max(0.0, apart - min(moved, _MOST * top))

    def _made(self) -> Mapping[Binding, torch.Tensor]:
        """Return the last step's results from a state that is moved by one rounding."""
        run = self._run = self._run or ReferenceRun(self._case, watch=self._watch)
        while self._taken < len(self._steps):
            begin = self._steps[self._taken]
            generator = torch.Generator().manual_seed(self._taken)
            with torch.no_grad():
                for name, value in begin.parameters.items():
                    run.parameters[name].copy_(_moved(value, generator))
            run.buffers = dict(begin.buffers)
            batches = [{name: _moved(value, generator) for name, value in batch.items()} for batch in begin.batches]
            loss, gradients = run.step(batches, begin.step)
            self._found = {
                LOSS: loss,
                **{Binding("gradient", name): value for name, value in gradients.items()},
                **{Binding("buffer", name): value for name, value in run.buffers.items()},
                **{Binding("output", name): value for name, value in stacked(run.returned).items()},
            }
            self._taken += 1
        return self._found


def _moved(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return each number moved by one rounding: up, down or not at all."""
    if value.dtype != torch.float64:
        return value
    steps = torch.randint(-1, 2, value.shape, generator=generator).to(value)
    return value * (1 + 2.0**-52 * steps)
