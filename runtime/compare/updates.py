"""Updates by the optimizer's formula: torch's loop over single tensors, beside which the updates of ranks are compared.

A gradient that is nothing but rounding has a sign, and a first step of Adam takes nothing else of it. So an update is
not the captured graph's to 1e-10, but it is the formula's of the gradients that the ranks themselves have.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from ...compiler.program.optimizers import AVERAGE, OPTIMIZERS
from ..state.optimizer import rate


class FormulaUpdates:
    """The updates of some tensors by the formula of the plan's ``line``, each with a state of its own.

    Of ``runtime/state/optimizer.py``, by which ranks update, it takes the rate of a step alone: arguments, groups,
    clipping and averages are read from the line here.
    """

    def __init__(self, line: Mapping[str, Any]) -> None:
        self._line = line
        self._groups = {name: group["set"] for group in line["groups"] for name in group["parameters"]}
        self._optimizers: dict[Hashable, torch.optim.Optimizer] = {}
        self._averages: dict[Hashable, torch.Tensor] = {}

    def after(
        self, key: Hashable, name: str, before: torch.Tensor, gradient: torch.Tensor, norm: float, step: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return a piece of a parameter after a step, counted from 1, and by slot the tensors of its state. ``key``
        tells the piece from others, ``norm`` is the global norm of the gradients."""
        line, row, group = self._line, OPTIMIZERS[self._line["name"]], self._groups.get(name, {})
        if key not in self._optimizers:
            arguments = {word: line[word] for word in (*row.clauses, "lr", "weight_decay")}
            arguments |= {**line.get("arguments", {}), **group}
            self._optimizers[key] = getattr(torch.optim, row.made)([before.clone()], foreach=False, **arguments)
            self._averages[key] = before
        optimizer = self._optimizers[key]
        (settings,) = optimizer.param_groups
        (parameter,) = settings["params"]
        settings["lr"] = rate(line, step) * (group.get("lr", line["lr"]) / line["lr"] if line["lr"] else 1.0)
        parameter.copy_(before)
        parameter.grad = gradient * (1.0 if line["clip"] is None else min(1.0, line["clip"] / (norm + 1e-6)))
        optimizer.step()
        state = {slot: optimizer.state[parameter].get(slot) for slot in (*row.tensors, *row.optional)}
        if (average := line.get(AVERAGE)) is not None:
            if step % average["every"] == 0:
                self._averages[key] = average["decay"] * self._averages[key] + (1 - average["decay"]) * parameter
            state[AVERAGE] = self._averages[key]
        return parameter, {slot: value for slot, value in state.items() if value is not None}
