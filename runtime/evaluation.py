"""Evaluation: the programs of a model in ``eval()``, on the parameters and buffers of a session."""

from __future__ import annotations

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


@final
class Evaluation:
    """The evaluation of one rank's model; every rank calls alike. ``build`` is the programs of an evaluation, made for
    batches of each size by ``by_sizes``."""

    def __init__(
        self, build: Build, by_sizes: BySizes[AtSizes], mesh: Mesh, rank: int, initial: Initial, together: Together
    ) -> None:
        self._build, self._initial, self._together = build, initial, together
        self._role = build.role_at(mesh.coordinates(rank))
        self._by_sizes = by_sizes
        self._batches = Batches(by_sizes, mesh, together)

    @cached_property
    def _fixed(self) -> dict[str, torch.Tensor]:
        """The buffers that no step changes, and the numbers in the model's code, as ``eval()`` reads them."""
        names = held(self._role, BUFFERS) - {*self._build.manifest["updates"]}
        types = {name: type_ for name, type_ in constants_of(self._build).items() if name in names}
        return self._initial.buffers(types, self._build.manifest["constants"])

    def loss(self, batch: Batch | None, local: Batch | None, state: RankState, step: int) -> float:
        """Return the global loss of a batch; nothing of the ``state`` is changed."""
        own = replace(state, buffers={**state.buffers, **self._fixed})
        begun = self._batches.begin(batch, local, own, step, None, keep=False)
        with self._together.doing("an evaluation", own):
            (result,) = begun.at.stepper.evaluate(begun.work, step)
        return float(result.loss)

    def close(self) -> None:
        """Stop reading data."""
        self._by_sizes().feed.close()
