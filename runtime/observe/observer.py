"""The observer of a run on one rank: it times and profiles steps; rank 0 writes their figures, and the first rank of
each host shows their progress.
"""

from __future__ import annotations

import errno
import gzip
import math
import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self, final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch.profiler import ProfilerActivity, profile

from ...compiler.analysis.flops import product_type, step_flops
from ...compiler.build.build import Build
from ...compiler.build.output_files import FileKind, check_file
from ...compiler.sizes.size_range import BATCH
from ...compiler.torch_private import quiet
from ...grammar.bounded import real_path
from ..ranks.faults import RunError, writing
from ..ranks.work import StepReport
from ..session.session import Session
from .writers import FigurePlaces, FiguresWriter

# ---- a profile of a few steps, with the lines of programs as ranges


_PROFILE = FileKind("a profile of parc's", re.compile(rb'(?s)(?:(?!"traceEvents").)*"parc":'))
_WARM_UP_STEPS, _PROFILED_STEPS = 2, 3


@final
class Profile:
    """A profile of three steps after two warm-up steps, or of fewer if the run is shorter.

    Raises:
        RunError: the folder cannot be written, now or after the last of the steps, or has another file of that name.
    """

    def __init__(self, folder: Path, rank: int, device: torch.device, done: int, steps: int) -> None:
        self._folder, self._file = folder, folder / f"rank{rank}.json.gz"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise OSError(errno.EACCES, "the folder takes no files")
        with writing(self._file):
            check_file(self._file, _PROFILE)
        self._first = min(done + _WARM_UP_STEPS + 1, steps)
        self._last = min(self._first + _PROFILED_STEPS - 1, steps)
        self._profile: profile | None = None
        self._activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Enter a block that does step ``number``; it is profiled if it is one of the profile's."""
        if number == self._first:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no lines of the profiler's own on the terminal
            with quiet():
                self._profile = profile(activities=self._activities)
                self._profile.start()
                self._profile.add_metadata("parc", "lines of programs as ranges")
        yield

    def written(self, number: int) -> str:
        """Write the file once step ``number``, the last of them, is done. Return a sentence on its place, "" before."""
        if self._profile is None or number < self._last:
            return ""
        ended, self._profile = self._profile, None
        with quiet():
            ended.stop()
            with writing(self._folder):
                _export(ended, real_path(self._file))
        steps = f"steps {self._first} to {self._last}" if self._first < self._last else f"step {self._last}"
        return (
            f"a profile of {steps} is in {self._folder}, a file for each rank: open rank0.json.gz at ui.perfetto.dev;"
            " a range is a line of a program, with its module, its line in the model, and that of the plan"
        )


def _export(ended: profile, file: Path) -> None:
    """Write a profile, and put it in its place once it is complete.

    Raises:
        OSError: it cannot be written.
    """
    with TemporaryDirectory(prefix=".", dir=file.parent) as folder:
        text, packed = Path(folder, "trace.json"), Path(folder, file.name)
        ended.export_chrome_trace(str(text))
        if not text.exists() or not text.read_bytes()[-64:].rstrip().endswith(b"}"):  # torch says nothing
            raise OSError(errno.EIO, "torch's profiler wrote no whole file", str(file))
        with open(text, "rb") as source, gzip.open(packed, "wb") as target:
            shutil.copyfileobj(source, target)
        os.replace(packed, file)


# ---- the figures of a step: throughput, MFU, memory, waits


_PEAKS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H20": 148e12,
    "A100": 312e12, "A800": 312e12, "A40": 150e12, "A30": 165e12, "A10G": 70e12, "A10": 125e12, "L40S": 362e12,
    "L40": 181e12, "L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "MI300X": 1307e12, "MI250X": 383e12,
}  # fmt: skip
"""The floating-point operations a second of dense products in bfloat16 or float16, by a part of the device's name. Of
two names that fit, the longer one is meant. The numbers are those of data sheets, without sparsity."""


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak floating-point operations a second of a device in products of a type; None if it is not known.

    >>> peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16)
    989000000000000.0
    """
    fits = [part for part in _PEAKS if part in name]
    narrow = dtype in (torch.bfloat16, torch.float16)
    return _PEAKS[max(fits, key=len)] if fits and narrow else None


def work_per_step(build: Build) -> tuple[str, int]:
    """Return the unit and the count of a step's whole batch: ``tokens``, if the plan's first input holds whole numbers
    in two dims, else ``samples``."""
    sizes, line = build.manifest["sizes"], build.manifest["inputs"][0]
    if len(line["dims"]) == 2 and line["dtype"] in ("int32", "int64"):
        return "tokens", math.prod(int(sizes.get(dim, dim)) for dim in line["dims"])
    return "samples", int(sizes.get(BATCH, 1))


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that this rank held in bytes: allocated on a GPU, or resident in the whole process on a
    CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@final
class Meter:
    """The figures of a session's steps. ``peak`` is the peak floating-point operations a second of one device; without
    it, it is looked up by the device's name, and there is no MFU if that is not known."""

    def __init__(self, session: Session, peak: float | None = None) -> None:
        self._device = session.device
        self.what, self.count = work_per_step(session.build)
        self.flops = step_flops(session.build.reference, session.build.microbatches)
        self._all_devices = self._peak(session.build, peak) * session.world

    def _peak(self, build: Build, peak: float | None) -> float:
        """Return the peak of one device, 0 where it is not known."""
        type_ = product_type(build.programs.values())
        if peak is None and self._device.type == "cuda" and type_ is not None:
            peak = peak_flops(torch.cuda.get_device_name(self._device), type_.dtype)
        return peak or 0.0

    def row(self, report: StepReport) -> list[int]:
        """Return this rank's row of numbers for ``figures``: peak bytes, and nanoseconds of a step, of its waits for
        data and of those for other ranks."""
        seconds = (report.seconds, report.waited_for_data, report.waited_for_ranks)
        return [peak_bytes(self._device), *(int(1e9 * part) for part in seconds)]

    def figures(self, report: StepReport, step_s: float, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the figures of a step of ``step_s`` seconds, from the rows of all ranks. Lists have a number for each
        rank. Waits are shares of its step. On a GPU no process waits for other ranks, so there is no such figure."""
        figures: dict[str, Any] = {
            "loss": report.loss, **report.metrics, "grad_norm": report.grad_norm, "lr": report.lr, "step_s": step_s,
            self.what: self.count, f"{self.what}_per_s": self.count / step_s,
            "model_flops_per_s": self.flops / step_s,
        }  # fmt: skip
        if report.loads:
            figures["loads"] = report.loads
        if self._all_devices:
            figures["mfu"] = self.flops / step_s / self._all_devices
        figures["peak_bytes"] = [row[0] for row in rows]
        figures["data_wait"] = [row[2] / max(1, row[1]) for row in rows]
        if self._device.type != "cuda":
            figures["rank_wait"] = [row[3] / max(1, row[1]) for row in rows]
        return figures


# ---- progress on the terminal


@final
class ProgressDisplay:
    """A display on stderr of the loss, the tokens or samples (``what``) a second and the seconds a step: a bar on a
    terminal, else a line now and then.

    Without a terminal the first and the last step have a line, and those between at least ``every_s`` seconds after
    the line before. On any ``node`` but the first, lines begin with its number.
    """

    def __init__(
        self, steps: int, what: str = "tokens", every_s: float = 5.0, console: Console | None = None, node: int = 0
    ) -> None:
        self._steps = steps
        self._what = what
        self._every_s = every_s
        self._node = f"node {node}: " if node else ""
        self._console = console or Console(stderr=True, file=sys.stderr)
        self._shown_at = -math.inf
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=steps, figures="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Show a line of words as it is: brackets and colons in it mean nothing."""
        self._console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def step(self, step: int, loss: float, count: int, step_s: float, mfu: float | None = None) -> None:
        """Show one finished step: its number from 1, its loss, its number of tokens or samples, its seconds, and its
        use of the devices, if that is known."""
        figures = f"loss {loss:.4f}  {count / max(step_s, 1e-9):,.0f} {self._what}/s  {step_s:.3f} s/step"
        figures += f"  MFU {mfu:.1%}" if mfu is not None else ""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=figures)
            return
        now = time.monotonic()
        if step in (1, self._steps) or now - self._shown_at >= self._every_s:
            self._shown_at = now
            self.say(f"{self._node}step {step}/{self._steps}  {figures}")


# ---- the observer


@dataclass(frozen=True, slots=True)
class Observe:
    """The options of observing a run: the places of figures, the folder of a profile, and the peak floating-point
    operations a second of one device, if it is stated."""

    places: FigurePlaces = field(default_factory=FigurePlaces)
    profile: Path | None = None
    peak: float | None = None


@final
class Observer:
    """The observer of a session that trains until step ``steps``. Rank 0 writes figures and messages; the first rank of
    each node shows progress.

    Raises:
        RunError: a place that was named cannot be written.
    """

    def __init__(self, session: Session, observe: Observe, steps: int, run: dict[str, Any], resumed: bool) -> None:
        self._session, self._began = session, time.perf_counter()
        self._meter = Meter(session, observe.peak)
        self._stack, self._step_s = ExitStack(), 0.0
        self._profile: Profile | None = None
        self._writers: list[FiguresWriter] = []
        self._display: ProgressDisplay | None = None
        if observe.profile is not None:
            self._profile = Profile(observe.profile, session.rank, session.device, session.step_number, steps)
        with ExitStack() as opened:
            opened.push(self._close_writers)
            if session.rank == 0:
                for writer in observe.places.open(run, resumed):
                    self._writers.append(writer)
            if os.environ.get("LOCAL_RANK", "0") == "0":
                node = int(os.environ.get("GROUP_RANK", "0"))
                self._display = opened.enter_context(ProgressDisplay(steps, self._meter.what, node=node))
            self._stack = opened.pop_all()
        self.say(*[writer.note for writer in self._writers if writer.note])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _close_writers(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the writers. A failure to write is a message: it neither ends a run nor hides the error that did."""
        for writer in self._writers:
            try:
                writer.close(failed=kind is not None)
            except RunError as error:
                self.say(f"{error.message}; the last of the metrics may be missing there")

    def say(self, *texts: str) -> None:
        """Show lines of words, once for all ranks."""
        if self._session.rank == 0 and self._display is not None:
            for text in texts:
                self._display.say(text)

    def step(self) -> StepReport:
        """Do a step of the session, timed, and profiled if it is one of the profile's."""
        number = self._session.step_number + 1
        self._began = time.perf_counter()
        with nullcontext() if self._profile is None else self._profile.step(number):
            report = self._session.step()
        self._step_s = time.perf_counter() - self._began
        return report

    def row(self, report: StepReport) -> list[int]:
        """Return this rank's row of numbers for ``note``."""
        return self._meter.row(report)

    def note(self, report: StepReport, rows: Sequence[Sequence[int]], notes: Iterable[str] = ()) -> None:
        """Write and show a step, from the rows of all ranks, with lines about it that are always shown."""
        figures = self._meter.figures(report, self._step_s, rows)
        if (checked := self._session.replicas.last) is not None and checked.step == report.step:
            figures |= {"replicas_apart": checked.apart, "replicas_s": checked.seconds}
        for writer in list(self._writers):
            try:
                writer.step(report.step, **figures)
            except RunError as error:
                self.say(f"{error.message}; the metrics end at step {report.step - 1}, the training goes on")
                self._writers.remove(writer)
                with suppress(RunError):  # the message above says that they end
                    writer.close(failed=True)
        self.say(*notes)
        if self._display is not None:
            self._display.step(report.step, report.loss, self._meter.count, self._step_s, figures.get("mfu"))
        self._end_profile(report.step)

    def _end_profile(self, step: int) -> None:
        if self._profile is not None:
            try:
                said = self._profile.written(step)
            except RunError as error:
                said = f"{error.message}; there is no profile of this rank, the training goes on"
            if said:
                self.say(said)
