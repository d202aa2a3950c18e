"""Session: a build opened on one rank, to train, evaluate, predict, save and restore, in a user's own loop or in
``parc run``."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Self, final, overload

import torch

from ...compiler.build.build import Build
from ...compiler.layout.pieces import take
from ...compiler.layout.placement import TensorType, parse_type
from ...compiler.padding.pads import pads_from
from ...compiler.padding.tensors import grow
from ...compiler.program.actions import Action
from ...compiler.program.binding import BUFFERS
from ...compiler.program.optimizers import AVERAGE, BESIDE
from ...compiler.program.program import Line
from ...compiler.program.roles import Role
from ...compiler.program.stacked import is_stacked, part_names
from ...grammar.codes import BAD_DATA, BATCHES_DIFFER, NO_AVERAGES
from ..backends.distributed import Distributed
from ..backends.in_process import InProcess
from ..data.batches import Batches, Begun
from ..data.feed import Feed, LocalParts
from ..data.sizes import AtSizes, BySizes
from ..machine.compiled import Regions
from ..machine.execute import Machine
from ..machine.products import agreed_kernels
from ..machine.registry import library_of
from ..ranks.communication import Backend, Environment
from ..ranks.faults import Bad, RunError, Watcher, bad_number, bad_tensor, places_explained, writing
from ..ranks.gather import Gatherer, everywhere, held, keepers_of, owners_of
from ..ranks.lockstep import Lockstep
from ..ranks.processes import default_device, place
from ..ranks.replicas import Replicas
from ..ranks.waits import Recorder, clock, clock_offset, write_trace
from ..ranks.wire import sendable
from ..ranks.work import Batch, RankState, StepReport, StepResult, consume
from ..state.initial import Initial
from ..state.offload import Offloaded
from ..state.opening import buffers_of, build_mesh, check_fits, check_source_of, constants_of, task_of
from ..state.optimizer import check_rates, rate, read_by_steps, update
from ..state.saving import LocalPart, StateFiles, checkpoint_facts, stored_of
from ..state.step_state import changed_state, layers_of, load_figures, loads_in, scale_figures, skips, state_after
from ..step import Stepper
from .evaluation import Evaluation, check_trains, evaluation_of
from .one_build import hash_at_any_sizes

sendable(Bad)

# ---- the full state dict


@final
class FullState:
    """The full state dict of a build: parameters of these ``types``, and the buffers that steps change, gathered from
    the ranks that hold them."""

    def __init__(self, build: Build, gatherer: Gatherer, types: Mapping[str, TensorType]) -> None:
        roles, constants = tuple(build.roles.values()), constants_of(build)
        self._gatherer, self._types, self._aliases = gatherer, types, build.manifest["aliases"]
        self._pads = pads_from(build.manifest["padding"])
        self._updates = {name: constants[name] for name in buffers_of(build)}
        self.owners: Mapping[str, Sequence[Role]] = owners_of(roles, types)
        """The roles that hold each parameter."""
        self._keepers = keepers_of(roles, self._updates)

    def gather(self, state: RankState, initial: Initial) -> dict[str, torch.Tensor]:
        """Return whole tensors on the CPU by all names of the module's own state dict; those that no step changes are
        ``initial``. Collective."""
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


# ---- the session

_GOING_ON = "session.step beside another"
"""The call of ranks that go on with a step which they have begun, or begin the next one beside it."""
LineWatch = Callable[[Line, Sequence[Environment]], None]
"""A function that is called after a line with the environment of each rank of the process."""


class Session:
    """The training state of one rank, and the programs that advance it.

    Under torchrun (or ``parc run``) each process is one rank of the mesh. Without it the mesh must have one rank. A
    batch may have any sizes that the plan declares. Batches of the plan's own data have the sizes given to ``load``, or
    the largest. With ``compile`` the work between collectives is compiled when a step first reaches it. With ``trace``
    the session keeps the time of every action for ``write_trace``.

    Raises:
        RunError: the number of processes is not the mesh's, torch or the model's file is not the build's, the weights
            of its `init` line are not the model's, or there is no compiler.
    """

    def __init__(
        self,
        build: Build,
        device: torch.device | str | None = None,
        *,
        check_source: bool = True,
        compile: bool = False,
        trace: bool = False,
    ) -> None:
        self.build, self._layers, self._begun = build, layers_of(build), clock()
        self._listeners: list[Callable[[StepReport], object]] = []
        self.mesh = build_mesh(build)
        self.rank, self.world = place()
        check_fits(build, self.world)
        self.device = torch.device(device) if device is not None else default_device()
        self.coordinates = self.mesh.coordinates(self.rank)
        self.types = {name: parse_type(text, self.mesh) for name, text in build.manifest["parameters"].items()}
        self.role = build.role_at(self.coordinates)
        self._roles = tuple(build.roles.values())
        ranks = [build.role_at(self.mesh.coordinates(rank)) for rank in range(self.world)]
        self._full_state = FullState(build, Gatherer(self.mesh, self.rank, self.device, ranks), self.types)
        self.recorder = Recorder(self.device) if trace else None
        self.step_number, self._reading = 0, threading.Lock()
        self.notes: tuple[str, ...] = ()
        self.checked = ""
        """The line about the first check that ``parc.load(check=True)`` did."""
        self._together = Lockstep(self.rank, self.world, self.device)
        self.last_step: int | None = build.manifest["steps"]
        self.backend: Backend = InProcess(self.mesh)
        if self.world > 1:
            programs = build.every_program()
            self.backend = Distributed(self.mesh, programs, self.rank, self.device, self.role.axis, build.stage_ranks)
        self.regions = Regions(self.device) if compile else None
        self.offloaded = self._together.agreed("parc.load", lambda: Offloaded(build, self.role, self.rank, self.device))
        agreed = agreed_kernels(self.device, self.exchange)
        self.kernels = {**agreed, **self.offloaded.kernels} if self.offloaded.kernels else agreed
        self.products = library_of(self.kernels)
        self._by_sizes = BySizes(build, self._at)
        self.feed = self._by_sizes().feed
        if check_source:
            check_source_of(build)
        self.state = self._initial_state()
        self.optimizer = self.offloaded.make_optimizer(self.state.parameters)
        self._batches = Batches(self._by_sizes, self.mesh, self._together)
        self._files = StateFiles(stored_of(build), self.mesh, self._together, [role.name for role in ranks])
        self.replicas = Replicas(build, self.mesh, ranks, self._together, self.state, self.optimizer)
        self._repeating: Stepper | None = None
        self._coming: tuple[Begun, Batch | None] | None = None
        """The step that was begun beside the last one, and its batch, None for one of the plan's data."""
        self.weights_mark = object()
        """The mark of the weights that gradients are computed with: another one after each change of the weights."""
        self._last_batch: tuple[AtSizes, LocalParts, dict[str, torch.Tensor]] = (self._by_sizes(), [], {})

    def _at(self, build: Build) -> AtSizes:
        self.offloaded.reserve(build)
        machine = self.regions.machine if self.regions is not None else Machine
        stepper = self._stepper(build, machine, recorder=self.recorder)
        return AtSizes(build, stepper, Feed(build, self.mesh, self.coordinates, self.device, self._reading))

    def _stepper(
        self, build: Build, machine: Callable[..., Machine] = Machine, backend: Backend | None = None, **options: Any
    ) -> Stepper:
        role, options = build.role_at(self.coordinates), {"kernels": self.kernels, **options}
        backend = self.backend if backend is None else backend
        return Stepper(role.programs, role.actions, backend, self.device, machine, axis=role.axis, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading data, and remove the files of offloaded state. Process groups stay: their maker ends them."""
        self.feed.close()
        if "evaluation" in vars(self):
            self.evaluation.close()
        self.offloaded.close()

    def _initial_state(self) -> RankState:
        constants = constants_of(self.build)
        self._initial = Initial(self.build, task_of(self.build.manifest), self.mesh, self.coordinates, self.device)
        buffered = held(self.role, BUFFERS) if self.role.axis else constants
        return self._initial.state(
            {name: type_ for name, type_ in self.types.items() if self.role in self._full_state.owners[name]},
            {name: type_ for name, type_ in constants.items() if name in buffered},
            self.offloaded.parameter,
        )

    def start_from(self, make: Callable[[str, torch.Tensor], torch.Tensor]) -> str:
        """Set every parameter to what ``make`` returns for its name and its whole initial value. Return the name of the
        first whose initial pieces on this rank were not those of the whole, "" if there is none."""
        wrong, self._coming = "", None
        for name, piece in self.state.parameters.items():
            initial, type_ = self._initial.whole(name), self.types[name]
            wanted, value = (self._piece(name, whole.to(type_.dtype)) for whole in (initial, make(name, initial)))
            if not wrong and not _same_values(piece.cpu(), wanted):
                wrong = name
            piece.copy_(value)
            for slot, beside in self.optimizer.state.get(piece, {}).items():
                if slot in BESIDE:
                    beside.copy_(value)  # where state is allocated before the first step
        return wrong

    def _piece(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of a whole parameter."""
        grown = grow(whole, pads_from(self.build.manifest["padding"]).get(name, ()))
        return take(grown, self.types[name].placement, self.mesh, self.coordinates)

    # ---- training

    def gradients(
        self, batch: Batch | None = None, *, local: Batch | None = None, coming: Batch | None = None
    ) -> StepResult:
        """Compute the loss, this rank's parts of the gradients, and the norm of all gradients. Nothing is updated.

        ``batch`` is the whole batch of a step, the same on every rank. ``local`` is the samples of this rank alone.
        Ranks that differ only in axes that do not split the batch must give the same samples. Without both, the session
        reads the next batch of the plan's data. ``coming`` is what the next call will be given in the same way, the
        same object, unchanged: under `schedule async` its step begins beside this one. Other schedules do not read it.

        Raises:
            RunError: on every rank: a batch is not one of the plan's, the ranks did not give one batch, the data cannot
                be read, an earlier error left a step, or ranks hold different numbers of one tensor.
        """
        self._check_trains()
        self._begun = clock()
        given = batch if local is None else local
        goes_on = coming is not None or (given is None and self._has_more)
        begun = self._go_on(given, goes_on)
        if begun is None:
            begun = self._batches.begin("session.step", batch, local, self._read(), self.step_number, self.last_step)
        if goes_on and begun.at.stepper.overlaps:
            after = self._next(None if local is not None else coming, coming if local is not None else None)
            if after is not None and after.at is begun.at:  # programs of other sizes have other messages
                self._coming = after, coming
        return self._finished(begun)

    def _go_on(self, given: Batch | None, goes_on: bool) -> Begun | None:
        """Return the step that was begun beside the last one, if it is of the batch that is given now."""
        kept, self._coming = self._coming, None
        if kept is None or kept[1] is not given or kept[0].work[0].step != self.step_number:
            return None
        if not goes_on:  # else ranks agree on the next batch
            self._together.meet(_GOING_ON)
        kept[0].work[0].state = self._read()
        return kept[0]

    @property
    def _has_more(self) -> bool:
        """True where the plan's data have a batch for the step after this one, as far as is known."""
        return self.last_step is None or self.step_number + 1 < self.last_step

    def _next(self, batch: Batch | None, local: Batch | None) -> Begun | None:
        """Begin the step after this one with the newest weights; None if the plan's data have no more batches."""
        try:
            step = self.step_number + 1
            return self._batches.begin(_GOING_ON, batch, local, self.state, step, self.last_step, beside=True)
        except RunError as error:
            if (batch is not None or local is not None) and error.code in (BAD_DATA, BATCHES_DIFFER):
                message = f"the batch that is coming: {error.message}"
                raise RunError(error.code, message, error.help, error.notes) from None
            if error.code != BAD_DATA:
                raise
            return None  # the next step says so, if it is asked for

    def _read(self) -> RankState:
        """Return the state with the weights that the next step computes with."""
        if not self.build.trains:
            return self.state
        line = self.build.manifest["optimizer"]
        return replace(self.state, parameters=read_by_steps(self.optimizer, line, self.state.parameters))

    def run_step(self, batch: Batch) -> StepResult:
        """Run the programs of a step up to the gradients, as ``gradients`` does; those of a build for inference run
        forward alone."""
        self._coming = None
        begun = self._batches.begin("session.step", batch, None, self._read(), self.step_number, self.last_step)
        return self._finished(begun)

    def _finished(self, begun: Begun) -> StepResult:
        with self._together.doing(f"step {self.step_number + 1}", self.state), places_explained():
            self._last_batch = begun.at, begun.parts, dict(self.state.buffers)
            coming = () if self._coming is None else self._coming[0].work
            (result,) = begun.at.stepper.finish(begun.work, self.step_number, coming)
        result.weights = self.weights_mark
        return result

    def update(self, result: StepResult, lr: float | None = None) -> StepReport:
        """Clip the gradients that ``gradients`` returned, and let the optimizer apply them.

        ``lr`` is the learning rate of this step; without it, the plan's ``optimizer`` line says it. A loss or norm that
        is not finite is an error; but a dynamic loss scale skips such a step: parameters, the optimizer's state and
        buffers are as before it.

        Raises:
            RunError: loss or norm is not finite, the result was used before or is of other weights, ``lr`` is no rate,
                or something else sets the optimizer's, as a scheduler: on every rank, and nothing was changed.
        """
        self._check_trains()
        step, line = self.step_number + 1, self.build.manifest["optimizer"]
        check_rates(self.optimizer, line, lr)
        consume(result, self.weights_mark)
        loss, norm = float(result.loss), float(result.grad_norm) if result.grad_norm is not None else 0.0
        skipped = skips(self.state.steps, result.state, norm)
        if not skipped and not (math.isfinite(loss) and math.isfinite(norm)):
            with self._together.doing(f"step {step}", self.state):
                first_bad = self._find_bad()
            raise bad_number(step, loss, norm, first_bad, self.regions is not None, self.build.manifest)
        lr = rate(line, step) if lr is None else lr
        with self._by_sizes().stepper.recorded(str(self.role.actions[-1]), "work", self.step_number):
            if skipped:
                self.state.buffers = dict(self._last_batch[2])
            else:
                trained = self.state.parameters
                units = self.offloaded.units(trained)
                update(self.optimizer, line, step, trained, result.gradients, result.grad_norm, lr, units)
        self.weights_mark = object()
        self.state.steps.update(state_after(result.state, skipped))
        self.step_number = self._together.stepped(step, float(lr))
        self.replicas.stepped(step)
        return self._report(loss, norm, float(lr), result.metrics, skipped)

    def _report(
        self, loss: float, norm: float, lr: float, metrics: Mapping[str, torch.Tensor], skipped: bool
    ) -> StepReport:
        """Return the report of the step that was just done, after all listeners were called with it."""
        loads = loads_in(metrics, self._layers)
        single = {name: float(value) for name, value in metrics.items() if not value.dim()}
        figures = single | load_figures(loads, self._layers) | scale_figures(self.state.steps)
        times = (after - before for before, after in zip(self._begun, clock(), strict=True))
        report = StepReport(self.step_number, loss, norm, lr, figures, skipped, loads, *times)
        for call in self._listeners:
            call(report)
        return report

    def on_step(self, call: Callable[[StepReport], object]) -> None:
        """Call a function on this rank after every later step, with its report. Its exceptions leave ``update``."""
        self._listeners.append(call)

    def step(
        self, batch: Batch | None = None, lr: float | None = None, *, local: Batch | None = None,
        coming: Batch | None = None,
    ) -> StepReport:  # fmt: skip
        """Do one step of training: ``gradients`` of the batch, then ``update`` with the learning rate. The report is
        that of the step of this batch, also where the next one is begun beside it."""
        return self.update(self.gradients(batch, local=local, coming=coming), lr)

    def evaluate(self, batch: Batch | None = None, *, local: Batch | None = None) -> float:
        """Return the loss of one batch with the model in ``eval()``: without dropout, and with BatchNorm's running
        statistics. Nothing changes. The batch is given as to ``gradients``; without it, one batch of the evaluation's
        data is read. ``evaluation.mean(state)`` reads them all. The plan needs an ``eval`` line."""
        return self.evaluation.loss(batch, local, self.state, self.step_number)

    @overload
    def predict(
        self, batch: Batch | None = None, *, local: Batch | None = None, split: Literal[False] = False
    ) -> dict[str, torch.Tensor]: ...

    @overload
    def predict(
        self, batch: Batch | None = None, *, local: Batch | None = None, split: Literal[True]
    ) -> dict[str, LocalPart]: ...

    def predict(
        self, batch: Batch | None = None, *, local: Batch | None = None, split: bool = False
    ) -> dict[str, torch.Tensor] | dict[str, LocalPart]:
        """Return the tensors that the model returns for a batch in ``eval()``, by name: ``logits``, ``1``, or
        ``output`` for the only one. They are whole and on the CPU, with the samples of the batch; with ``split`` they
        are what this rank holds. The batch is given as to ``evaluate``, and inputs that the loss alone reads may be
        left out; a session of a plan for inference reads the next batch of the plan's data at each call without one.
        Tensors without a row for each sample, as a mean over the batch, are left out.

        Collective: every rank calls it, every rank gets all samples of ``batch``, or those of its own ``local``.
        """
        returned = self.evaluation.predict(batch, local, self.state, self.step_number, split)
        if batch is None and local is None and not self.build.trains:
            self.step_number = self._together.stepped(self.step_number + 1)
        return returned

    @cached_property
    def evaluation(self) -> Evaluation:
        """The programs that evaluate the model. ``session.evaluation.mean(session.state)`` returns the mean loss over
        the evaluation's data, a run's `eval_loss`. Collective."""
        build = evaluation_of(self.build)
        if build is self.build:
            return Evaluation(build, self._by_sizes, self.mesh, None, self._together)
        return Evaluation(build, BySizes(build, self._at), self.mesh, self._initial, self._together)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Enter a block in which the session uses the averages of the plan's `ema` line instead of its weights:
        ``evaluate``, ``predict`` and ``state_dict`` read them. No step is done in it, and nothing is saved or restored.

        Raises:
            RunError: the plan has no such line.
        """
        if AVERAGE not in self.build.manifest["optimizer"]:
            raise RunError(NO_AVERAGES, "the plan has no `ema` line", "add one, as `ema 0.999`, and build again")
        trained, outside, kept = self.state, self._together.inside, self.optimizer.state
        averages = {
            name: kept[value].get(AVERAGE, value).to(value.device) if value in kept else value
            for name, value in trained.parameters.items()
        }
        self.state, self._together.inside = replace(trained, parameters=averages), "in `session.averaged()`"
        try:
            yield
        finally:
            self.state, self._together.inside = trained, outside

    def _check_trains(self) -> None:
        check_trains(self.build)
        if self._together.inside:
            message = "inside `session.averaged()` the session has averages instead of its weights"
            raise RunError(NO_AVERAGES, message, "train, save and restore after the block")

    def exchange(self, row: Sequence[int], act: Callable[[], object] | None = None) -> list[list[int]]:
        """Return every rank's row of numbers, in rank order, on every rank, after each has done what ``act`` does.

        Raises:
            RunError: on every rank: that of the first rank whose ``act`` failed.
        """
        return self._together.exchanged("session.exchange", lambda: (act and act(), row))[1]

    def write_trace(self, path: Path | str) -> None:
        """Write every rank's actions with their times, for Perfetto or chrome://tracing.

        Collective: every rank calls it, rank 0 writes.

        Raises:
            RunError: the file cannot be written.
        """
        assert self.recorder is not None, "the session keeps no trace"
        offset = clock_offset(partial(self._together.meet, "session.write_trace"), self.rank)
        ranks = everywhere((f"rank {self.rank} ({self.role.name})", offset, [*self.recorder.spans]), self.world)
        if self.rank == 0:
            with writing(Path(path)):
                write_trace(Path(path), hash_at_any_sizes(self.build), ranks)

    def repeated(
        self, state: RankState, watch: Callable[[str], LineWatch], backend: Backend | None = None, **options: Any
    ) -> StepResult:
        """Repeat the gradients of the last batch line by line, with the parameters of a ``state``, whose buffers are
        set to those before the batch, and changed. ``watch`` returns the function that an action's program calls after
        each line; ``options`` are a machine's."""
        at, parts, buffers = self._last_batch
        stepper = self._stepper(at.build, backend=backend or self.backend, reuse=False, **options)
        for machine in stepper.machines.values():
            machine.watch = watch(machine.program.action)
        self._repeating, state.buffers = stepper, dict(buffers)
        (result,) = stepper.gradients([state], [parts], self.step_number)
        self._repeating = None
        return result

    @property
    def repeating(self) -> Action | None:
        """The action that ``repeated`` is in."""
        return None if self._repeating is None else self._repeating.current

    def _find_bad(self) -> list[Bad | None]:
        """Repeat the step line by line. Return, on every rank, the first value of each rank that is not finite."""
        _, parts, buffers = self._last_batch
        self.state.buffers = dict(buffers)
        state = self._read()
        bad = bad_tensor(state.parameters, "parameter", self.rank)
        for part in parts:
            floats = {name: value for name, value in part.items() if value.is_floating_point()}
            bad = bad or bad_tensor(floats, "input", self.rank)
        watcher = Watcher(self.rank, lambda: self.repeating)
        self.repeated(state, watcher.watch)
        return everywhere(bad or watcher.first_bad(), self.world)

    # ---- state

    @overload
    def state_dict(self, local: Literal[False] = False, ema: bool = False) -> dict[str, torch.Tensor]: ...

    @overload
    def state_dict(self, local: Literal[True], ema: bool = False) -> dict[str, LocalPart]: ...

    def state_dict(self, local: bool = False, ema: bool = False) -> dict[str, torch.Tensor] | dict[str, LocalPart]:
        """Return whole parameters and buffers on the CPU under the model's own names; they load into the plain module.

        Collective: every rank calls it, and gets the result. With ``local`` it is not collective: it returns the parts
        that this rank holds, and their places in the whole tensors. With ``ema`` the weights are their averages.

        Raises:
            RunError: ``ema`` without a line `ema` in the plan.
        """
        if ema:
            with self.averaged():
                return self.state_dict(True) if local else self.state_dict()
        if local:
            return self._files.local(self.state, self.build.manifest["aliases"], self._initial.kept)
        self._together.meet("session.state_dict")
        with self._together.doing("a gathering of weights", self.state):
            return self._full_state.gather(self.state, self._initial)

    def save(self, path: Path | str) -> None:
        """Write parameters, optimizer state and the step number by the model's names (safetensors, JSON). Each rank
        writes its own parts, so no rank holds more than in training.

        Collective: every rank calls it, and reaches the folder. A complete checkpoint replaces an older one.

        Raises:
            RunError: on every rank: ``path`` holds something else, or cannot be written; or ranks hold different
                numbers of one tensor.
        """
        self._check_trains()
        self.replicas.due()
        facts = checkpoint_facts(self.build, self.feed.facts(self.step_number), changed_state(self.state.steps))
        self._files.save(Path(path), self.state, self.optimizer, facts)
        self.replicas.saved(Path(path), self.step_number)

    def check_save(self, path: Path | str) -> None:
        """Check that all ranks reach the folder in which they will save.

        Collective: every rank calls it.

        Raises:
            RunError: on every rank: one does not reach it, or nothing can be written there.
        """
        self._files.check_shared(Path(path))

    def restore(self, path: Path | str) -> None:
        """Read a checkpoint of ``save``, under this plan or any other of the same model. Each rank reads its own parts.
        Under a plan for inference it reads the model's parameters and buffers and nothing else: the checkpoint may be
        of any optimizer, and the number of steps done stays.

        Collective: every rank calls it.

        Raises:
            RunError: on every rank: it is of another model or optimizer, or was altered; the first faults are named,
                nothing was changed.
        """
        if self.build.trains:
            self._check_trains()
        facts, self.notes = self._files.restore(
            Path(path), self.build, self.state, self.optimizer, self.offloaded.holds_slots
        )
        self.weights_mark, self._coming = object(), None
        if self.build.trains:
            self.step_number = self._together.stepped(self.feed.go_on(facts))
            self.replicas.restored(Path(path), self.step_number)


def _same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors hold the same numbers: functions of other devices may round the last digits."""
    return torch.equal(first, second) or torch.allclose(first, second, rtol=1e-5, atol=0.0, equal_nan=True)
