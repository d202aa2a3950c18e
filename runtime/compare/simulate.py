"""The simulator: all ranks of a build in one process in float64, compared with the captured graph step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ...compiler.layout.mesh import Mesh
from ...compiler.layout.pieces import take
from ...compiler.layout.placement import TensorType, parse_type
from ...compiler.ops.rules import facts
from ...compiler.padding.pads import Pad
from ...compiler.padding.tensors import grow, shrink
from ...compiler.program.actions import COUNTING, FORWARD
from ...compiler.program.binding import BUFFERS, LOSS, PARAMETERS, RNG, Binding, Kind
from ...compiler.program.program import CARRIERS, Line, Program
from ...compiler.program.roles import SINGLE, Role
from ..backends.in_process import InProcess, Meeting
from ..data.random_batch import random_batch
from ..machine.kernels import KERNELS
from ..machine.registry import Kernel, KernelContext
from ..ranks.gather import held, owners_of, piece_place, whole_tensor
from ..ranks.work import Batch, RankState, StepResult, Work
from ..session.evaluation import returned_types, without_padding
from ..state.optimizer import make_optimizer, rate, read_by_steps, update
from ..state.step_state import first_state
from ..step import Stepper
from .agreement import DRAWS, TOLERANCE, Agreement, joined, stacked
from .formula import FormulaUpdates, rate_error
from .model_run import Case, Microbatches, ReferenceRun, largest, largest_difference, on_device, wide
from .roundings import Roundings

# ---- offload: two memory spaces in one process


@dataclass(frozen=True, slots=True)
class HostValue:
    """A value in host memory. It is no tensor, so that no operator can read it before a line loads it."""

    value: Tensor

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory that holds the value."""
        return self.value.untyped_storage()


def _store(context: KernelContext, value: Tensor, word: str) -> HostValue:
    assert isinstance(value, Tensor), "what is stored already is stored again"
    return HostValue(value.clone())


def _load(context: KernelContext, kept: HostValue, word: str) -> Tensor:
    assert isinstance(kept, HostValue), "what lies in memory is loaded"
    return kept.value.clone()


OFFLOAD_KERNELS: Mapping[str, Kernel] = {**KERNELS, CARRIERS["away"]: _store, CARRIERS["back"]: _load}
"""The kernels of a simulation, where host memory is simulated as a space of its own."""


def loaded_parameters(programs: Iterable[Program]) -> set[str]:
    """Return the names of the parameters that programs load, because they are offloaded."""
    names = set()
    for main in (program.main for program in programs):
        names |= {name for name, value in main.bound(*PARAMETERS).items()
                  if any(facts(line.op).carries == "back" for line in main.readers[value.name])}  # fmt: skip
    return names


def with_host_values(state: RankState, names: set[str]) -> RankState:
    """Return a rank's state with some of its parameters in host memory."""
    parameters = {name: HostValue(value) if name in names else value for name, value in state.parameters.items()}
    return replace(state, parameters=parameters) if names else state  # type: ignore[arg-type]


# ---- the simulator


Coming = tuple[Microbatches, int]
"""The inputs and the number of the next step."""
_LATE_STEP = (1 << 53) + 1
"""The number of a late step: only int64 can hold it, and every small modulus changes it."""
_LEAST_UPDATE = 1e-4
"""The least size of an update relative to its parameter, because their sum rounds off smaller ones."""


class Simulation:
    """All ranks of a build in lockstep, each with its own pieces and optimizer. Values that lines offload are in a
    memory space of their own. They compute in ``float64``, or in the programs' own types."""

    def __init__(
        self, case: Case, watch: Callable[[Line, Sequence[dict[str, Any]]], None] | None = None,
        float64: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        self.case, self.float64 = case, float64
        self.types = {name: parse_type(text, case.mesh) for name, text in case.stored.items()}
        self.meeting = Meeting()
        self.roles = tuple(case.roles.values()) or (Role(SINGLE, case.programs, tuple(case.actions)),)
        self.backends = [
            InProcess(case.mesh, role.rank, role.axis, self.meeting) if role.axis else InProcess(case.mesh)
            for role in self.roles
        ]
        options.setdefault("kernels", OFFLOAD_KERNELS)
        self.steppers = [
            Stepper(
                role.programs, role.actions, backend, case.device, axis=role.axis, wide=float64, watch=watch, **options
            )
            for role, backend in zip(self.roles, self.backends, strict=True)
        ]
        self.on_host = loaded_parameters(program for role in self.roles for program in role.programs.values())
        """The names of the parameters in host memory."""
        owners = owners_of(self.roles, self.types)
        states = {rank: self._state(rank, role, owners) for role, backend in zip(self.roles, self.backends, strict=True)
                  for rank in backend.ranks}  # fmt: skip
        self.states = [states[rank] for rank in range(case.mesh.world)]
        self.optimizers = [make_optimizer(state.parameters, case.optimizer) for state in self.states]
        self._begun: dict[Stepper, list[Work]] = {}
        """The work of the next step, where that was begun."""

    def _state(self, rank: int, role: Role, owners: Mapping[str, Sequence[Role]]) -> RankState:
        def piece(whole: Tensor, type_: TensorType, pads: Sequence[Pad] = ()) -> Tensor:
            copy = wide(whole) if self.float64 else whole.to(type_.dtype, copy=True)
            return self.part(grow(copy, pads), type_, rank).to(self.case.device)

        parameters = {name: type_ for name, type_ in self.types.items() if role in owners[name]}
        buffered = held(role, BUFFERS)
        buffers = {name: type_ for name, type_ in self._buffer_types().items() if name in buffered}
        return RankState(
            {n: piece(self.case.parameters[n], t, self.case.pads.get(n, ())) for n, t in parameters.items()},
            {n: piece(self.case.buffers[n], t) for n, t in buffers.items()},
            first_state(role.programs, self.case.state, self.case.device, self.float64),
        )

    def part(self, whole: Tensor, type_: TensorType, rank: int) -> Tensor:
        """Return the part of a whole tensor that a rank holds."""
        return take(whole, type_.placement, self.case.mesh, self.case.mesh.coordinates(rank))

    def _buffer_types(self, kinds: Sequence[Kind] = BUFFERS) -> dict[str, TensorType]:
        forwards = (program for role in self.roles for program in role.programs.values() if program.action == FORWARD)
        return {name: value.type for program in forwards for name, value in program.main.bound(*kinds).items()}

    def local_batches(self, batches: Microbatches) -> list[list[dict[str, Tensor]]]:
        """Return each rank's part of each microbatch."""
        programs = [self.case.programs[action] for action in (FORWARD, COUNTING) if action in self.case.programs]
        types = {name: value.type for program in programs for name, value in program.main.bound("input").items()}
        batches = [on_device(batch, self.case.device) for batch in batches]
        typed = [[(name, whole, types[name]) for name, whole in batch.items() if name in types] for batch in batches]
        return [[{name: self.part(whole, type_, rank) for name, whole, type_ in batch} for batch in typed]
                for rank in range(self.case.mesh.world)]  # fmt: skip

    def step(
        self, batches: Microbatches, step: int, coming: Coming | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return every rank's loss, and the whole gradients, then update every rank. Where steps overlap, the one that
        is ``coming`` is begun beside this one."""
        results = self.run(partial(self._overlapping, coming=coming), batches, step)
        self.before = [{name: value.clone() for name, value in state.parameters.items()} for state in self.states]
        self.gradients = [result.gradients for result in results]
        names = dict.fromkeys(name for of_rank in self.gradients for name in of_rank)
        whole = {name: self.whole(self.gradients, name) for name in names}
        self.spread = _replica_spread(self.gradients, self.types, self.case.mesh)
        self.norms = [result.grad_norm for result in results]
        self.metrics = [result.metrics for result in results]
        self.returned = [stacked(result.returned) for result in results]
        for state, optimizer, result in zip(self.states, self.optimizers, results, strict=True):
            # ranks of one process may share a collective's result, and clipping scales in place
            gradients = {name: gradient.clone() for name, gradient in result.gradients.items()}
            update(optimizer, self.case.optimizer, step + 1, state.parameters, gradients, result.grad_norm)
            state.steps.update(result.state)
        return [result.loss for result in results], whole

    def _overlapping(
        self, stepper: Stepper, states: Sequence[RankState], batches: Sequence[Sequence[Batch]], step: int,
        coming: Coming | None,
    ) -> list[StepResult]:  # fmt: skip
        """Return the results of a step on the ranks of a role. Parts of it may have been done beside the last one."""
        work, ranks = self._begun.pop(stepper, None), self.backends[self.steppers.index(stepper)].ranks
        if work is None or work[0].step != step:
            work = stepper.begin(states, batches, step)
        for w, state in zip(work, states, strict=True):
            w.state = state
        if coming is not None and stepper.overlaps:
            parts = self.local_batches(coming[0])
            begun = stepper.begin([self.states[at] for at in ranks], [parts[at] for at in ranks], coming[1])
            self._begun[stepper] = begun
        return stepper.finish(work, step, self._begun.get(stepper, ()))

    def run(self, do: Callable[..., list[StepResult]], batches: Microbatches, step: int) -> list[StepResult]:
        """Run ``Stepper.gradients`` or ``Stepper.loss`` on every rank; roles run side by side."""
        local = self.local_batches(batches)

        def of(stepper: Stepper, ranks: Sequence[int]) -> list[StepResult]:
            states = [with_host_values(self.read(rank), self.on_host) for rank in ranks]
            return do(stepper, states, [local[rank] for rank in ranks], step)

        jobs = [
            partial(of, stepper, backend.ranks) for stepper, backend in zip(self.steppers, self.backends, strict=True)
        ]
        by_role = self.meeting.run(jobs) if len(jobs) > 1 else [jobs[0]()]
        by_rank = {rank: result for backend, results in zip(self.backends, by_role, strict=True)
                   for rank, result in zip(backend.ranks, results, strict=True)}  # fmt: skip
        return [by_rank[rank] for rank in range(self.case.mesh.world)]

    def read(self, rank: int) -> RankState:
        """Return the state of a rank with the weights that its next step computes with."""
        state = self.states[rank]
        return replace(state, parameters=read_by_steps(self.optimizers[rank], self.case.optimizer, state.parameters))

    def whole(self, ranks: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
        """Return a parameter or its gradient, put together from the pieces of ``ranks`` by name."""
        pieces = {rank: have[name] for rank, have in enumerate(ranks) if name in have}
        return whole_tensor(pieces, self.types[name].placement, self.case.mesh)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return every parameter, put together."""
        for name in self.types:
            yield name, self.whole([state.parameters for state in self.states], name)

    def buffers(self) -> Iterator[tuple[str, dict[int, Tensor], TensorType]]:
        """Yield every buffer that the model keeps: the pieces of the ranks that have it, and its type."""
        for name, type_ in self._buffer_types(("buffer",)).items():
            have = enumerate(state.buffers for state in self.states)
            yield name, {rank: buffers[name] for rank, buffers in have if name in buffers}, type_

    def whole_buffer(self, pieces: Mapping[int, Tensor], type_: TensorType) -> Tensor:
        """Return a buffer, put together from the pieces of the ranks that have it."""
        return whole_tensor(pieces, type_.placement, self.case.mesh)

    def take_state(self, reference: ReferenceRun) -> None:
        """Continue from the reference's weights and buffers, so that rounding errors are not carried into the next
        step, where batch statistics of few elements may amplify them without bound."""
        with torch.no_grad():
            for rank, state in enumerate(self.states):
                read = self.read(rank).parameters
                for name, parameter in state.parameters.items():
                    for piece, of_reference in ((read[name], reference.read), (parameter, reference.parameters)):
                        whole = grow(of_reference[name], self.case.pads.get(name, ()))
                        piece.copy_(self.part(whole, self.types[name], rank))
                for name, pieces, type_ in self.buffers():
                    if rank in pieces:
                        state.buffers[name] = self.part(reference.buffers[name], type_, rank).clone()

    def parameter_spread(self) -> dict[str, float]:
        """Return, by parameter, the largest difference between two replicas."""
        return _replica_spread([state.parameters for state in self.states], self.types, self.case.mesh)


def _replica_spread(
    ranks: Sequence[Mapping[str, Tensor]], types: Mapping[str, TensorType], mesh: Mesh
) -> dict[str, float]:
    """Return, by tensor, the largest difference between a replica and the first one, infinite where one alone is NaN;
    all must be equal."""
    spread: dict[str, float] = {}
    for name, type_ in types.items():
        first: dict[tuple[int, ...], Tensor] = {}
        for rank, pieces in enumerate(ranks):
            if name in pieces:
                kept = first.setdefault(piece_place(rank, type_.placement, mesh), pieces[name])
                apart = largest_difference(pieces[name], kept)
                spread[name] = max(spread.get(name, 0.0), math.inf if math.isnan(apart) else apart)
    return spread


def _max_abs(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def compare(case: Case, steps: int = 3) -> Agreement:
    """Train the simulation and the captured graph for some steps, and measure the differences of loss, gradients, their
    norm, updated parameters and buffers. If the model draws random numbers, the last of several steps is a late one.

    Errors are relative to a tensor's own largest entry, but at least to a thousandth of the largest of all gradients,
    or for buffers of all parameters and changed buffers, because what is only rounding has no relative error. The part
    of an error above ``TOLERANCE`` that rounding explains is not counted (see ``Roundings``). If numbers differ where
    scores of a top-k nearly tie, other random data are drawn.
    """
    for seed in range(DRAWS):
        agreement = _compare(case, steps, seed)
        if not agreement.tied:
            break
    return agreement


def _compare(case: Case, steps: int, seed: int) -> Agreement:
    agreement = Agreement()
    watch = agreement.margin.watch
    reference, simulation, roundings = ReferenceRun(case, watch=watch), Simulation(case), Roundings(case, watch)
    formula = FormulaUpdates(case.optimizer)
    agreement.note("parameter", rate_error(case.optimizer, rate), "rates of steps")
    generator = torch.Generator().manual_seed(seed)
    draws = RNG in case.reference.main.bindings
    numbers = [_LATE_STEP if draws and 0 < index == steps - 1 else index for index in range(steps)]
    drawn = [(random_batch(case.reference, case.microbatches, generator), step) for step in numbers]
    for (batches, step), coming in zip_longest(drawn, drawn[1:]):
        roundings.begin(reference, batches, step)
        loss, gradients = reference.step(batches, step)
        wrong = [
            f"the gradient of `{name}` is not finite" for name, value in gradients.items() if not value.isfinite().all()
        ]
        wrong = [f"the loss is {float(loss)}"] if not loss.isfinite() else wrong
        if wrong:
            agreement.not_finite = f"{wrong[0]} in step {step + 1} on random data"
            return agreement
        losses, simulated = simulation.step(batches, step, coming)
        top = float(loss.abs().clamp_min(1e-30))
        for rank, value in enumerate(losses):
            error = roundings.unexplained(LOSS, loss, float((value - loss).abs()), top)
            agreement.note("loss", error, f"step {step}, rank {rank}")
        norm = _global_norm(simulated.values())  # of the ranks' gradients, which are compared below
        for rank, returned in enumerate(simulation.norms if simulated else ()):
            error = float("inf") if returned is None else abs(float(returned) - norm) / max(norm, 1e-30)
            agreement.note("norm", error, f"step {step}, rank {rank}")
        _compare_metrics(agreement, reference, simulation, step)
        _compare_returned(agreement, reference, simulation, roundings, step)
        for name, gradient in gradients.items():
            if name not in simulated and _max_abs(gradient) > 0:
                agreement.note("gradient", float("inf"), f"step {step}, {name} (missing)")
        floor = 1e-3 * max((_max_abs(g) for g in gradients.values()), default=0.0)
        for name, value in simulated.items():
            value, kept = _unpadded(value, case.pads.get(name, ()))
            expected = gradients.get(name, torch.zeros_like(value))
            top, apart = max(_max_abs(expected), floor, 1e-30), _max_abs(value - expected)
            key = Binding("gradient", name)
            error = roundings.unexplained(key, expected, apart, top) if name in gradients else apart / top
            error = max(error, simulation.spread.get(name, 0.0) / top) if kept else float("inf")
            agreement.note("gradient", error, f"step {step}, {name}")
        _compare_updates(agreement, simulation, formula, norm, step)
        _compare_buffers(agreement, reference, simulation, roundings, step)
        if agreement.largest > TOLERANCE and roundings.amplified:
            agreement.amplified = f"{roundings.amplified} in step {step + 1}"
        simulation.take_state(reference)
        agreement.steps += 1
    return agreement


def _compare_metrics(agreement: Agreement, reference: ReferenceRun, simulation: Simulation, step: int) -> None:
    """Compare the metrics that actions returned on every rank with those of the reference."""
    for rank, returned in enumerate(simulation.metrics):
        for name in sorted({*returned, *reference.metrics}):
            error = float("inf")
            if name in returned and name in reference.metrics:
                expected = reference.metrics[name]
                error = _max_abs((returned[name] - expected).double()) / max(_max_abs(expected), 1e-30)
            agreement.note("metric", error, f"step {step}, rank {rank}, {name}")


def _compare_returned(
    agreement: Agreement, reference: ReferenceRun, simulation: Simulation, roundings: Roundings, step: int
) -> None:
    """Compare the tensors that the model returns."""
    types = {name: type_ for name, (type_, _) in returned_types(simulation.roles).items()}
    mesh = simulation.case.mesh
    pieces = [{name: value.double() for name, value in of_rank.items()} for of_rank in simulation.returned]
    whole, spread = joined(pieces, types, mesh), _replica_spread(pieces, types, mesh)
    for name, expected in stacked(reference.returned).items():
        error = float("inf")
        if name in whole:
            top = max(_max_abs(expected), 1e-30)
            apart = max(largest_difference(without_padding(whole[name], expected.shape), expected), spread[name])
            error = roundings.unexplained(Binding("output", name), expected, apart, top)
        agreement.note("output", error, f"step {step}, output {name}")


def _global_norm(gradients: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


def _unpadded(value: Tensor, pads: tuple[Pad, ...]) -> tuple[Tensor, bool]:
    """Return a whole tensor without padding, and whether its padding was exactly zero."""
    real = shrink(value, pads)
    return real, not pads or torch.equal(grow(real, pads), value)


def _compare_updates(
    agreement: Agreement, simulation: Simulation, formula: FormulaUpdates, norm: float, step: int
) -> None:
    """Compare updated parameters and the optimizer's state with the formula's, piece by piece. ``norm`` is the global
    norm of the gradients. Replicas must be bitwise equal, and padding exactly zero."""
    case, spread, seen = simulation.case, simulation.parameter_spread(), set[Hashable]()
    for rank, (before, optimizer) in enumerate(zip(simulation.before, simulation.optimizers, strict=True)):
        for name, old in before.items():
            key = name, piece_place(rank, simulation.types[name].placement, case.mesh)
            if key in seen:
                continue
            seen.add(key)
            value, gradient = simulation.states[rank].parameters[name], simulation.gradients[rank].get(name)
            expected, slots = old, dict[str, Tensor]()
            if gradient is not None:
                expected, slots = formula.after(key, name, old, gradient, norm, step + 1)
            top = max(_max_abs(expected - old), _LEAST_UPDATE * _max_abs(old), 1e-30)
            agreement.note("parameter", max(_max_abs(value - expected), spread[name]) / top, f"step {step}, {name}")
            for slot, wanted in slots.items():
                apart = _max_abs(optimizer.state[value][slot] - wanted) / max(_max_abs(wanted), 1e-30)
                agreement.note("parameter", apart, f"step {step}, {slot} of {name}")
    for name, whole in simulation.parameters() if case.pads else ():
        if not _unpadded(whole, case.pads.get(name, ()))[1]:
            agreement.note("parameter", float("inf"), f"step {step}, {name} (padding)")


def _compare_buffers(
    agreement: Agreement, reference: ReferenceRun, simulation: Simulation, roundings: Roundings, step: int
) -> None:
    """Compare the buffers that the model keeps after an update."""
    case = simulation.case
    top = max(1e-30, max((_max_abs(p.detach()) for p in reference.parameters.values()), default=1.0))
    moved = list(case.reference.main.returned("buffer"))
    floor = 1e-3 * max((largest(reference.buffers[name]) for name in moved), default=0.0)
    floor = max(floor, 1e-3 * top)  # a running mean of 0 is nothing but rounding
    for name, pieces, type_ in simulation.buffers():
        expected = reference.buffers[name]
        size = max(largest(expected), floor, 1e-30)
        for rank, piece in pieces.items():
            apart = largest_difference(piece, simulation.part(expected, type_, rank))
            error = roundings.unexplained(Binding("buffer", name), expected, apart, size)
            agreement.note("buffer", error, f"step {step}, buffer {name}, rank {rank}")
