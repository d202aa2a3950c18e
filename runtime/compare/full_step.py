"""One step of a build at its full sizes, by the machine of a run and then line by line: ``parc verify --run``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compiler.build.build import Build
from ...compiler.program.binding import LOSS, Binding
from ...compiler.program.program import Line
from ...grammar.codes import FIRST_CHECK_DIFFERS
from ..machine.kernels import KERNELS
from ..ranks.communication import Arrival, Backend, Environment
from ..ranks.faults import RunError
from ..ranks.gather import everywhere
from ..ranks.work import RankState, StepResult
from ..session.session import Session
from .agreement import stacked
from .own_types import bounded, floors, largest_rounding, part_of_bound, varied, whole_batch
from .roundings import ROUNDINGS_OF_A_NARROW_STEP, ROUNDINGS_OF_A_STEP, perturbed


class _Awaited:
    """A backend whose collectives and messages have arrived when they are started."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def collective(self, *args: Any, **options: Any) -> tuple[list[Tensor], None]:
        """Do a collective."""
        return _arrived(*self._backend.collective(*args, **options)), None

    def message(self, *args: Any, **options: Any) -> tuple[list[list[Tensor]], None]:
        """Do one message of several tensors."""
        return _arrived(*self._backend.message(*args, **options)), None


def _arrived(results: Any, arrival: Arrival | None) -> Any:
    if arrival is not None:
        arrival()
    return results


@dataclass(frozen=True, slots=True)
class _LineResult:
    """A line of a program that ran: the words that name it, and the norms of what it made."""

    where: str
    norms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FullStep:
    """The outcome of a step at full sizes on all ranks: the number of tensors that a rank compared, the largest error
    as a part of its bound, and where it is."""

    tensors: int
    largest: float
    at: str
    seconds: float

    def text(self) -> str:
        """Return the line about it."""
        worst = f"the largest error is {self.largest:.2g} of its bound, of the {self.at}"
        tensors = f"{self.tensors} tensor{'s' * (self.tensors != 1)} of a step as computed line by line"
        return f"{tensors} ({worst}; {self.seconds:.1f} s)"


def full_step(build: Build, device: torch.device | None = None, *, compile: bool = False) -> FullStep:
    """Do one step of a build on random data by the run's machine and options, and again line by line with torch's own
    kernels and sums that are awaited at once. Compare the loss, what the model returns, and every rank's gradients and
    buffers. The bounds are measured by a third step, from parameters that are rounded once more. Collective.

    Raises:
        RunError: on every rank: a tensor differs by more than roundings explain; the first line that differs is named.
    """
    start = time.perf_counter()
    formats = [line["format"] for line in build.manifest["compress"]]
    rounding = largest_rounding(build.programs.values(), formats)
    with Session(build, device, compile=compile) as session:
        session.start_from(varied)
        by_run = _results(session.run_step(whole_batch(build, 0)), session.state)
        lines: list[list[_LineResult]] = [[], [], []]
        repeated = partial(_repeated, session)
        plain = {"backend": _Awaited(session.backend), "kernels": {**KERNELS, **session.offloaded.kernels}}
        exact = repeated(replace(session.state), lines[1], **plain)
        moved = repeated(_moved(session.state, rounding), lines[2], **plain)
        worst = _worst(by_run, exact, moved, rounding)
        ranks = everywhere((*worst, session.rank), session.world)
        times, name, rank = max(ranks)
        if times > 1:
            repeated(replace(session.state), lines[0])
            firsts = everywhere(_first_difference(lines, rounding), session.world)
            where = next((f"{line} on rank {at}" for at, line in enumerate(firsts) if line), "")
            raise _differs(build, times, name, rank, where)
    return FullStep(len(exact), times, f"{name} on rank {rank}", time.perf_counter() - start)


def _moved(state: RankState, rounding: float) -> RankState:
    """Return a rank's state whose parameters are rounded once more; replicas on other ranks are rounded alike."""
    moved = {}
    for name, value in state.parameters.items():
        generator = torch.Generator().manual_seed(0)
        moved[name] = (
            perturbed(value.cpu().double(), generator, rounding).to(value) if value.is_floating_point() else value
        )
    return replace(state, parameters=moved)


def _results(result: StepResult, state: RankState) -> dict[Binding, Tensor]:
    """Return the tensors of a step on one rank."""
    tensors = {LOSS: result.loss} | {Binding("gradient", name): value for name, value in result.gradients.items()}
    tensors |= {Binding("buffer", name): value for name, value in state.buffers.items()}
    tensors |= {Binding("output", name): value for name, value in stacked(result.returned).items()}
    return {key: bounded(value.detach()) for key, value in tensors.items() if value.is_floating_point()}


def _repeated(session: Session, state: RankState, lines: list[_LineResult], **options: Any) -> dict[Binding, Tensor]:
    """Repeat the step line by line, and note every line."""

    def watch(action: str) -> Callable[[Line, Sequence[Environment]], None]:
        return lambda line, environments: _note(lines, f"{session.repeating or action}", line, environments[0])

    return _results(session.repeated(state, watch, **options), state)


def _note(lines: list[_LineResult], action: str, line: Line, environment: Mapping[str, Any]) -> None:
    results = (environment[value.name] for value in line.results if value is not None)
    floats = [value for value in results if isinstance(value, Tensor) and value.is_floating_point()]
    module = f" of {line.origin.module}" if line.origin.module else ""
    source = f" at {line.origin.source}" if line.origin.source else ""
    words = f"`{line.op}`{module}{source} in action {action}"
    lines.append(_LineResult(words, tuple(float(bounded(value).double().norm()) for value in floats)))


def _worst(
    by_run: Mapping[Binding, Tensor], exact: Mapping[Binding, Tensor], moved: Mapping[Binding, Tensor], rounding: float
) -> tuple[float, str]:
    """Return the largest error as a part of its bound, and the tensor's name."""
    is_narrow_step, floor_of = rounding > torch.finfo(torch.float32).eps, floors(exact)
    factor = ROUNDINGS_OF_A_NARROW_STEP if is_narrow_step else ROUNDINGS_OF_A_STEP
    worst: tuple[float, str] = 0.0, "loss"
    for key, value in exact.items():
        least = floor_of[key] * math.sqrt(max(value.numel(), 1))
        least = least if is_narrow_step else max(float(value.double().norm()), least)
        bound = factor * (float((moved[key].double() - value.double()).norm()) + rounding * least)
        error = float((by_run[key].double() - value.double()).norm())
        worst = max(worst, (part_of_bound(error, bound), str(key)))
    return worst


def _first_difference(lines: Sequence[Sequence[_LineResult]], rounding: float) -> str:
    """Return the first line whose results by the run's kernels differ from those by torch's own, "" if none does."""
    of_run, of_torch, of_moved = lines
    for by_run, exact, moved in zip(of_run, of_torch, of_moved, strict=False):
        for norms in zip(by_run.norms, exact.norms, moved.norms, strict=False):
            bound = ROUNDINGS_OF_A_STEP * (abs(norms[2] - norms[1]) + rounding * abs(norms[1]))
            if not abs(norms[0] - norms[1]) <= bound:
                return exact.where
    return ""


def _differs(build: Build, times: float, name: str, rank: int, where: str) -> RunError:
    by = "is no finite number" if math.isinf(times) else f"differs by {times:.3g} times what roundings explain"
    message = f"a step of `{build.path}`: the {name} on rank {rank} {by}"
    if where:
        return RunError(FIRST_CHECK_DIFFERS, message, "run without the option or the device that computes it",
                        [f"the first line that differs is {where}"])  # fmt: skip
    notes = ["line by line no result differs: joined lines, reuse of memory, messages in flight or `--compile` do it"]
    return RunError(FIRST_CHECK_DIFFERS, message, "run on another device, or without `--compile`", notes)
