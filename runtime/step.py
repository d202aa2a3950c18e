"""A step: the action list of a role walked on one or several ranks, from microbatches to reduced gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..compiler.actions import Action
from ..compiler.program import Program
from .execute import Backend, Environment, Machine

Batch = Mapping[str, torch.Tensor]
"""One microbatch of one rank: its part of each input."""


@dataclass(slots=True)
class RankState:
    """What one rank holds between steps: its pieces of parameters and buffers, by name."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class StepResult:
    """Of one rank: the loss and the gradients' global norm (the same on all), and its pieces of the gradients."""

    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    gradients: dict[str, torch.Tensor]


class Stepper:
    """Runs the actions of a step up to its gradients; the update is the optimizer's."""

    def __init__(
        self,
        programs: Mapping[str, Program],
        actions: Sequence[Action],
        backend: Backend,
        device: torch.device,
        machine: Callable[..., Machine] = Machine,
        **options: Any,
    ) -> None:
        self.actions, self.device, self.backend = tuple(actions), device, backend
        options.setdefault("reuse", options.get("watch") is None)  # who watches may keep what it saw
        self.machines = {name: machine(program, backend, device, **options) for name, program in programs.items()}

    def gradients(self, states: Sequence[RankState], batches: Sequence[Sequence[Batch]], step: int) -> list[StepResult]:
        """Loss and gradients of a step. ``batches[rank][microbatch]``; ``step`` counts from 0 and seeds dropout."""
        work = [_Work() for _ in states]
        for action in self.actions:
            handler = getattr(self, f"_{action.kind.lower()}", None)
            if handler is not None:
                handler(action, states, batches, step, work)
        return [StepResult(w.results["loss"], w.results.get("grad_norm"), _strip(w.results, "gradient ")) for w in work]

    def loss(self, states: Sequence[RankState], batches: Sequence[Sequence[Batch]], step: int) -> list[StepResult]:
        """The loss alone, of the same numbers; nothing is kept for a backward."""
        work = [_Work() for _ in states]
        for action in self.actions:
            if action.kind in ("COUNT", "SCALE", "F"):
                getattr(self, f"_{action.kind.lower()}")(action, states, batches, step, work)
                for w in work:
                    w.saved.clear()
        self._reduce_loss(work)
        return [StepResult(w.results["loss"], None, {}) for w in work]

    def _run(self, name: str, states: Sequence[RankState], work: Sequence[_Work], extra: Sequence[Environment]) -> Any:
        machine = self.machines[name]
        given = [
            {value.name: _bind(value.role, state, w, more) for value in machine.program.main.parameters}
            for state, w, more in zip(states, work, extra, strict=True)
        ]
        return machine.run(given)

    def _inputs(self, action: Action, batches: Any, step: int) -> list[Environment]:
        rng = torch.tensor([step, action.microbatch], dtype=torch.int64)
        return [
            {"rng": rng, **{f"input {name}": value for name, value in batch[action.microbatch].items()}}
            for batch in batches
        ]

    def _count(self, action: Action, states: Any, batches: Any, step: int, work: Sequence[_Work]) -> None:
        for w, made in zip(work, self._run("COUNT", states, work, self._inputs(action, batches, step)), strict=True):
            w.total("count", made["count"])

    def _scale(self, action: Action, states: Any, batches: Any, step: int, work: Sequence[_Work]) -> None:
        for w, made in zip(work, self._run("SCALE", states, work, [{}] * len(work)), strict=True):
            w.totals["scale"] = made["scale"]

    def _f(self, action: Action, states: Any, batches: Any, step: int, work: Sequence[_Work]) -> None:
        inputs = self._inputs(action, batches, step)
        for state, w, made in zip(states, work, self._run("F", states, work, inputs), strict=True):
            w.total("loss", made["loss"])
            state.buffers.update(_strip(made, "buffer "))
            w.saved[action.microbatch] = {key: value for key, value in made.items() if key.startswith("saved ")}

    def _b(self, action: Action, states: Any, batches: Any, step: int, work: Sequence[_Work]) -> None:
        inputs = self._inputs(action, batches, step)
        extra = [{**given, **w.saved.pop(action.microbatch)} for given, w in zip(inputs, work, strict=True)]
        for w, made in zip(work, self._run("B", states, work, extra), strict=True):
            for name, gradient in made.items():
                w.total(f"gradient {name}", gradient)

    def _reduce(self, action: Action, states: Any, batches: Any, step: int, work: Sequence[_Work]) -> None:
        for w, state, given in zip(work, states, batches, strict=True):
            w.own([*state.parameters.values(), *state.buffers.values(), *given[-1].values()])
        for w, made in zip(work, self._run("REDUCE", states, work, [{}] * len(work)), strict=True):
            w.results = made

    def _reduce_loss(self, work: Sequence[_Work]) -> None:
        """The loss's part of REDUCE, where there are no gradients."""
        main = self.machines["REDUCE"].program.main
        loss = next(value for value in main.parameters if value.role == "loss")
        axes = loss.type.placement.partial
        pieces = [w.totals["loss"] for w in work]
        if axes:
            pieces, arrival = self.backend.collective("parc.all_reduce", [",".join(axes)], pieces)
            if arrival is not None:
                arrival()
        for w, piece in zip(work, pieces, strict=True):
            w.results = {"loss": piece * w.totals["scale"]}


@dataclass(slots=True)
class _Work:
    """What one rank gathers during a step."""

    totals: dict[str, torch.Tensor] = field(default_factory=dict)
    saved: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    results: dict[str, torch.Tensor] = field(default_factory=dict)

    def total(self, key: str, value: torch.Tensor) -> None:
        """Add a microbatch's part."""
        self.totals[key] = self.totals[key] + value if key in self.totals else value

    def own(self, others: Iterable[torch.Tensor]) -> None:
        """Give every gradient storage of its own, so that REDUCE may write over it."""
        taken = {other.untyped_storage().data_ptr() for other in others}
        for key, value in self.totals.items():
            if key.startswith("gradient "):
                if value.untyped_storage().data_ptr() in taken:
                    value = self.totals[key] = value.clone()
                taken.add(value.untyped_storage().data_ptr())


def _bind(role: str, state: RankState, work: _Work, extra: Environment) -> torch.Tensor:
    """What a program's parameter of a role is bound to."""
    kind, _, name = role.partition(" ")
    if role in extra:
        return extra[role]  # type: ignore[no-any-return]
    if kind in ("parameter", "frozen"):
        return state.parameters[name]
    if kind in ("buffer", "constant"):
        return state.buffers[name]
    return work.totals[role]


def _strip(table: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in table.items() if key.startswith(prefix)}
