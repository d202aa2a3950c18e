"""The loop of ``parc run`` on one rank: steps until the last, metrics, checkpoints, and a clean stop by a signal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Self, final

import torch

from ...compiler.build.build import Build
from ...grammar.codes import REPLICAS_DIFFER
from ..compare.first_check import CheckOutcome
from ..observe.observer import Observe, Observer
from ..ranks.faults import RunError, writing
from ..ranks.processes import launched
from ..ranks.waits import check_trace
from ..ranks.work import StepReport
from ..session.session import Session
from ..state.optimizer import rate
from ..state.step_state import LoadWatch, planned_load
from .failures import begin

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
    """A handler of SIGTERM and SIGINT that notes them, so that a run ends between two steps. It does so too when the
    launcher is gone."""

    def __init__(self) -> None:
        self._signal = 0
        self._parent = os.getppid() if launched() else None
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number

    @property
    def signal(self) -> int:
        """The signal that asked for a stop, 0 for none."""
        orphan = self._parent is not None and os.getppid() != self._parent
        return self._signal or (int(signal.SIGHUP) if orphan else 0)

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
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
    with ExitStack() as stack:
        stack.enter_context(session)
        stop = stack.enter_context(Stop())
        begin()
        _check_places(session, options)
        resumed = options.resume is not None
        observer = stack.enter_context(
            Observer(session, options.observe, options.steps, run_facts(session, checked), resumed)
        )
        session.replicas.warn = lambda text: observer.say(f"warning: {text}")
        observer.say(*([] if checked is None else [checked.text()]), *_start_notes(session, options))
        started, watch = session.step_number, LoadWatch(planned_load(session.build))
        saved = session.step_number if options.resume == options.save else -1
        asked = max(row[0] for row in session.exchange([stop.signal]))
        while session.step_number < options.steps and not asked:
            try:
                report = observer.step()
                if options.eval_every and report.step % options.eval_every == 0:
                    evaluated = {EVAL_LOSS: session.evaluation.mean(session.state)}
                    report = replace(report, metrics={**report.metrics, **evaluated})
                rows = session.exchange([stop.signal, *observer.row(report)])
            except RunError as error:
                raise _with_save(session, options.save, error, max(saved, started)) from error
            asked = max(row[0] for row in rows)
            observer.note(
                report, [row[1:] for row in rows], _step_notes(session, report, watch, report.step == started + 1)
            )
            if options.save is not None and options.save_every and report.step % options.save_every == 0:
                session.save(options.save)
                saved = report.step
        unbegun = asked and session.step_number == started
        if options.save is not None and saved != session.step_number and not unbegun:
            session.save(options.save)
        if options.trace is not None:
            session.write_trace(options.trace)
    if asked and session.rank == 0:
        where = "nothing was saved" if options.save is None or unbegun else f"saved to {options.save}"
        when = f"before step {started + 1}" if unbegun else f"after step {session.step_number}"
        print(f"stopped by {signal.Signals(asked).name} {when}; {where}", file=sys.stderr)
    return 128 + asked if asked else 0


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
    if options.eval_every and (left := session.evaluation.left_out()):
        yield left
    if said := rate_ends(session.build, options.steps):
        yield said
    if idle := session.offloaded.idle:
        yield f"`offload {', '.join(idle)} to cpu` changes nothing here: programs compute in the host's memory"
    if session.regions is not None:
        yield f"compiling {session.regions.distinct} distinct regions in the first step…"


def _with_save(session: Session, folder: Path | None, error: RunError, saved: int) -> RunError:
    """Save the state after the last complete step, and return the error of a step or its evaluation with a note on
    that. ``saved`` is the step of the last checkpoint, or of the run's start. A state in which ranks differ is not
    saved."""
    if session.step_number == saved or error.code is REPLICAS_DIFFER:
        return error
    if folder is None:
        note = f"the state after step {session.step_number} was not saved: there is no `--save`"
    else:
        note = f"the state after step {session.step_number} was saved to {folder}"
        try:
            session.save(folder)
        except RunError as other:
            note = f"the state after step {session.step_number} could not be saved: {other.message}"
    return RunError(error.code, error.message, error.help, (*error.notes, note))


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
