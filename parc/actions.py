"""The registration of further kinds of actions of a step, beside those of parc."""

from __future__ import annotations

import re

from parc.compiler.program.actions import ACTIONS, ActionRow
from parc.passes.programs.step_programs import MAKERS, Maker
from parc.runtime.compare.model_run import METRICS, Metrics
from parc.runtime.step import HANDLERS, Handler

TABLES = (ACTIONS, MAKERS, METRICS, HANDLERS)
"""All tables by an action's kind."""


def register_action(
    row: ActionRow, make: Maker | None = None, *, metrics: Metrics | None = None, run: Handler | None = None
) -> None:
    """Add a kind of action to all steps for which ``make`` returns a program; see ``docs/adding.md``.

    ``metrics`` says what the numbers that its program returns are for a model that is not cut: the build is tested
    against them. ``run`` does it where more is to do than to run its program.

    Raises:
        ValueError: there is such a kind, its name is none, or its program has no maker.
    """
    if row.kind in ACTIONS or re.fullmatch("[A-Z]+", row.kind) is None:
        raise ValueError(f"`{row.kind}` is the name of another kind of action, or is not in capital letters alone")
    if bool(row.program) != (make is not None):
        raise ValueError(f"`{row.kind}` has a maker just if it runs a program")
    ACTIONS[row.kind] = row
    if make is not None:
        MAKERS[row.kind] = make
    if metrics is not None:
        METRICS[row.kind] = metrics
    if run is not None:
        HANDLERS[row.kind] = run
