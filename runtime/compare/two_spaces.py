"""Two memory spaces in one process: the kernels of lines that store and load, for the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from ...compiler.ops.rules import facts
from ...compiler.program.binding import PARAMETERS
from ...compiler.program.program import CARRIERS, Program
from ..machine.kernels import KERNELS
from ..machine.site import Site
from ..machine.ways import Kernel
from ..work import RankState


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A value in the other memory space. It is no tensor: no operator can read it before a line loads it."""

    value: torch.Tensor

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory that holds the value."""
        return self.value.untyped_storage()


def _store(site: Site, value: torch.Tensor, word: str) -> Elsewhere:
    assert isinstance(value, torch.Tensor), "what is stored already is stored again"
    return Elsewhere(value.clone())


def _load(site: Site, kept: Elsewhere, word: str) -> torch.Tensor:
    assert isinstance(kept, Elsewhere), "what lies in memory is loaded"
    return kept.value.clone()


TWO_SPACES: Mapping[str, Kernel] = {**KERNELS, CARRIERS["away"]: _store, CARRIERS["back"]: _load}
"""The code of operators where there are two memory spaces."""


def loaded_parameters(programs: Iterable[Program]) -> set[str]:
    """Return the names of the parameters that programs load, because they lie in the other space."""
    names = set()
    for main in (program.main for program in programs):
        names |= {name for name, value in main.bound(*PARAMETERS).items()
                  if any(facts(line.op).carries == "back" for line in main.readers[value.name])}  # fmt: skip
    return names


def lying_elsewhere(state: RankState, names: set[str]) -> RankState:
    """Return a rank's state with some of its parameters in the other space."""
    parameters = {name: Elsewhere(value) if name in names else value for name, value in state.parameters.items()}
    return replace(state, parameters=parameters) if names else state  # type: ignore[arg-type]
