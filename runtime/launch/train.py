"""The loop of ``parc run`` on one rank: steps until the last, metrics, checkpoints, and a clean stop by a signal."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Self, final

import torch

from ...compiler.build.build import Build
from ...grammar.codes import BAD_STATE, REPLICAS_DIFFER
from ..compare.first_check import CheckOutcome
from ..observe.observer import Observe, Observer
from ..ranks.faults import RunError, writing
from ..ranks.waits import check_trace
from ..ranks.work import StepReport
from ..session.session import Session
from ..state.checkpoint import saved_step
from ..state.optimizer import rate
from ..state.step_state import LoadWatch, planned_load
from .failures import begin, stop_said
from .lifeline import LIFELINE
from .voices import stop_signals, unheard

EVAL_LOSS = "eval_loss"
"""The name of an evaluation's loss among a step's metrics."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run; ``steps`` counts from the first step of training, also after ``resume``."""

    steps: int
    observe: Observe = field(default_factory=Observe)
    eval_every: int | None = None
    save: Path | None = None
    save_every: int | None = None
    resume: Path | None = None
    trace: Path | None = None
    first_check: bool = True


@final
class Stop:
    """A handler of the signals that stop a run, which notes them, so that it ends between two steps. It does so too
    when the launcher is gone, or nobody reads what it prints."""

    def __init__(self) -> None:
        self._signal = 0
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number

    @property
    def signal(self) -> int:
        """The signal that asked for a stop, 0 for none."""
        return self._signal or LIFELINE.signal or unheard()

    def __enter__(self) -> Self:
        for number in stop_signals():
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def train(session: Session, options: Options, checked: CheckOutcome | None = None) -> int:
    """Train until step ``options.steps``; ``checked`` is the outcome of the first check. Return 0, or 128 + the number
    of the signal that stopped every rank.

    Raises:
        RunError: data, checkpoints or numbers are at fault.
    """
    session.last_step = options.steps
    if options.resume is not None:
        session.restore(options.resume)
    with Stop() as stop, ExitStack() as ending:
        asked, unbegun = _train(session, options, checked, stop, ending)
        if asked:
            step = session.step_number
            what = "nothing was saved" if options.save is None or unbegun else f"saved to {options.save}"
            _say_stopped(asked, f"before step {step + 1}" if unbegun else f"after step {step}", what)
    return 128 + asked if asked else 0


def _train(
    session: Session, options: Options, checked: CheckOutcome | None, stop: Stop, ending: ExitStack
) -> tuple[int, bool]:
    """Train, and save the last step. Return the number of the signal that stopped every rank, or 0, and whether it did
    so before the first step. The watch over the launcher lets this rank come to the end of ``ending``."""
    with ExitStack() as stack:
        stack.enter_context(session)
        stack.enter_context(LIFELINE.training())
        begin()
        _check_places(session, options)
        resumed = options.resume is not None
        observer = stack.enter_context(
            Observer(session, options.observe, options.steps, run_facts(session, checked), resumed)
        )
        session.replicas.warn = lambda text: observer.say(f"warning: {text}")
        observer.say(*([] if checked is None else [checked.text()]), *_start_notes(session, options))
        started, watch = session.step_number, LoadWatch(planned_load(session.build))
        checkpoints = Checkpoints(session, options, observer.say)
        asked = max(row[0] for row in session.exchange([stop.signal]))
        while session.step_number < options.steps and not asked:
            try:
                report = observer.step()
                if options.eval_every and report.step % options.eval_every == 0:
                    evaluated = {EVAL_LOSS: session.evaluation.mean(session.state)}
                    report = replace(report, metrics={**report.metrics, **evaluated})
                rows = session.exchange([stop.signal, *observer.row(report)])
            except RunError as error:
                raise checkpoints.noted(error, started) from error
            asked = max(row[0] for row in rows)
            observer.note(
                report, [row[1:] for row in rows], _step_notes(session, report, watch, report.step == started + 1)
            )
            checkpoints.stepped()
        ending.enter_context(LIFELINE.saving())
        unbegun = bool(asked) and session.step_number == started
        if not unbegun:
            checkpoints.end()
        if options.trace is not None:
            session.write_trace(options.trace)
    return asked, unbegun


_WAITS_S = (1.0, 2.0, 4.0, 8.0)
"""The seconds to wait before the last checkpoint of a run is tried again."""


@final
class Checkpoints:
    """The checkpoints of a run: after every ``save_every`` steps, and at its end. One that cannot be written is said
    and tried again, 1, 2, 4, … steps later; the run goes on. Every method is collective."""

    def __init__(self, session: Session, options: Options, say: Callable[[str], None]) -> None:
        self._session, self._folder, self._every, self._say = session, options.save, options.save_every, say
        self._saved = session.step_number if options.resume == options.save else -1
        self._failed, self._again = 0, -1
        """The count of failures in a row, and the step of the next try."""

    def stepped(self) -> None:
        """Save the step that was just done, if it is due."""
        step = self._session.step_number
        if self._folder is None or not self._every or (step % self._every and step != self._again):
            return
        with LIFELINE.saving():
            error = self._try()
        if error:
            self._again = step + min(2**self._failed, self._every)
            self._failed += 1
            self._say(f"warning: step {step} was not saved: {error.message}; tried again after step {self._again}")

    def end(self) -> None:
        """Save the last step, if that was not done.

        Raises:
            RunError: it cannot be written, also not after some seconds.
        """
        if self._folder is None or self._saved == self._session.step_number:
            return
        for wait in (*_WAITS_S, 0.0):
            if (error := self._try()) is None:
                return
            if not wait:
                raise error
            step = self._session.step_number
            self._say(f"warning: step {step} was not saved: {error.message}; tried again in {wait:g} s")
            time.sleep(wait)

    def noted(self, error: RunError, started: int) -> RunError:
        """Save the last complete step, and return the error of the next one, or of an evaluation, with a note on that.
        ``started`` is the step of the run's start. A state in which ranks differ is not saved."""
        step = self._session.step_number
        if step == max(self._saved, started) or error.code == REPLICAS_DIFFER:
            return error
        if self._folder is None:
            note = f"the state after step {step} was not saved: there is no `--save`"
        else:
            try:
                with LIFELINE.saving():
                    failed = self._try()
            except RunError as other:
                failed = other
            said = f"was saved to {self._folder}" if failed is None else f"could not be saved: {failed.message}"
            note = f"the state after step {step} {said}"
        return RunError(error.code, error.message, error.help, (*error.notes, note))

    def _try(self) -> RunError | None:
        """Save the last step. Return the error of a folder that cannot be written.

        Raises:
            RunError: it must not be saved: ranks differ.
        """
        assert self._folder is not None
        try:
            self._session.save(self._folder)
        except RunError as error:
            if error.code != BAD_STATE:  # another rank may have sent it
                raise
            return error
        if self._failed:
            self._say(f"step {self._session.step_number} was saved to {self._folder}")
        self._saved, self._failed, self._again = self._session.step_number, 0, -1
        return None


def _say_stopped(number: int, when: str, what: str) -> None:
    """Say, once on each host, that a signal stopped the run. The launcher says so if no rank does."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"stopped by {signal.Signals(number).name} {when}; {what}", file=sys.stderr)
    stop_said()


def _check_places(session: Session, options: Options) -> None:
    """Check, before training, that the files of the run's end can be written."""
    if options.save is not None:
        session.check_save(options.save)
    if session.rank == 0 and options.trace is not None:
        with writing(options.trace):
            check_trace(options.trace)


def _step_notes(session: Session, report: StepReport, watch: LoadWatch, is_first: bool) -> Iterator[str]:
    """Yield the lines about a step that are always shown."""
    if session.regions is not None and is_first:
        yield f"compiled in {session.regions.seconds:.1f} s; the next run finds them in Inductor's cache"
    if skipped := skip_text(report):
        yield skipped
    if EVAL_LOSS in report.metrics:
        yield f"step {report.step}  {EVAL_LOSS} {report.metrics[EVAL_LOSS]:.4f}"
    if warning := watch.note(report.step, report.metrics.get("rank_imbalance", 1.0)):
        yield f"warning: {warning}"


def skip_text(report: StepReport) -> str:
    """Return the line about a step that was skipped, "" for any other."""
    if not report.skipped:
        return ""
    skipped, scale = report.metrics["skipped_steps"], report.metrics["loss_scale"]
    return (
        f"step {report.step} skipped: the gradients' norm is {report.grad_norm}; the loss scale is now {scale:g}"
        f" ({skipped:g} skipped so far)"
    )


def _start_notes(session: Session, options: Options) -> Iterator[str]:
    """Yield the lines that are shown before the first step."""
    if session.step_number >= options.steps:
        done = f"`{options.resume}` is at step {session.step_number}, and the last step is {options.steps}"
        yield f"{done}: there is nothing left to train; `--steps K` trains until step K"
        return
    yield from session.notes
    replaced = None if session.rank or options.resume is not None or options.save is None else saved_step(options.save)
    if replaced:
        why = f"`{options.save}` has step {replaced}, which the first checkpoint of this run replaces"
        yield f"warning: {why}; `--resume {options.save}` goes on from there"
    if options.eval_every and (left := session.evaluation.left_out()):
        yield left
    if said := rate_ends(session.build, options.steps):
        yield said
    if idle := session.offloaded.idle:
        yield f"`offload {', '.join(idle)} to cpu` changes nothing here: programs compute in the host's memory"
    if session.regions is not None:
        yield f"compiling {session.regions.distinct} distinct regions in the first step…"


def rate_ends(build: Build, steps: int) -> str:
    """Return a note on a run of more steps than the plan has, if the learning rate no longer changes in the last of
    them."""
    line, planned = build.manifest["optimizer"], build.manifest["steps"] or 0
    if line["over"] is None or steps <= max(line["over"], planned):
        return ""
    end = f"the learning rate falls to {rate(line, steps):g} at step {line['over']} and stays there"
    return f"{end}; with `over {steps}` in the plan's `optimizer` line it falls until this run ends"


def run_facts(session: Session, checked: CheckOutcome | None = None) -> dict[str, Any]:
    """Return the first line of a metrics file: versions, mesh, the plan's hash, device, the first step, and what the
    first check covered."""
    manifest = session.build.manifest
    return {
        "parc": manifest["parc"], "torch": torch.__version__, "python": sys.version.split()[0],
        "mesh": dict(session.mesh.declared.axes), "plan": manifest["files"]["plan.parc"], "device": session.device.type,
        "microbatches": manifest["microbatches"], "start": session.step_number,
        "first_check": None if checked is None else checked.facts(),
    }  # fmt: skip
