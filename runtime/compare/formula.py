"""The formula of updates: torch's own loop over single tensors, beside which the updates of ranks are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...compiler.program.optimizers import AVERAGE, OPTIMIZERS, PREVIOUS


def planned_rate(line: Mapping[str, Any], step: int) -> float:
    """Return the learning rate of a step, counted from 1, by the textbook formula of the line's shape in floats.

    >>> planned_rate({"shape": "cosine", "lr": 1.0, "warmup": 2, "to": 0.0, "over": 6}, 4)
    0.5
    """
    peak = line["lr"]
    if line["shape"] == "table":
        (first, lr), *later = line["table"]
        for last, rate in later:
            if step < last:
                return float(lr + (rate - lr) * max(step - first, 0) / (last - first))
            first, lr = last, rate
        return float(lr)
    if step < line["warmup"]:
        return float(peak * step / line["warmup"])
    if line["shape"] == "constant":
        return float(peak)
    start = line["over"] - line["fall"] if line["shape"] == "wsd" else line["warmup"]
    done = min(max((step - start) / (line["over"] - start), 0.0), 1.0)
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if line["shape"] == "cosine" else 1.0 - done
    return float(line["to"] + (peak - line["to"]) * left)


def rate_error(line: Mapping[str, Any], rate: Callable[[Mapping[str, Any], int], float]) -> float:
    """Return the largest difference of a function of rates from the formula, relative to the line's rate, at the steps
    where the shape of a line may change, beside them and between them."""
    ends = [0, line["warmup"], (line["over"] or 0) - line.get("fall", 0), line["over"] or 0]
    ends += [step for step, _ in line.get("table", ())]
    tried = {max(1, place + beside) for place in ends for beside in (-1, 0, 1)}
    tried |= {max(1, (first + last) // 2) for first, last in pairwise(sorted(ends))}
    largest = max((abs(planned_rate(line, step)) for step in tried), default=0.0) or 1.0
    return max(abs(rate(line, step) - planned_rate(line, step)) / largest for step in tried)


class FormulaUpdates:
    """The expected updates of the plan's optimizer ``line`` by torch's loop over single tensors, each with its own
    state.

    They are computed from the ranks' own gradients. The captured graph's updates could not be compared to 1e-10: the
    first step of Adam takes only a gradient's sign, also of one that is nothing but rounding.

    Arguments, groups, rates, clipping and averages are read from the line here, so that ``runtime/state/optimizer.py``,
    by which ranks update, is checked.
    """

    def __init__(self, line: Mapping[str, Any]) -> None:
        self._line = line
        self._groups = {name: group["set"] for group in line["groups"] for name in group["parameters"]}
        self._optimizers: dict[Hashable, torch.optim.Optimizer] = {}
        self._averages: dict[Hashable, Tensor] = {}

    def after(
        self, key: Hashable, name: str, before: Tensor, gradient: Tensor, norm: float, step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a piece of a parameter after a step, counted from 1, and by slot the tensors of its state. ``key``
        tells the piece from others, ``norm`` is the global norm of the gradients."""
        line, row, group = self._line, OPTIMIZERS[self._line["name"]], self._groups.get(name, {})
        if key not in self._optimizers:
            arguments = {word: line[word] for word in (*row.clauses, "lr", "weight_decay")}
            arguments |= {**line.get("arguments", {}), **group}
            self._optimizers[key] = getattr(torch.optim, row.torch_class)([before.clone()], foreach=False, **arguments)
            self._averages[key] = before
        optimizer = self._optimizers[key]
        (settings,) = optimizer.param_groups
        (parameter,) = settings["params"]
        settings["lr"] = planned_rate(line, step) * (group.get("lr", line["lr"]) / line["lr"] if line["lr"] else 1.0)
        parameter.copy_(before)
        parameter.grad = gradient * (1.0 if line["clip"] is None else min(1.0, line["clip"] / (norm + 1e-6)))
        optimizer.step()
        state = {slot: optimizer.state[parameter].get(slot) for slot in (*row.tensors, *row.optional)}
        if (average := line.get(AVERAGE)) is not None:
            if step % average["every"] == 0:
                self._averages[key] = average["decay"] * self._averages[key] + (1 - average["decay"]) * parameter
            state[AVERAGE] = self._averages[key]
        if PREVIOUS in line:
            state[PREVIOUS] = before
        return parameter, {slot: value for slot, value in state.items() if value is not None}

    def go_on_from(self, key: Hashable, slots: Mapping[str, Tensor]) -> None:
        """Take the state of a piece by slot as that before its next update: a run's own, which is rounded to its
        types."""
        optimizer = self._optimizers[key]
        (parameter,) = optimizer.param_groups[0]["params"]
        for slot, value in slots.items():
            if slot == AVERAGE:
                self._averages[key] = value.to(parameter.dtype)
            elif slot != PREVIOUS:
                optimizer.state[parameter][slot].copy_(value)
