"""The clock of one program on many meshes at once: each time is an array, with a number for each mesh of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..analysis.lifetimes import aliases
from ..layout.mesh import Mesh
from ..layout.sweep import Lanes, SizeSweep
from ..program.program import Function, Program
from .lines import Habits
from .links import Links
from .programs import ProgramClock, ProgramTime


@dataclass
class SweptLinks(Links):
    """Links on many meshes: ``lanes`` are those on each, and times are arrays."""

    lanes: Sequence[Links] = ()
    _times: dict[tuple[object, ...], float] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, lanes: Sequence[Links]) -> SweptLinks:
        """Return the links of several meshes as those of a sweep."""
        return cls(lanes[0].mesh, lanes[0].cluster, lanes[0].node, lanes=lanes)

    def seconds(self, op: str, axes: Sequence[str], size: Any, members: int = 0) -> Any:
        """Return the times of a collective."""
        return self._each(lambda links, size: links.seconds(op, axes, size, members), (op, members), axes, size)

    def hop(self, axis: str, size: Any) -> Any:
        """Return the times of one step of a ring of sends."""
        return self._each(lambda links, size: links.hop(axis, size), ("hop", 0), (axis,), size)

    def send_along(self, axis: str, size: Any) -> Any:
        """Return the times of a send between neighbours along an axis."""
        return self._each(lambda links, size: links.to_stage(axis, 0, 1, size), ("send", 0), (axis,), size)

    def _each(
        self, seconds: Callable[[Links, int], float], call: tuple[str, int], axes: Sequence[str], size: Any
    ) -> Lanes:
        """Return the time on each mesh. Groups that lie on nodes alike take the same."""
        sizes = np.broadcast_to(size, (len(self.lanes),))
        times = []
        for links, bytes_ in zip(self.lanes, sizes.tolist(), strict=True):
            key = *call, links.place(axes), int(bytes_)
            if key not in self._times:
                self._times[key] = seconds(links, int(bytes_))
            times.append(self._times[key])
        return np.array(times)


class SweptProgram(ProgramClock):
    """The clock of a program on the meshes of a sweep. Nothing is compared by text, as arrays have none."""

    def __init__(self, program: Program, sweep: SizeSweep, links: SweptLinks) -> None:
        super().__init__(replace(program, mesh=sweep), links, Habits(), views=aliases(program))

    def of(self, function: Function) -> ProgramTime:
        """Return the times of a run of a function, with nothing under way."""
        if function.name not in self._functions:
            self._functions[function.name] = self._walk(function, {})
        return self._functions[function.name]


def sweep_over(
    mesh: Mesh, sizes: Mapping[str, Lanes], batch: int, samples: Any, padded: bool, storing: Collection[str]
) -> SizeSweep:
    """Return a sweep of a mesh over other sizes of some axes. ``batch`` is the batch of the programs, and ``samples``
    that of each place; parameters are stored in parts over the axes that are ``storing``."""
    return SizeSweep(mesh.axes, mesh.factored, mesh.views, mesh.seen, sizes, batch, samples, padded, frozenset(storing))
