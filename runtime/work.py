"""What one rank holds between steps, and has and gathers during one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from .communication import Environment
from .owners import BUFFERS, PARAMETERS

_Item = TypeVar("_Item")
WorkKey = tuple[int, str, int]
"""What is kept between actions belongs to a stage, its ``F`` or ``B``, and a microbatch."""
Batch = Mapping[str, torch.Tensor]
"""One microbatch of one rank: its part of each input."""


@dataclass(slots=True)
class RankState:
    """What one rank holds between steps: its pieces of parameters and buffers, by name."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Work:
    """What one rank has and gathers during a step: its state, its part of each microbatch; ``keep`` what backward
    reads."""

    state: RankState
    parts: Sequence[Batch]
    keep: bool
    totals: dict[str, torch.Tensor] = field(default_factory=dict)
    kept: dict[WorkKey, dict[str, torch.Tensor]] = field(default_factory=dict)
    sent: dict[WorkKey, list[torch.Tensor]] = field(default_factory=dict)
    results: dict[str, torch.Tensor] = field(default_factory=dict)
    begun: Environment = field(default_factory=dict)
    """Of REDUCE what was begun ahead of it."""
    counted: Environment = field(default_factory=dict)
    """Of SCALE the count of all ranks, where they exchanged theirs ahead of it."""
    owned: set[str] = field(default_factory=set)
    """Keys of totals with storage of their own, to which later parts are added."""

    def total(self, key: str, value: torch.Tensor, own: bool = False) -> None:
        """Add a microbatch's part, unless it was added as it was made; ``own`` where its storage is nothing else's."""
        total = self.totals.get(key)
        if total is value:
            return
        if total is None:
            self.totals[key] = value
        elif key in self.owned:
            total.add_(value)
        else:
            self.totals[key], own = total + value, True
        if own:
            self.owned.add(key)

    def own_totals(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Totals of gradients, by the parameter's name, to which more may be added."""
        return {name: self.totals[key] for name in names if (key := f"gradient {name}") in self.owned}

    def hand_over(self, key: WorkKey, made: Environment) -> Environment:
        """Put what goes to another stage aside; the rest."""
        if sent := [value for name, value in made.items() if name.startswith("sent ")]:
            self.sent[key] = sent
        return {name: value for name, value in made.items() if not name.startswith("sent ")}

    def own(self, others: Iterable[torch.Tensor]) -> None:
        """Give every gradient storage of its own, so that REDUCE may write over it."""
        taken = {other.untyped_storage().data_ptr() for other in others}
        for key, value in self.totals.items():
            if key.startswith("gradient "):
                if value.untyped_storage().data_ptr() in taken:
                    value = self.totals[key] = value.clone()
                taken.add(value.untyped_storage().data_ptr())


def bind(role: str, work: Work, extra: Environment) -> torch.Tensor:
    """What a program's parameter of a role is bound to."""
    kind, _, name = role.partition(" ")
    if role in extra:
        return extra[role]  # type: ignore[no-any-return]
    if kind in PARAMETERS:
        return work.state.parameters[name]
    if kind in BUFFERS:
        return work.state.buffers[name]
    return work.totals[role]


def strip(table: Mapping[str, _Item], prefix: str) -> dict[str, _Item]:
    """What of a table has keys that begin with a prefix, by the rest of the key."""
    return {key.removeprefix(prefix): value for key, value in table.items() if key.startswith(prefix)}
