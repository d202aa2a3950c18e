"""The simulator: all ranks of a build in one process in float64, compared with the captured graph step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...compiler.layout.mesh import Mesh
from ...compiler.layout.pieces import take
from ...compiler.layout.placement import TensorType, parse_type
from ...compiler.ops.rules import facts
from ...compiler.padding.pads import Pad
from ...compiler.padding.tensors import grow, shrink
from ...compiler.program.actions import COUNTING, FORWARD
from ...compiler.program.binding import BUFFERS, LOSS, PARAMETERS, RNG, Binding, Kind
from ...compiler.program.optimizers import AVERAGE, OPTIMIZERS
from ...compiler.program.program import CARRIERS, Line, Program
from ...compiler.program.roles import SINGLE, Role
from ..backends.in_process import InProcess, Meeting
from ..data.random_batch import random_batch
from ..machine.kernels import KERNELS
from ..machine.site import Kernel, Site
from ..ranks.gather import held, owners_of, piece_place, whole_tensor
from ..ranks.work import RankState, StepResult
from ..session.evaluation import real_part, returned_types
from ..state.optimizer import make_optimizer, rate, update
from ..state.step_state import first_state
from ..step import Stepper
from .agreement import DRAWS, TOLERANCE, Agreement, joined, stacked
from .model_run import Case, Microbatches, ReferenceRun, Watch, largest, largest_difference, on_device, wide

# ---- roundings
# It is the measure of a step's errors (as in TTrace, arXiv 2506.09280): what ranks add up in another order is rounded
# otherwise, and a deep model amplifies that as much as it does a rounding of what it is given.


_TIMES = 16
"""The factor on the measured distance: sums in another order round more often than weights and inputs do."""
_MOST = 1e-6
"""The most that is forgiven, relative to a tensor's largest entry. A model that one rounding moves further cannot be
tested."""


@dataclass(slots=True)
class _Begin:
    """The state and the batches at the beginning of a step."""

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    batches: Microbatches
    step: int


class Roundings:
    """The measure of the effect of one rounding in each step of a reference run.

    It is taken once it is asked for: all steps are then taken again beside the run, each from the same state but for
    one rounding, with an optimizer of their own.
    """

    def __init__(self, case: Case, watch: Watch | None = None) -> None:
        self._case, self._watch, self._steps = case, watch, list[_Begin]()
        self._run: ReferenceRun | None = None
        self._taken = 0
        self._found: dict[Binding, torch.Tensor] = {}
        self.amplified = ""
        """The message about the first value that one rounding moves further than can be tested."""

    def begin(self, reference: ReferenceRun, batches: Microbatches, step: int) -> None:
        """Keep the state at the beginning of the reference's next step."""
        parameters = {name: value.detach().clone() for name, value in reference.parameters.items()}
        self._steps.append(_Begin(parameters, dict(reference.buffers), batches, step))

    def beyond(self, what: Binding, expected: torch.Tensor, apart: float, least: float, top: float) -> float:
        """Return the part of the error ``apart`` that rounding does not explain. An error of at most ``least`` is small
        enough, and is returned as it is. ``expected`` is the value of ``what`` in the reference's last step; errors are
        relative to ``top``."""
        if not least < apart < float("inf"):
            return apart
        moved = _TIMES * largest_difference(self._made()[what], expected)
        if moved > _MOST * top and not self.amplified:
            text = f"gradient of {what.name}" if what.kind == "gradient" else str(what)
            self.amplified = f"one rounding of weights and inputs changes the {text} by more than a test can allow"
        return max(0.0, apart - min(moved, _MOST * top))

    def _made(self) -> Mapping[Binding, torch.Tensor]:
        """Return the last step's results from a state that is moved by one rounding."""
        run = self._run = self._run or ReferenceRun(self._case, watch=self._watch)
        while self._taken < len(self._steps):
            begin = self._steps[self._taken]
            generator = torch.Generator().manual_seed(self._taken)
            with torch.no_grad():
                for name, value in begin.parameters.items():
                    run.parameters[name].copy_(_moved(value, generator))
            run.buffers = dict(begin.buffers)
            batches = [{name: _moved(value, generator) for name, value in batch.items()} for batch in begin.batches]
            loss, gradients = run.step(batches, begin.step)
            self._found = {
                LOSS: loss,
                **{Binding("gradient", name): value for name, value in gradients.items()},
                **{Binding("buffer", name): value for name, value in run.buffers.items()},
                **{Binding("output", name): value for name, value in stacked(run.returned).items()},
            }
            self._taken += 1
        return self._found


def _moved(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return each number moved by one rounding: up, down or not at all."""
    if value.dtype != torch.float64:
        return value
    steps = torch.randint(-1, 2, value.shape, generator=generator).to(value)
    return value * (1 + 2.0**-52 * steps)


# ---- two memory spaces in one process: the kernels of lines that store and load, for the simulator.


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


# ---- the simulator: all ranks of a build in one process in float64, compared with the captured graph step


class FormulaUpdates:
    """The updates of some tensors by the formula of the plan's ``line``, each with a state of its own: torch's loop
    over single tensors, beside which the updates of ranks are compared.

    A gradient that is nothing but rounding has a sign, and a first step of Adam takes nothing else of it. So an update
    is not the captured graph's to 1e-10, but it is the formula's of the gradients that the ranks themselves have.

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
            self._optimizers[key] = getattr(torch.optim, row.torch_class)([before.clone()], foreach=False, **arguments)
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


_LATE = (1 << 53) + 1
"""The number of a late step: no type but int64 holds it, and no small modulus leaves it as it is."""
_LEAST_UPDATE = 1e-4
"""The least size of an update beside its parameter's: the sum of the two rounds a smaller one too much to tell."""


class Simulation:
    """All ranks of a build, each with its own pieces and optimizer, in lock step. What lines store lies in a memory
    space of its own. They compute in ``float64``, or in the programs' own types."""

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
        options.setdefault("kernels", TWO_SPACES)
        self.steppers = [
            Stepper(
                role.programs, role.actions, backend, case.device, axis=role.axis, wide=float64, watch=watch, **options
            )
            for role, backend in zip(self.roles, self.backends, strict=True)
        ]
        self.elsewhere = loaded_parameters(program for role in self.roles for program in role.programs.values())
        """The parameters that lie in the other memory space."""
        owners = owners_of(self.roles, self.types)
        states = {rank: self._state(rank, role, owners) for role, backend in zip(self.roles, self.backends, strict=True)
                  for rank in backend.ranks}  # fmt: skip
        self.states = [states[rank] for rank in range(case.mesh.world)]
        self.optimizers = [make_optimizer(state.parameters, case.optimizer) for state in self.states]

    def _state(self, rank: int, role: Role, owners: Mapping[str, Sequence[Role]]) -> RankState:
        def piece(whole: torch.Tensor, type_: TensorType, pads: Sequence[Pad] = ()) -> torch.Tensor:
            own = wide(whole) if self.float64 else whole.to(type_.dtype, copy=True)
            return self.part(grow(own, pads), type_, rank).to(self.case.device)

        parameters = {name: type_ for name, type_ in self.types.items() if role in owners[name]}
        buffered = held(role, BUFFERS)
        buffers = {name: type_ for name, type_ in self._buffer_types().items() if name in buffered}
        return RankState(
            {n: piece(self.case.parameters[n], t, self.case.pads.get(n, ())) for n, t in parameters.items()},
            {n: piece(self.case.buffers[n], t) for n, t in buffers.items()},
            first_state(role.programs, self.case.state, self.case.device, self.float64),
        )

    def part(self, whole: torch.Tensor, type_: TensorType, rank: int) -> torch.Tensor:
        """Return the part of a whole tensor that a rank holds."""
        return take(whole, type_.placement, self.case.mesh, self.case.mesh.coordinates(rank))

    def _buffer_types(self, kinds: Sequence[Kind] = BUFFERS) -> dict[str, TensorType]:
        forwards = (program for role in self.roles for program in role.programs.values() if program.action == FORWARD)
        return {name: value.type for program in forwards for name, value in program.main.bound(*kinds).items()}

    def local_batches(self, batches: Microbatches) -> list[list[dict[str, torch.Tensor]]]:
        """Return each rank's part of each microbatch."""
        programs = [self.case.programs[action] for action in (FORWARD, COUNTING) if action in self.case.programs]
        types = {name: value.type for program in programs for name, value in program.main.bound("input").items()}
        there = [on_device(batch, self.case.device) for batch in batches]
        given = [[(name, whole, types[name]) for name, whole in batch.items() if name in types] for batch in there]
        return [[{name: self.part(whole, type_, rank) for name, whole, type_ in batch} for batch in given]
                for rank in range(self.case.mesh.world)]  # fmt: skip

    def step(self, batches: Microbatches, step: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Return every rank's loss, and the whole gradients, then update every rank."""
        self.before = [{name: value.clone() for name, value in state.parameters.items()} for state in self.states]
        results = self.run(Stepper.gradients, batches, step)
        self.gradients = [result.gradients for result in results]
        names = dict.fromkeys(name for of_rank in self.gradients for name in of_rank)
        whole = {name: self._whole(self.gradients, name) for name in names}
        self.spread = _spread(self.gradients, self.types, self.case.mesh)
        self.norms = [result.grad_norm for result in results]
        self.metrics = [result.metrics for result in results]
        self.returned = [stacked(result.returned) for result in results]
        for state, optimizer, result in zip(self.states, self.optimizers, results, strict=True):
            # ranks of one process share what a collective made, and clipping scales in place
            given = {name: gradient.clone() for name, gradient in result.gradients.items()}
            update(optimizer, self.case.optimizer, step + 1, state.parameters, given, result.grad_norm)
            state.steps.update(result.state)
        return [result.loss for result in results], whole

    def run(self, do: Callable[..., list[StepResult]], batches: Microbatches, step: int) -> list[StepResult]:
        """Run ``Stepper.gradients`` or ``Stepper.loss`` on every rank; roles run side by side."""
        local = self.local_batches(batches)

        def of(stepper: Stepper, ranks: Sequence[int]) -> list[StepResult]:
            states = [lying_elsewhere(self.states[rank], self.elsewhere) for rank in ranks]
            return do(stepper, states, [local[rank] for rank in ranks], step)

        jobs = [
            partial(of, stepper, backend.ranks) for stepper, backend in zip(self.steppers, self.backends, strict=True)
        ]
        made = self.meeting.run(jobs) if len(jobs) > 1 else [jobs[0]()]
        by_rank = {rank: result for backend, results in zip(self.backends, made, strict=True)
                   for rank, result in zip(backend.ranks, results, strict=True)}  # fmt: skip
        return [by_rank[rank] for rank in range(self.case.mesh.world)]

    def _whole(self, ranks: Sequence[Mapping[str, torch.Tensor]], name: str) -> torch.Tensor:
        pieces = {rank: have[name] for rank, have in enumerate(ranks) if name in have}
        return whole_tensor(pieces, self.types[name].placement, self.case.mesh)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return every parameter, put together."""
        for name in self.types:
            yield name, self._whole([state.parameters for state in self.states], name)

    def buffers(self) -> Iterator[tuple[str, dict[int, torch.Tensor], TensorType]]:
        """Yield every buffer that the model keeps: the pieces of the ranks that have it, and its type."""
        for name, type_ in self._buffer_types(("buffer",)).items():
            have = enumerate(state.buffers for state in self.states)
            yield name, {rank: buffers[name] for rank, buffers in have if name in buffers}, type_

    def take_state(self, reference: ReferenceRun) -> None:
        """Continue from the reference's weights and buffers. Rounding errors of a step are then not carried into the
        next, where batch statistics of few elements may amplify them without bound."""
        with torch.no_grad():
            for rank, state in enumerate(self.states):
                for name, parameter in state.parameters.items():
                    whole = grow(reference.parameters[name], self.case.pads.get(name, ()))
                    parameter.copy_(self.part(whole, self.types[name], rank))
                for name, pieces, type_ in self.buffers():
                    if rank in pieces:
                        state.buffers[name] = self.part(reference.buffers[name], type_, rank).clone()

    def parameter_spread(self) -> dict[str, float]:
        """Return, by parameter, the largest difference between two replicas."""
        return _spread([state.parameters for state in self.states], self.types, self.case.mesh)


def _spread(
    ranks: Sequence[Mapping[str, torch.Tensor]], types: Mapping[str, TensorType], mesh: Mesh
) -> dict[str, float]:
    """Return, by tensor, the largest difference between a replica and the first one: they must be one value."""
    spread: dict[str, float] = {}
    for name, type_ in types.items():
        first: dict[tuple[int, ...], torch.Tensor] = {}
        for rank, pieces in enumerate(ranks):
            if name in pieces:
                kept = first.setdefault(piece_place(rank, type_.placement, mesh), pieces[name])
                spread[name] = max(spread.get(name, 0.0), _largest(pieces[name] - kept))
    return spread


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def compare(case: Case, steps: int = 3) -> Agreement:
    """Train both for some steps, and measure the differences of loss, gradients, their norm, updated parameters and
    buffers. If random numbers are drawn, the last of several steps has the number of a late step.

    Errors are relative to a tensor's own largest entry, or to a thousandth of the largest of all gradients, of all
    buffers that steps write (to the largest of all parameters) where that is more, since an entry that is nothing but
    rounding has no error of its own. Of an error above ``TOLERANCE`` what rounding explains is not counted: several
    times what moves where each weight and input of the captured graph is moved by its own rounding. Where scores that a
    top-k tells apart nearly tie, and numbers differ, other random data are drawn.
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
    generator = torch.Generator().manual_seed(seed)
    draws = RNG in case.reference.main.bindings
    for index in range(steps):
        step = _LATE if draws and 0 < index == steps - 1 else index
        batches = random_batch(case.reference, case.microbatches, generator)
        roundings.begin(reference, batches, step)
        loss, gradients = reference.step(batches, step)
        wrong = [
            f"the gradient of `{name}` is not finite" for name, value in gradients.items() if not value.isfinite().all()
        ]
        wrong = [f"the loss is {float(loss)}"] if not loss.isfinite() else wrong
        if wrong:
            agreement.not_finite = f"{wrong[0]} in step {step + 1} on random data"
            return agreement
        losses, found = simulation.step(batches, step)
        top = float(loss.abs().clamp_min(1e-30))
        for rank, value in enumerate(losses):
            apart = roundings.beyond(LOSS, loss, float((value - loss).abs()), TOLERANCE * top, top)
            agreement.note("loss", apart / top, f"step {step}, rank {rank}")
        norm = _norm(found.values())  # of gradients that are compared themselves, so cancelling changes nothing here
        for rank, returned in enumerate(simulation.norms if found else ()):
            error = float("inf") if returned is None else abs(float(returned) - norm) / max(norm, 1e-30)
            agreement.note("norm", error, f"step {step}, rank {rank}")
        _compare_metrics(agreement, reference, simulation, step)
        _compare_returned(agreement, reference, simulation, roundings, step)
        for name, gradient in gradients.items():
            if name not in found and _largest(gradient) > 0:
                agreement.note("gradient", float("inf"), f"step {step}, {name} (missing)")
        floor = 1e-3 * max((_largest(g) for g in gradients.values()), default=0.0)
        for name, value in found.items():
            value, kept = _unpadded(value, case.pads.get(name, ()))
            expected = gradients.get(name, torch.zeros_like(value))
            top, apart = max(_largest(expected), floor, 1e-30), _largest(value - expected)
            if name in gradients:
                apart = roundings.beyond(Binding("gradient", name), expected, apart, TOLERANCE * top, top)
            apart = max(apart, simulation.spread.get(name, 0.0), 0.0 if kept else float("inf"))
            agreement.note("gradient", apart / top, f"step {step}, {name}")
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
                error = _largest((returned[name] - expected).double()) / max(_largest(expected), 1e-30)
            agreement.note("metric", error, f"step {step}, rank {rank}, {name}")


def _compare_returned(
    agreement: Agreement, reference: ReferenceRun, simulation: Simulation, roundings: Roundings, step: int
) -> None:
    """Compare the tensors that the model returns."""
    types = {name: type_ for name, (type_, _) in returned_types(simulation.roles).items()}
    mesh = simulation.case.mesh
    pieces = [{name: value.double() for name, value in of_rank.items()} for of_rank in simulation.returned]
    whole, spread = joined(pieces, types, mesh), _spread(pieces, types, mesh)
    for name, expected in stacked(reference.returned).items():
        error = float("inf")
        if name in whole:
            top = max(_largest(expected), 1e-30)
            apart = max(largest_difference(real_part(whole[name], expected.shape), expected), spread[name])
            error = roundings.beyond(Binding("output", name), expected, apart, TOLERANCE * top, top) / top
        agreement.note("output", error, f"step {step}, output {name}")


def _norm(gradients: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


def _unpadded(value: torch.Tensor, pads: tuple[Pad, ...]) -> tuple[torch.Tensor, bool]:
    """Return a whole value in the model's shape, and whether its padding holds exact zeros."""
    real = shrink(value, pads)
    return real, not pads or torch.equal(grow(real, pads), value)


def _compare_updates(
    agreement: Agreement, simulation: Simulation, formula: FormulaUpdates, norm: float, step: int
) -> None:
    """Compare the updated parameters and the optimizer's state with its formula on each piece of a parameter and of its
    gradient, which have the global ``norm``. Replicas must be bitwise equal, and padding exactly zero."""
    case, spread, seen = simulation.case, simulation.parameter_spread(), set[Hashable]()
    for rank, (before, optimizer) in enumerate(zip(simulation.before, simulation.optimizers, strict=True)):
        for name, old in before.items():
            key = name, piece_place(rank, simulation.types[name].placement, case.mesh)
            if key in seen:
                continue
            seen.add(key)
            value, gradient = simulation.states[rank].parameters[name], simulation.gradients[rank].get(name)
            expected, slots = old, dict[str, torch.Tensor]()
            if gradient is not None:
                expected, slots = formula.after(key, name, old, gradient, norm, step + 1)
            top = max(_largest(expected - old), _LEAST_UPDATE * _largest(old), 1e-30)
            agreement.note("parameter", max(_largest(value - expected), spread[name]) / top, f"step {step}, {name}")
            for slot, wanted in slots.items():
                apart = _largest(optimizer.state[value][slot] - wanted) / max(_largest(wanted), 1e-30)
                agreement.note("parameter", apart, f"step {step}, {slot} of {name}")
    for name, whole in simulation.parameters() if case.pads else ():
        if not _unpadded(whole, case.pads.get(name, ()))[1]:
            agreement.note("parameter", float("inf"), f"step {step}, {name} (padding)")


def _compare_buffers(
    agreement: Agreement, reference: ReferenceRun, simulation: Simulation, roundings: Roundings, step: int
) -> None:
    """Compare the buffers that the model keeps after an update."""
    case = simulation.case
    top = max(1e-30, max((_largest(p.detach()) for p in reference.parameters.values()), default=1.0))
    moved = list(case.reference.main.returned("buffer"))
    floor = 1e-3 * max((largest(reference.buffers[name]) for name in moved), default=0.0)
    floor = max(floor, 1e-3 * top)  # of a mean that is 0 rounding is all there is
    for name, pieces, type_ in simulation.buffers():
        expected = reference.buffers[name]
        size = max(largest(expected), floor, 1e-30)
        for rank, piece in pieces.items():
            raw = largest_difference(piece, simulation.part(expected, type_, rank))
            apart = roundings.beyond(Binding("buffer", name), expected, raw, TOLERANCE * size, size) / size
            agreement.note("buffer", apart, f"step {step}, buffer {name}, rank {rank}")
