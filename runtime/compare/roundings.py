"""Roundings: how far the numbers of a step move where every weight and input is rounded once more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...compiler.program.binding import LOSS, Binding
from .agreement import TOLERANCE, stacked
from .model_run import Case, Microbatches, ReferenceRun, Watch, largest_difference

# Ranks sum in another order, so they round otherwise. A deep model amplifies these roundings as much as those of its
# weights and inputs, whose effect can be measured: it is the measure of a step's errors (TTrace, arXiv 2506.09280).

_ROUNDING_FACTOR = 16
"""The factor on the measured change: sums in another order round more often than weights and inputs do."""
_MOST_FORGIVEN = 1e-6
"""The largest error that is forgiven, relative to a tensor's largest entry. A model that amplifies one rounding more
cannot be tested."""

ROUNDINGS_OF_A_STEP = 32
"""The factor on the measured change of a tensor in the programs' own types: a step rounds more often than once for each
weight and input, and libraries add up products in different orders."""
ROUNDINGS_OF_A_NARROW_STEP = 5
"""The same factor where a type of fewer bits than float32 rounds: its roundings are far larger than those of sums in
another order, and what they do is measured in that type itself. Among 204 tensors, other roundings of all weights moved
one by 3.7 times that distance."""


@dataclass(slots=True)
class _StepStart:
    """The state and the batches at the start of a step."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    batches: Microbatches
    step: int


class Roundings:
    """The effect of one rounding in each step of a reference run.

    It is measured lazily: a second run with an optimizer of its own repeats all steps, each from the same state with
    every number perturbed by one rounding.
    """

    def __init__(self, case: Case, watch: Watch | None = None) -> None:
        self._case, self._watch, self._steps = case, watch, list[_StepStart]()
        self._run: ReferenceRun | None = None
        self._repeated = 0
        self._results: dict[Binding, Tensor] = {}
        self.amplified = ""
        """The message about the first value that one rounding changes too much to be tested."""

    def begin(self, reference: ReferenceRun, batches: Microbatches, step: int) -> None:
        """Keep the state at the start of the reference's next step."""
        parameters = {name: value.detach().clone() for name, value in reference.read.items()}
        self._steps.append(_StepStart(parameters, dict(reference.buffers), batches, step))

    def unexplained(self, what: Binding, expected: Tensor, apart: float, scale: float) -> float:
        """Return the error ``apart``, relative to ``scale``, without the part that rounding explains. An error up to
        ``TOLERANCE`` needs no explanation. ``expected`` is the value of ``what`` in the reference's last step."""
        if TOLERANCE * scale < apart < float("inf"):
            explained = _ROUNDING_FACTOR * largest_difference(self._perturbed()[what], expected)
            if explained > _MOST_FORGIVEN * scale and not self.amplified:
                text = f"gradient of {what.name}" if what.kind == "gradient" else str(what)
                self.amplified = f"one rounding of weights and inputs changes the {text} by more than a test can allow"
            apart = max(0.0, apart - min(explained, _MOST_FORGIVEN * scale))
        return apart / scale

    def _perturbed(self) -> Mapping[Binding, Tensor]:
        """Return the last step's results from a state that is perturbed by one rounding."""
        run = self._run = self._run or ReferenceRun(self._case, watch=self._watch)
        while self._repeated < len(self._steps):
            begin = self._steps[self._repeated]
            generator = torch.Generator().manual_seed(self._repeated)
            run.read = run.parameters
            with torch.no_grad():
                for name, value in begin.parameters.items():
                    run.parameters[name].copy_(perturbed(value, generator))
            run.buffers = dict(begin.buffers)
            batches = [{name: perturbed(value, generator) for name, value in batch.items()} for batch in begin.batches]
            loss, gradients = run.step(batches, begin.step)
            self._results = {
                LOSS: loss,
                **{Binding("gradient", name): value for name, value in gradients.items()},
                **{Binding("buffer", name): value for name, value in run.buffers.items()},
                **{Binding("output", name): value for name, value in stacked(run.returned).items()},
            }
            self._repeated += 1
        return self._results


def perturbed(value: Tensor, generator: torch.Generator, rounding: float = 2.0**-52) -> Tensor:
    """Return each number of a float64 tensor with one ``rounding`` added: up, down or none."""
    if value.dtype != torch.float64:
        return value
    steps = torch.randint(-1, 2, value.shape, generator=generator).to(value)
    return value * (1 + rounding * steps)
