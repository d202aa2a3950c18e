"""Faults of a run: the error that names them, and the search for the line with the first number that is not finite."""

from __future__ import annotations

import math
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from ...compiler.program.actions import ACTIONS, SCALING, Action, work_kinds
from ...compiler.program.blocks import complete
from ...compiler.program.program import Line
from ...compiler.program.step_values import SKIPPED_STEPS
from ...grammar.codes import BAD_DATA, BAD_NUMBER, NOT_MET, REPLICAS_DIFFER, UNWRITTEN, WORLD_SIZE
from ...grammar.diagnostics import Code, Diagnostic
from .communication import Environment


class RunError(Exception):
    """The error of a run that cannot start or go on. ``code`` is from the table of error codes.

    ``exit_code`` is 1 if the plan, the model or files are at fault, 2 if too few or too many processes were started,
    and 4 if the run itself failed.
    """

    __module__ = "parc"  # the name under which users catch it

    def __init__(self, code: Code, message: str, help: str = "", notes: Sequence[str] = ()) -> None:
        super().__init__(code, message, help, tuple(notes))
        self.code, self.message, self.help, self.notes = code, message, help, tuple(notes)

    def __str__(self) -> str:
        """Return the error as a traceback in a user's own loop shows it: message with code, notes and advice."""
        help_ = f"; {self.help}" if self.help else ""
        return f"[{self.code.name}] {self.message}{help_}" + "".join(f"\n  {note}" for note in self.notes)

    def __repr__(self) -> str:
        return f"RunError({str(self)!r})"

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ends with this error."""
        return {BAD_NUMBER: 4, REPLICAS_DIFFER: 4, NOT_MET: 4, WORLD_SIZE: 2}.get(self.code, 1)

    def diagnostic(self) -> Diagnostic:
        """Return the error in the form in which messages are printed."""
        return Diagnostic(self.code, self.message, help=self.help, notes=self.notes)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Write a file that the user asked for, in the block.

    Raises:
        RunError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RunError(UNWRITTEN, f"`{path}` cannot be written: {reason}", "name a file in another place") from None


_BEYOND = re.compile(r"\bout of (?:bounds|range)\b", re.IGNORECASE)
"""The words of torch for a number that names a place which a tensor does not have."""


@contextmanager
def places_explained() -> Iterator[None]:
    """Enter a step, in which numbers of the data may name places that tensors do not have.

    Raises:
        RunError: they do.
    """
    try:
        yield
    except (RuntimeError, IndexError) as error:
        if not _BEYOND.search(str(error)):
            raise
        message = f"a number names a place that a tensor does not have: {str(error).partition(chr(10))[0]}"
        help_ = "compare the numbers of the data with the rows of tables and the lengths of tensors; an input without B"
        help_ += " is the same in each microbatch, and offsets of bags begin at 0 in each"
        raise RunError(BAD_DATA, message, help_, getattr(error, "__notes__", ())) from error


_NOTHING_COUNTS = "every target of the batch is ignored or masked, so the loss would divide by zero"


@dataclass(frozen=True, slots=True, order=True)
class Bad:
    """The first value of one rank that is not finite; ``order`` compares those of different ranks: see ``Watcher``."""

    order: tuple[int, ...]
    rank: int
    what: str
    notes: tuple[str, ...] = ()


@final
class Watcher:
    """The search for the first line of a step that makes a number that is not finite from finite operands.

    An infinity that a line has as a literal (a mask) does not count; a NaN made of infinities does. Equal blocks share
    their lines, so the line's module is completed by the call that encloses it. Lines are ordered by data flow: by
    microbatch, through the stages forward and back, then in the program. ``current`` returns the action that runs.
    """

    def __init__(self, rank: int, current: Callable[[], Action | None]) -> None:
        self.rank, self._current = rank, current
        self._count = 0
        self._line: tuple[tuple[int, ...], str, Line, str] | None = None
        self._called_by = ""

    def watch(self, action: str) -> Callable[[Line, Sequence[Environment]], None]:
        """Return the hook for the machine of one action's program."""
        return lambda line, environments: self._see(action, line, environments[0])

    def _see(self, action: str, line: Line, environment: Mapping[str, Any]) -> None:
        self._count += 1
        if self._line is not None:
            if line.calls_function and not self._called_by:
                self._called_by = line.origin.module
            return
        if line.calls_function:
            return
        results = [environment[value.name] for value in line.results if value is not None]
        operands = [environment[name] for name in line.uses if name in environment]
        made_nan = _any(results, torch.isnan) and not _any(operands, torch.isnan)
        made_inf = _any(results, torch.isinf) and not _any(operands, _not_finite) and not _writes_infinity(line)
        if made_nan or made_inf:
            self._line = (self._order(), action, line, "NaN" if made_nan else "an infinity")

    def _order(self) -> tuple[int, ...]:
        action = self._current()
        if action is None or not action.works:
            late = action is not None and action.kind in ACTIONS and ACTIONS[action.kind].place == "after"
            return 2 if late else 0, 0, 0, 0, self._count
        order, to = work_kinds().index(action.kind), ACTIONS[action.kind].to
        return 1, action.microbatch, order, action.stage * (to or 1), self._count

    def first_bad(self) -> Bad | None:
        """Return the first bad number, once the step has run."""
        if self._line is None:
            return None
        order, action, line, kind = self._line
        if action == SCALING:
            return Bad(order, self.rank, _NOTHING_COUNTS)
        module = line.origin.module
        if "*" in module and self._called_by:
            module = complete(module, self._called_by)
        phase = ACTIONS[action].phase if ACTIONS[action].works else "reduction"
        source = line.origin.source
        where = f"`{module}`" if module else "the model's own code or the loss" if source else "the loss"
        notes = [f"`{line.op}`{f' at {source}' if source else ''}, {phase}"]
        if line.origin.plan:
            notes.append(f"placed by line {line.origin.plan} of the plan")
        return Bad(order, self.rank, f"the first is {kind}, computed in {where} on rank {self.rank}", tuple(notes))


def bad_tensor(tensors: Mapping[str, torch.Tensor], what: str, rank: int) -> Bad | None:
    """Return the first of a step's inputs that is not finite."""
    for name, tensor in tensors.items():
        if _any([tensor], _not_finite):
            return Bad((), rank, f"the first is in the {what} `{name}` on rank {rank}, before the step began")
    return None


def bad_number(
    step: int, loss: float, norm: float, seen: Iterable[Bad | None], compiled: bool, manifest: Mapping[str, Any]
) -> RunError:
    """Return the error of a step whose loss or gradients are not finite. ``seen`` is what the watch on each rank saw;
    the first of all in data flow is named."""
    first = min((bad for bad in seen if bad is not None), default=None)
    what = (
        f"the loss is {loss}" if not math.isfinite(loss) else f"the gradients' norm is {norm} (the loss is {loss:.6g})"
    )
    notes = () if first is None else (first.what, *first.notes)
    if compiled and first is None:
        notes = ("run line by line, without --compile, every value of this step is finite",)
    empty = first is not None and first.what == _NOTHING_COUNTS
    advice = "leave this batch out, or give it a target that counts" if empty else _advice(manifest)
    return RunError(BAD_NUMBER, f"step {step}: {what}", f"nothing was updated; {advice}", notes)


def _advice(manifest: Mapping[str, Any]) -> str:
    """Return the advice for a step whose numbers are not finite."""
    advice = "lower `lr`, add `clip`, or look at the data of this step"
    if not any(line["type"] == "float16" for line in manifest["precision"]):
        return advice
    if SKIPPED_STEPS.name in manifest["state"]:
        return f"the smallest loss scale does not help: {advice}, or compute values beyond 65504 in `bf16`"
    return f"write `loss_scale dynamic`, which skips such steps, {advice}"


def _not_finite(tensor: torch.Tensor) -> torch.Tensor:
    return ~torch.isfinite(tensor)


def _any(values: Sequence[Any], test: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    return any(
        bool(test(value).any()) for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()
    )


def _writes_infinity(line: Line) -> bool:
    values = [*line.args, *(value for _, value in line.kwargs)]
    return any(isinstance(value, float) and math.isinf(value) for value in values)


# ---- where a process is

StackFrame = tuple[str, str, str]
"""A frame of a stack: file, line, function."""
_FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')
_FOREIGN = tuple(
    f"{folder}{os.sep}" for folder in (sysconfig.get_path("stdlib"), *torch.__path__, Path(__file__).parents[2])
)
"""The folders of Python, of torch and of parc itself."""


def stack_frames(text: str) -> tuple[list[StackFrame], list[StackFrame]]:
    """Return the frames of a stack that Python's faulthandler wrote, the innermost first, and those of them that are in
    a person's own files."""
    frames = _FRAME.findall(text)
    return frames, [frame for frame in frames if not frame[0].startswith((*_FOREIGN, "<"))]
