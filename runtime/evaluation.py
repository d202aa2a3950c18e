"""Evaluation: the programs of a model in ``eval()``, on the parameters and buffers of a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import final

import torch

from ..compiler.build.build import Build
from ..compiler.layout.mesh import Mesh
from ..compiler.program.binding import BUFFERS
from ..grammar.codes_run import NO_EVALUATION
from .data.batches import Batches
from .data.sizes import AtSizes, BySizes
from .faults import RunError
from .lockstep import Together
from .opening import constants_of
from .owners import held
from .state.initial import Initial
from .work import Batch, RankState


def evaluation_of(build: Build) -> Build:
    """Return the programs of a build's evaluation.

    Raises:
        RunError: it has none.
    """
    if build.evaluation is None:
        message = f"`{build.path}` has no programs that evaluate the model: its plan has no `eval` line"
        raise RunError(NO_EVALUATION, message, "add a line `eval` to the plan, and build again")
    return build.evaluation


BATCHES = 10
"""The number of batches of an evaluation in a run whose plan does not say one."""


@final
class Evaluation:
    """The evaluation of one rank's model; every rank calls alike. ``make`` makes what runs the programs of the
    ``build``'s evaluation, for batches of each size.

    Raises:
        RunError: the build has none.
    """

    def __init__(
        self, build: Build, make: Callable[[Build], AtSizes], mesh: Mesh, rank: int, initial: Initial,
        together: Together,
    ) -> None:  # fmt: skip
        self._build = evaluation_of(build)
        self._role, self._initial, self._together = self._build.role_at(mesh.coordinates(rank)), initial, together
        self._by_sizes = BySizes(self._build, make)
        self._batches = Batches(self._by_sizes, mesh, together)

    @cached_property
    def _fixed(self) -> dict[str, torch.Tensor]:
        """The buffers that no step changes, and the numbers in the model's code, as ``eval()`` reads them."""
        names = held(self._role, BUFFERS) - {*self._build.manifest["updates"]}
        types = {name: type_ for name, type_ in constants_of(self._build).items() if name in names}
        return self._initial.buffers(types, self._build.manifest["constants"])

    def mean(self, state: RankState) -> float:
        """Return the mean of the losses of the first batches of the evaluation's data, as many as the plan says."""
        batches = int(self._build.manifest["batches"] or BATCHES)
        return sum(self.loss(None, None, state, number, batches) for number in range(batches)) / batches

    def loss(
        self, batch: Batch | None, local: Batch | None, state: RankState, step: int, last: int | None = None
    ) -> float:
        """Return the global loss of a batch, or of batch ``step`` (from 0) of the evaluation's data, of which nothing
        is read beyond batch ``last``. Nothing of the ``state`` is changed."""
        own = replace(state, buffers={**state.buffers, **self._fixed})
        begun = self._batches.begin("session.evaluate", batch, local, own, step, last, keep=False)
        with self._together.doing("an evaluation", own):
            (result,) = begun.at.stepper.evaluate(begun.work, step)
        return float(result.loss)

    def close(self) -> None:
        """Stop reading data."""
        self._by_sizes().feed.close()
