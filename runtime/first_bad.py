"""The search for the first number of a step that is not finite."""

from __future__ import annotations

from .data.feed import LocalParts
from .faults import Bad, Watcher, bad_tensor
from .step import Stepper
from .work import RankState


def find_bad(stepper: Stepper, state: RankState, parts: LocalParts, step: int, rank: int) -> Bad | None:
    """Run a step again under watch, on a stepper of its own. Return what this rank saw first."""
    seen = bad_tensor(state.parameters, "parameter", rank)
    for part in parts:
        floats = {name: value for name, value in part.items() if value.is_floating_point()}
        seen = seen or bad_tensor(floats, "input", rank)
    watcher = Watcher(rank, lambda: stepper.current)
    for machine in stepper.machines.values():
        machine.watch = watcher.watch(machine.program.action)
    stepper.gradients([state], [parts], step)
    return seen or watcher.found()
