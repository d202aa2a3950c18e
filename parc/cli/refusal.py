"""The message of a check that refused a build."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parc.cli.terminal import show
from parc.grammar.codes import CHECK_FAILED
from parc.grammar.diagnostics import Diagnostic

_FAULTS_SHOWN = 10


def show_refusal(faults: Sequence[object], *, edited: Path | None = None, altered: Sequence[str] = ()) -> int:
    """Show why a build was refused, and return the command's exit code. ``edited`` is the folder that the build was
    read from, where a person may have changed its files; ``altered`` are those that are not as they were built."""
    from parc.compiler.build.directory import again

    notes = [f"changed since the build: {', '.join(altered)}"] if altered else []
    notes += [str(fault) for fault in faults[:_FAULTS_SHOWN]]
    notes += [f"and {len(faults) - _FAULTS_SHOWN} more"] if len(faults) > _FAULTS_SHOWN else []
    message = f"a check refused the build ({len(faults)} fault{'s' * (len(faults) != 1)})"
    help_ = "this is a fault of parc's own: please report the plan and this message"
    help_ = help_ if edited is None else again(edited)
    show([Diagnostic(CHECK_FAILED, message, help=help_, notes=tuple(notes))])
    return 5
