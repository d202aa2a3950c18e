"""The observer of a run on one rank: it times and profiles steps, and rank 0 tells what they were."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from ..faults import RunError
from ..results import StepReport
from ..session import Session
from .figures import Meter
from .profile import Profile
from .progress import ProgressDisplay
from .writers import FigurePlaces, FiguresWriter


@dataclass(frozen=True, slots=True)
class Observe:
    """The observation that a person asked for: the places of figures, the folder of a profile, and the peak of one
    device in floating-point operations a second, if it is stated."""

    places: FigurePlaces = field(default_factory=FigurePlaces)
    profile: Path | None = None
    peak: float | None = None


@final
class Observer:
    """The observer of a session that trains until step ``steps``. Rank 0 writes figures and says what there is to say;
    the first rank of each node shows progress.

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
        """Close the writers. What they cannot write is told, and neither ends a run nor hides the error that did."""
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
        """Do a step of the session, timed, and profiled if it is one of those."""
        number = self._session.step_number + 1
        self._began = time.perf_counter()
        with nullcontext() if self._profile is None else self._profile.step(number):
            report = self._session.step()
        self._step_s = time.perf_counter() - self._began
        return report

    def own(self, report: StepReport) -> list[int]:
        """Return this rank's row of numbers for ``note``."""
        return self._meter.own(report)

    def note(self, report: StepReport, rows: Sequence[Sequence[int]], notes: Iterable[str] = ()) -> None:
        """Write and show a step, from the rows of all ranks, with lines about it that are always shown."""
        figures = self._meter.figures(report, self._step_s, rows)
        for writer in list(self._writers):
            try:
                writer.step(report.step, **figures)
            except RunError as error:  # that ends no training
                self.say(f"{error.message}; the metrics end at step {report.step - 1}, the training goes on")
                self._writers.remove(writer)
                with suppress(RunError):  # it is told already that they end
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
