"""Homes: stored parts of parameters that lie in the whole parameter which a step gathers, and so take no memory of
their own (ZeRO 1 and 2 in float32)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...compiler.layout.collectives import WAIT
from ...compiler.program.binding import Binding
from ...compiler.program.program import Line, Program, Ref


class Homes:
    """The weights of UNSHARD that hold a parameter's own part as some of their rows, for the rank at these
    ``coordinates``."""

    def __init__(self, program: Program, coordinates: Mapping[str, int]) -> None:
        main, mesh = program.main, program.mesh
        makers = {value.name: line for line in main.lines for value in line.made}
        stored = {value.name: value for value in main.parameters}
        self._places: dict[Binding, tuple[str, int]] = {}
        for key, name in main.returns:
            axes = _gathered_rows(line := _started(makers, name))
            source = stored.get(next(line.uses(), "")) if line is not None else None
            if source is None or source.binding is None or source.kind != "parameter":
                continue
            place = 0
            for axis in axes:
                place = place * mesh.size(axis) + coordinates[axis]
            self._places[key] = source.binding.name, place

    def move(self, parameters: Mapping[str, torch.Tensor], weights: Mapping[Binding, torch.Tensor]) -> None:
        """Let the stored parts be rows of these weights, which have the same values, from now on."""
        for key, (name, place) in self._places.items():
            part, whole = parameters[name], weights[key]
            if isinstance(part, torch.Tensor) and part.is_contiguous() and whole.is_contiguous():
                rows = whole.narrow(0, place * len(part), len(part))
                if rows.dtype == part.dtype and rows.shape == part.shape:
                    part.set_(rows)  # type: ignore[call-overload]


def _started(makers: Mapping[str, Line], name: str) -> Line | None:
    """Return the line that makes a value, behind the one that waits for it."""
    line = makers.get(name)
    return makers.get(next(line.uses())) if line is not None and line.op == WAIT else line


def _gathered_rows(line: Line | None) -> tuple[str, ...]:
    """Return the axes over which a line gathers the rows of one value; none for other lines."""
    if line is None or line.op != "parc.all_gather" or not isinstance(line.args[0], Ref):
        return ()
    _, axes, dim, outer = line.args
    return tuple(axes.split(",")) if dim == 0 and outer == 1 else ()
