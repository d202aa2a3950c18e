"""Faults of the callables that a plan names, at the line that names them. Neither torch nor the callables are
imported."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

from parc.compiler.capture.callables import CallableError, look_up
from parc.compiler.plan.directive import Directive
from parc.compiler.plan.plan import Plan
from parc.grammar.codes import BAD_DATA, MODEL_FAILED
from parc.grammar.diagnostics import Code, Diagnostic, Label

_ROOT = Path(__file__).resolve().parents[2]


def callable_faults(plan: Plan, folder: Path) -> Iterator[Diagnostic]:
    """Return an error for each callable whose file does not exist, or has no such name, as far as the file's text
    tells."""
    named: list[tuple[Code, Directive, str]] = [(MODEL_FAILED, plan.model, plan.model.callable)]
    named += [(MODEL_FAILED, plan.loss, target) for target in plan.loss.callables]
    named += [(BAD_DATA, line, said.callable) for line, said in plan.sampled if said.callable is not None]
    for code, line, target in named:
        try:
            look_up(target, folder)
        except CallableError as error:
            yield callable_diagnostic(code, error, line)


def callable_diagnostic(code: Code, error: CallableError, *lines: Directive | None) -> Diagnostic:
    """Return the error of a callable, at the first line, or at the argument of a line that it does not take."""
    spans = [
        binding.span
        for line in lines
        if line is not None and error.argument
        for binding in (*line.arguments.bindings("args"), *line.arguments.bindings("name"))
        if binding.name.text == error.argument
    ]
    first = lines[0]
    assert first is not None
    label = Label(spans[0] if spans else first.span)
    return Diagnostic(code, str(error), label, help=error.help, notes=own_trace(error.__cause__))


def own_trace(error: BaseException | None) -> tuple[str, ...]:
    """Return the traceback of the code that the plan names, its model, loss or data, without parc's frames."""
    if error is None:
        return ()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _ours(f.filename)]
    text = traceback.format_list(frames[-6:]) + traceback.format_exception_only(error)
    return ("".join(["the code's own traceback:\n", *text]).rstrip(),)


def _ours(filename: str) -> bool:
    if "/torch/" in filename or filename.startswith("<") or "importlib" in filename:
        return True
    path = Path(filename)
    inside = path.relative_to(_ROOT).parts if path.is_relative_to(_ROOT) else ("",)
    return inside[0] in ("compiler", "grammar", "passes", "runtime", "parc") and "examples" not in inside
