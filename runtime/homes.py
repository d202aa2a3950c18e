"""Homes: stored parts of parameters that lie in the whole parameter which a step gathers, and so take no memory of
their own (ZeRO 1 and 2 in float32)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..compiler.analysis.dataflow import parts_in_weights
from ..compiler.program.binding import Binding
from ..compiler.program.program import Program


class Homes:
    """The weights of UNSHARD in which a parameter's own part lies as some of their rows, for the rank at these
    ``coordinates``."""

    def __init__(self, program: Program, coordinates: Mapping[str, int]) -> None:
        self._places: dict[Binding, tuple[str, int]] = {}
        for key, (name, axes) in parts_in_weights(program).items():
            place = 0
            for axis in axes:
                place = place * program.mesh.size(axis) + coordinates[axis]
            self._places[key] = name, place

    def move(self, parameters: Mapping[str, torch.Tensor], weights: Mapping[Binding, torch.Tensor]) -> None:
        """Let the stored parts be rows of these weights, which have the same values, from now on."""
        for key, (name, place) in self._places.items():
            part, whole = parameters[name], weights[key]
            if part.is_contiguous() and whole.is_contiguous():
                part.set_(whole.narrow(0, place * len(part), len(part)))  # type: ignore[call-overload]
