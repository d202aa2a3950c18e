"""How a check that refused a build is shown."""

from __future__ import annotations

from collections.abc import Sequence

from parc.cli.terminal import show
from parc.grammar.codes_build import CHECK_FAILED
from parc.grammar.diagnostics import Diagnostic

_SHOWN = 10


def show_refusal(faults: Sequence[object], *, edited: bool = False) -> int:
    """Why a build was refused, and the exit code of that; ``edited``: its files are not as they were built."""
    notes = [str(fault) for fault in faults[:_SHOWN]]
    notes += [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
    message = f"a check refused the build ({len(faults)} fault{'s' * (len(faults) != 1)})"
    help_ = "this is a fault of parc's own: please report the plan and this message"
    show([Diagnostic(CHECK_FAILED, message, help="build the plan again" if edited else help_, notes=tuple(notes))])
    return 5
