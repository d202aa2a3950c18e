"""The reference run: the captured graph trained on one device, with which all ranks of a build are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...compiler.layout.mesh import Mesh
from ...compiler.padding.pads import Pads
from ...compiler.program.actions import Action
from ...compiler.program.binding import BUFFERS, LOSS, PARAMETERS, SCALE, Binding, Kind
from ...compiler.program.optimizers import PREVIOUS
from ...compiler.program.program import Line, Program
from ...compiler.program.roles import Role
from ...compiler.program.step_values import LOAD, Bias, Division, divisors
from ..backends.in_process import InProcess
from ..machine.execute import Machine
from ..machine.kernels import REFERENCE_KERNELS
from ..state.optimizer import clamp_weights, make_optimizer, update
from .plain import CPU

Microbatches = Sequence[Mapping[str, Tensor]]
"""The inputs of each microbatch of a step, whole."""

Metrics = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]]
"""A function that computes an action's metrics for the unsharded model from its parameters and gradients by name."""
Watch = Callable[[Line, Sequence[dict[str, Any]]], None]
"""A function that is called after each line with the environment of each rank."""
METRICS: dict[str, Metrics] = {}
"""The metrics of each kind of action whose programs return any."""


@dataclass(frozen=True)
class Case:
    """The subject of a simulation: the programs of a build, its reference, and the whole initial values by name."""

    programs: Mapping[str, Program]
    reference: Program
    actions: Sequence[Action]
    mesh: Mesh
    microbatches: int
    optimizer: Mapping[str, Any]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    stored: Mapping[str, str]
    pads: Pads = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)
    """The roles of a pipeline by name; empty where all ranks run ``programs``."""
    state: Mapping[str, float] = field(default_factory=dict)
    """The state of steps before the first one."""
    biases: Mapping[str, Bias] = field(default_factory=dict)
    """The biases that balance experts, by the module of these."""
    divisions: tuple[Division, ...] = ()
    """The division of each term of the loss."""
    device: torch.device = CPU
    """The device that all of it is computed on."""


def on_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return tensors on a device, without a copy of those that are there."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def wide(tensor: Tensor) -> Tensor:
    """Return a copy in float64; integers stay as they are."""
    return tensor.detach().to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


def largest(tensor: Tensor) -> float:
    """Return the largest magnitude of the finite entries."""
    finite = tensor.detach().double().abs()
    finite = finite[finite.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def largest_difference(first: Tensor, second: Tensor) -> float:
    """Return the largest difference of two entries; equal infinities do not differ."""
    first, second = first.detach().double(), second.detach().double()
    apart = torch.where(first == second, 0.0, (first - second).abs())
    return float(apart.max()) if apart.numel() else 0.0


class ReferenceRun:
    """A training run of the captured graph on one device, microbatch by microbatch, with one denominator for the whole
    step. It computes in ``float64``, or in the model's own types."""

    def __init__(self, case: Case, float64: bool = True, watch: Watch | None = None) -> None:
        self.case = case
        self.machine = Machine(
            case.reference, InProcess(Mesh()), case.device, wide=float64, kernels=REFERENCE_KERNELS, watch=watch
        )
        self.counts = any(function.name == "count" for function in case.reference.functions)
        frozen = case.reference.main.bound("frozen")
        self._copied = wide if float64 else lambda value: value.detach().clone()
        parameters, buffers = on_device(case.parameters, case.device), on_device(case.buffers, case.device)
        self.parameters = {
            name: self._copied(value).requires_grad_(name not in frozen) for name, value in parameters.items()
        }
        self.buffers = {name: self._copied(value) for name, value in buffers.items()}
        self.read = self.parameters
        """The weights that the next step computes with: its parameters, or those before the last update."""
        self.optimizer = make_optimizer(self.parameters, case.optimizer)
        self.loads: dict[str, Tensor] = {}
        """The tokens of each expert in the last step, by the module of the experts."""
        self.returned: dict[str, list[Tensor]] = {}
        """The tensors that the model returned in the last step, one of each microbatch by name."""
        self.metrics: Mapping[str, Tensor] = {}
        """The metrics of the last step."""

    def _environment(
        self,
        function: str,
        batch: Mapping[str, Tensor],
        step: int,
        microbatch: int,
        weights: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Return what a function reads; ``weights`` are those of the loss's terms."""
        called = self.case.reference.function(function)
        environment: dict[str, Any] = {
            value.name: torch.tensor([step, microbatch]) for value in called.bound("rng").values()
        }
        sources: tuple[tuple[tuple[Kind, ...], Mapping[str, Tensor]], ...] = (
            (("input",), batch), (PARAMETERS, self.read), (BUFFERS, self.buffers), (("term",), weights)
        )  # fmt: skip
        for kinds, source in sources:
            environment.update((value.name, source[name]) for name, value in called.bound(*kinds).items())
        return environment

    def gradients(self, batches: Microbatches, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and whole gradients of one step."""
        device = self.case.device
        clamp_weights(self.read, self.case.optimizer)
        batches = [on_device(batch, device) for batch in batches]
        counts = [
            self.machine.run([self._environment("count", b, step, i)], "count")[0] if self.counts else {}
            for i, b in enumerate(batches)
        ]
        totals = {key: float(sum(m[key].double() for m in counts)) for key in counts[0]}
        divisor, weights_of_terms = divisors(self.case.divisions, totals, len(batches))
        wide = partial(torch.tensor, dtype=torch.float64, device=device)
        scale, weights = 1.0 / wide(divisor), {number: wide(weight) for number, weight in weights_of_terms.items()}
        total, self.loads, self.returned = torch.zeros((), dtype=torch.float64, device=device), {}, {}
        for index, batch in enumerate(batches):
            (results,) = self.machine.run([self._environment("forward", batch, step, index, weights)])
            for loss in (value for key, value in results.items() if key == LOSS):
                if loss.requires_grad:
                    (loss * scale).backward()
                total += loss.detach() * scale
            for key, value in results.items():
                if key.kind == "load":
                    self.loads[key.name] = self.loads.get(key.name, 0) + value
                if key.kind == "output":
                    self.returned.setdefault(key.name, []).append(value.detach())
            self.buffers.update(
                {key.name: self._copied(value) for key, value in results.items() if key.kind == "buffer"}
            )
        return total, {n: p.grad.detach().clone() for n, p in self.read.items() if p.grad is not None}

    def of_step(self, function: str, *sources: Mapping[str, Tensor]) -> dict[Binding, Tensor]:
        """Return what a function of the reference makes of values of the whole step, by the names that they are bound
        to: ``scale`` of counts, ``update`` of loads and buffers."""
        called, known = self.case.reference.function(function), {k: v for source in sources for k, v in source.items()}
        environment = {value.name: known[value.binding.name] for value in called.parameters if value.binding}
        (results,) = self.machine.run([environment], function)
        return results

    def step(self, batches: Microbatches, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and whole gradients of one step, then update the parameters."""
        total, gradients = self.gradients(batches, step)
        norm = torch.sqrt(sum((g.square().sum() for g in gradients.values()), torch.zeros_like(total)))
        with torch.no_grad():
            self.metrics = {
                name: value
                for kind in self.case.programs.keys() & METRICS.keys()
                for name, value in METRICS[kind](self.read, gradients).items()
            }
            if self.loads:
                self.metrics = {**self.metrics, LOAD.name: torch.cat([*self.loads.values()])}
            self.buffers.update(moved_biases(self.case.biases, self.loads, self.buffers))
            # clipping scales in place, but gradients are compared before clipping
            clipped = {name: gradient.clone() for name, gradient in gradients.items()}
            if PREVIOUS in self.case.optimizer:
                trained = self.parameters.items()
                self.read = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in trained}
            update(self.optimizer, self.case.optimizer, step + 1, self.parameters, clipped, norm)
        return total, gradients


def moved_biases(
    biases: Mapping[str, Bias], loads: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the biases that balance experts after a step that gave each of them so many tokens, by their buffers."""
    moved = {}
    for module, bias in biases.items():
        load = loads[module].double()
        moved[bias.buffer] = buffers[bias.buffer] + bias.rate * torch.sign(load.mean() - load)
    return moved


_DRAWS = 3
"""The number of random counts and loads at which functions of the reference are compared with their formulas."""


def step_errors(case: Case) -> Iterator[tuple[str, float]]:
    """Yield the names of what ``scale`` and ``update`` of the reference return, each with its largest relative error
    beside the divisions of the loss, and beside the biases, that the manifest says. Whole steps are compared with these
    elsewhere; the certificate compares programs with the functions."""
    run, names = ReferenceRun(case), {function.name for function in case.reference.functions}
    random, within = torch.Generator().manual_seed(0), partial(torch.randint, 1, 1000)
    for _ in range(_DRAWS):
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        if "scale" in names:
            bound = case.reference.function("scale").bound("count")
            counts = {name: within((), generator=random) for name in bound}
            totals = {Binding("count", name): float(value) for name, value in counts.items()}
            divisor, weights = divisors(case.divisions, totals, case.microbatches)
            results, exact = run.of_step("scale", counts), partial(torch.tensor, dtype=torch.float64)
            pairs[str(SCALE)] = results.pop(SCALE), exact(1.0 / divisor)
            pairs.update((str(key), (value, exact(weights[key.name]))) for key, value in results.items())
        if "update" in names:
            loads = {
                name: within(value.type.shape, generator=random)
                for name, value in case.reference.function("update").bound("load").items()
            }
            moved = moved_biases(case.biases, loads, run.buffers)
            results = run.of_step("update", loads, run.buffers)
            pairs.update((str(key), (value, moved[key.name])) for key, value in results.items())
        for name, (value, expected) in pairs.items():
            yield name, largest_difference(value, expected) / (largest(expected) or 1.0)
