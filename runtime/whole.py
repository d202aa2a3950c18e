"""The whole weights of a session, gathered from all ranks, as the plain module has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch

from ..compiler.build.build import Build
from ..compiler.layout.placement import TensorType
from ..compiler.padding.pads import pads_from
from ..compiler.program.roles import Role
from ..compiler.program.stacked import is_stacked, part_names
from .opening import buffers_of, constants_of
from .owners import keepers_of, owners_of
from .state.gather import Gatherer
from .state.initial import Initial
from .work import RankState


@final
class WholeState:
    """The gathering of a build's parameters, and of the buffers that its steps change, from the ranks that hold them.
    ``types`` are those of the parameters."""

    def __init__(self, build: Build, gatherer: Gatherer, types: Mapping[str, TensorType]) -> None:
        roles, constants = tuple(build.roles.values()), constants_of(build)
        self._gatherer, self._types, self._aliases = gatherer, types, build.manifest["aliases"]
        self._pads = pads_from(build.manifest["padding"])
        self._updates = {name: constants[name] for name in buffers_of(build)}
        self.owners: Mapping[str, Sequence[Role]] = owners_of(roles, types)
        """The roles that hold each parameter."""
        self._keepers = keepers_of(roles, self._updates)

    def gather(self, state: RankState, initial: Initial) -> dict[str, torch.Tensor]:
        """Return whole tensors on the CPU by all names of the module's own state. What no step changes is as it was
        made. All ranks call it."""
        whole = {
            name: self._gatherer.whole(state.parameters.get(name), type_, self.owners[name], self._pads.get(name, ()))
            for name, type_ in self._types.items()
        }
        for name, type_ in self._updates.items():
            whole[name] = self._gatherer.whole(state.buffers.get(name), type_, self._keepers[name])
        for alias, name in self._aliases.items():
            if name in whole:
                whole[alias] = whole[name]
        for name in filter(is_stacked, list(whole)):
            stack = whole.pop(name)
            whole |= dict(zip(part_names(name, len(stack)), stack, strict=True))
        return {name: initial.own(name, whole.get(name)) for name in initial.kept}
