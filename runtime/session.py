"""The library face: load a build, run steps, evaluate, save and restore, in a person's own loop or in ``parc run``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from ..compiler.artifact import Build
from ..compiler.padded_tensors import grow, shrink
from ..compiler.padding import pads_from
from ..compiler.placement import TensorType, assemble, parse_type, take
from ..grammar.codes_build import BAD_BUILD, BAD_STATE
from .backends.distributed import Distributed
from .backends.in_process import InProcess
from .compiled import Regions
from .execute import Backend, Machine
from .faults import Bad, RunError, Watcher, bad_number, bad_tensor
from .feed import Feed, Parts
from .initial import Initial
from .kernels import KERNELS, Kernel
from .opening import check_fits, check_source_of, constants_of, mesh_of, open_build, open_checkpoint, task_of
from .optimizer import make_optimizer, rate, update
from .processes import default_device, join, launched
from .products import kernels_for
from .sizes import AtSizes, BySizes, bound
from .state import save_tensors
from .step import RankState, Stepper, StepResult


@dataclass(frozen=True, slots=True)
class StepReport:
    """A finished step: its number (from 1), the global loss, the gradients' norm before clipping, the learning rate."""

    step: int
    loss: float
    grad_norm: float
    lr: float


class Session:
    """One rank's training state and the programs that advance it.

    Under torchrun (or ``parc run``) each process is one rank of the mesh; without it the mesh must have one rank. A
    batch may have any sizes that the plan declares; those of the plan's own data are the build's, its largest if it was
    not bound to others. With ``compile`` the work between collectives is compiled when a step first meets it.

    Raises:
        RunError: the number of processes is not the mesh's, torch or the model's file is not the build's, the weights
            of its `init` line are not the model's, or there is no compiler.
    """

    def __init__(
        self, build: Build, device: torch.device | None = None, *, check_source: bool = True, compile: bool = False
    ) -> None:
        self.build = build
        self.mesh = mesh_of(build)
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        check_fits(build, self.world)
        self.device = device or default_device()
        self.coordinates = self.mesh.coordinates(self.rank)
        manifest = build.manifest
        self.types = {name: parse_type(text, self.mesh) for name, text in manifest["parameters"].items()}
        self.pads = pads_from(manifest["padding"])
        self.step_number = 0
        self.last_step: int | None = manifest["steps"]  # no data is read ahead beyond it
        programs = list(build.programs.values())
        self.backend: Backend = (
            Distributed(self.mesh, programs, self.rank, self.device) if self.world > 1 else InProcess(self.mesh)
        )
        self.regions = Regions(self.device) if compile else None
        self.kernels = self._agreed(kernels_for(self.device))
        self._by_sizes = BySizes(build, self._at)
        self.feed = self._by_sizes().feed
        if check_source:
            check_source_of(build)
        self.state = self._initial_state()
        self.optimizer = make_optimizer(self.state.parameters, manifest["optimizer"])
        self._given: tuple[AtSizes, Parts, dict[str, torch.Tensor]] = (self._by_sizes(), [], {})

    def _at(self, build: Build) -> AtSizes:
        machine = self.regions.machine if self.regions is not None else Machine
        stepper = Stepper(build.programs, build.actions, self.backend, self.device, machine, kernels=self.kernels)
        return AtSizes(build, stepper, Feed(build, self.mesh, self.coordinates, self.device))

    def _agreed(self, kernels: Mapping[str, Kernel]) -> Mapping[str, Kernel]:
        """Special kernels where every rank would take them: what ranks compute alike is alike to the bit."""
        return kernels if all(row[0] for row in self.exchange([int(kernels is not KERNELS)])) else KERNELS

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading data. Process groups stay: whoever made them ends them."""
        self.feed.close()

    def _initial_state(self) -> RankState:
        constants = constants_of(self.build)
        self._initial = Initial(self.build, task_of(self.build.manifest), self.mesh, self.coordinates, self.device)
        self._updates = {name: constants[name] for name in self.build.manifest["updates"]}
        return self._initial.state(self.types, constants)

    def _take(self, whole: torch.Tensor, type_: TensorType, name: str = "") -> torch.Tensor:
        whole = grow(whole, self.pads.get(name, ()))
        return take(whole, type_.placement, self.mesh, self.coordinates).to(self.device)

    # ---- training

    def gradients(self, batch: Mapping[str, torch.Tensor] | None = None) -> StepResult:
        """Loss, gradients (this rank's pieces) and their norm, for a whole batch or the next of the plan's data.

        Raises:
            RunError: the batch is not one of the plan's, or the data cannot be read.
        """
        at = self._by_sizes(batch)
        parts = at.feed.next(self.step_number, self.last_step) if batch is None else at.feed.cut(batch)
        self._given = at, parts, dict(self.state.buffers)
        (result,) = at.stepper.gradients([self.state], [parts], self.step_number)
        return result

    def update(self, result: StepResult, lr: float | None = None) -> StepReport:
        """Apply the optimizer to what ``gradients`` gave, after a look at the numbers.

        Raises:
            RunError: loss or norm is not finite; no parameter was changed. Every rank raises the same.
        """
        loss = float(result.loss)
        norm = float(result.grad_norm) if result.grad_norm is not None else 0.0
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise bad_number(self.step_number + 1, loss, norm, self._find_bad(), self.regions is not None)
        line = self.build.manifest["optimizer"]
        lr = rate(line, self.step_number + 1) if lr is None else lr
        update(self.optimizer, self.state.parameters, result.gradients, result.grad_norm, line["clip"], lr)
        self.step_number += 1
        return StepReport(self.step_number, loss, norm, float(self.optimizer.param_groups[0]["lr"]))

    def step(self, batch: Mapping[str, torch.Tensor] | None = None, lr: float | None = None) -> StepReport:
        """One step of training: ``gradients`` then ``update``."""
        return self.update(self.gradients(batch), lr)

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> float:
        """The global loss of a whole batch; nothing is changed. Dropout stays as in training."""
        buffers = dict(self.state.buffers)
        at = self._by_sizes(batch)
        (result,) = at.stepper.loss([self.state], [at.feed.cut(batch)], self.step_number)
        self.state.buffers = buffers
        return float(result.loss)

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row of numbers, in rank order, on every rank."""
        if self.world == 1:
            return [list(row)]
        mine = torch.tensor(row, dtype=torch.int64, device=self.device)
        rows = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(rows, mine)
        return [[int(number) for number in other.tolist()] for other in rows]

    def _find_bad(self) -> list[Bad | None]:
        """Run the step again under watch; what each rank saw first, on every rank."""
        at, parts, buffers = self._given
        self.state.buffers = dict(buffers)
        seen = bad_tensor(self.state.parameters, "parameter", self.rank)
        for part in parts:
            floats = {name: value for name, value in part.items() if value.is_floating_point()}
            seen = seen or bad_tensor(floats, "input", self.rank)
        watcher = Watcher(self.rank)
        stepper = Stepper(
            at.build.programs, at.build.actions, self.backend, self.device, kernels=self.kernels, reuse=False
        )
        for action, machine in stepper.machines.items():
            machine.watch = watcher.watch(action)
        stepper.gradients([self.state], [parts], self.step_number)
        self.state.buffers = dict(buffers)
        seen = seen or watcher.found()
        found: list[Bad | None] = [seen]
        if self.world > 1:
            found = [None] * self.world
            dist.all_gather_object(found, seen)
        return found

    # ---- state

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers on the CPU under the model's own names; it loads into the plain module.

        Collective: every rank calls it, every rank gets it.
        """
        whole = {name: self._gather(self.state.parameters[name], type_, name) for name, type_ in self.types.items()}
        whole.update((name, self._gather(self.state.buffers[name], type_)) for name, type_ in self._updates.items())
        for alias, name in self.build.manifest["aliases"].items():
            if name in whole:
                whole[alias] = whole[name]
        # What no line of the programs reads or changes is as it was made.
        return {name: whole[name] if name in whole else self._initial.whole(name) for name in self._initial.kept}

    def _gather(self, piece: torch.Tensor, type_: TensorType, name: str = "") -> torch.Tensor:
        """The whole tensor; of a parameter ``name``, or of its optimizer's state, as the model has it."""
        if not type_.placement.split_axes():
            return piece.detach().cpu().clone()
        pieces = [torch.empty_like(piece) for _ in range(self.world)]
        dist.all_gather(pieces, piece.detach().contiguous())
        whole = assemble([other.cpu() for other in pieces], type_.placement, self.mesh)
        return shrink(whole, self.pads.get(name, ()))

    def save(self, path: Path | str) -> None:
        """Write parameters, optimizer state and the step number, whole and by the model's names (safetensors, JSON).

        Collective: every rank calls it, rank 0 writes. An older checkpoint is replaced once the new one is complete.

        Raises:
            RunError: ``path`` holds something else, or cannot be written.
        """
        tensors = {
            f"parameter.{name}": self._gather(self.state.parameters[name], t, name) for name, t in self.types.items()
        }
        for name, type_ in self.types.items():
            for key, value in self.optimizer.state.get(self.state.parameters[name], {}).items():
                if isinstance(value, torch.Tensor):
                    alike = value.dim() > 0 and value.shape == self.state.parameters[name].shape
                    tensors[f"optimizer.{key}.{name}"] = (
                        self._gather(value, type_, name) if alike else value.cpu().clone()
                    )
        buffers = {name: self._gather(self.state.buffers[name], type_) for name, type_ in self._updates.items()}
        tensors.update((f"buffer.{name}", value) for name, value in buffers.items())
        facts = {"step": self.step_number, "optimizer": self.build.manifest["optimizer"]["name"]}
        fault: list[RunError | None] = [None]
        if self.rank == 0:
            try:
                save_tensors(Path(path), tensors, facts)
            except RunError as error:
                fault = [error]
        failed = self.exchange([int(fault[0] is not None)])[0][0]
        if failed:
            raise fault[0] or RunError(BAD_BUILD, f"rank 0 could not write `{path}`")

    def restore(self, path: Path | str) -> None:
        """Read what ``save`` wrote, under this plan or any other of the same model.

        Raises:
            RunError: it is of another model or optimizer; every fault is named, nothing was changed.
        """
        checkpoint, slots = open_checkpoint(self.build, Path(path))
        try:
            with checkpoint.tensors() as file:
                read = {
                    key: self._take(file.get_tensor(key), type_, name if kind == "parameter" else "")
                    for kind, types in (("parameter", self.types), ("buffer", self._updates))
                    for name, type_ in types.items()
                    for key in (f"{kind}.{name}",)
                }
                states = {name: {slot: self._slot(file, slot, name) for slot in slots[name]} for name in slots}
        except (OSError, SafetensorError) as error:
            raise RunError(BAD_STATE, f"`{path}` cannot be read: {error}") from None
        # Only now, with everything read, is anything changed.
        self.optimizer.state.clear()
        for name, parameter in self.state.parameters.items():
            parameter.copy_(read[f"parameter.{name}"])
            if name in states:
                self.optimizer.state[parameter] = states[name]
        self.state.buffers.update((name, read[f"buffer.{name}"]) for name in self._updates)
        self.step_number = checkpoint.step

    def _slot(self, file: Any, slot: str, name: str) -> torch.Tensor:
        """One value of the optimizer's state: this rank's piece, or a number, which the fused update wants beside."""
        value: torch.Tensor = file.get_tensor(f"optimizer.{slot}.{name}")
        return value.to(self.device) if slot == "step" else self._take(value, self.types[name], name)


def load(
    path: Path | str,
    device: torch.device | None = None,
    sizes: Mapping[str, int] | None = None,
    *,
    compile: bool = False,
) -> Session:
    """A session of a build. In a process that torchrun started, the process group is made if there is none yet.

    ``sizes``: those of the batches that are read from the plan's data, where the plan declares ranges.

    Raises:
        RunError: the build, torch, the sizes or the number of processes does not fit, or there is no compiler.
    """
    build = bound(open_build(path), sizes or {})
    if launched() and not dist.is_initialized():
        check_fits(build, launched())
        join(device)
    return Session(build, device, compile=compile)
