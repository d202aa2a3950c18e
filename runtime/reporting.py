"""Reports of steps: what a step was, and the calls that are made once it is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..compiler.build.build import Build
from .results import StepReport
from .state.loads import layers_of, load_figures, loads_in
from .state.scaler import scale_figures
from .waits import Lap


class Reporting:
    """The reports of a session's steps on one rank."""

    def __init__(self, build: Build) -> None:
        self._layers = layers_of(build)
        self._lap = Lap()
        self.calls: list[Callable[[StepReport], object]] = []
        """The functions that are called with each report."""

    def begin(self) -> None:
        """Begin the time of a step."""
        self._lap.begin()

    def done(
        self,
        step: int,
        numbers: tuple[float, float, float],
        metrics: Mapping[str, torch.Tensor],
        state: Mapping[str, torch.Tensor],
        skipped: bool,
    ) -> StepReport:
        """Return the report of a step that is done, once all have been called with it. ``numbers`` are its loss, norm
        and learning rate, ``state`` is the state of steps after it."""
        loads = loads_in(metrics, self._layers)
        single = {name: float(value) for name, value in metrics.items() if not value.dim()}
        figures = single | load_figures(loads, self._layers) | scale_figures(state)
        report = StepReport(step, *numbers, figures, skipped, loads, *self._lap.end())
        for call in self.calls:
            call(report)
        return report
