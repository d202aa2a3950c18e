"""Programs that train nothing: those of a step without backward, gradients and the update, and perhaps without loss."""

from __future__ import annotations

from collections.abc import Mapping

from .actions import FORWARD, Purpose, step_kinds
from .program import Function, Program
from .roles import SINGLE


def with_idle(role: str, programs: Mapping[str, Program], purpose: Purpose) -> dict[str, Program]:
    """Return the programs of a role for a purpose as those of a step that trains nothing: every kind of action that
    the purpose leaves out has a program that does nothing. What is proved of a step is so proved of them."""
    made = dict(programs)
    idle = [row for row in step_kinds() if row.program and not row.optional and not row.serves(purpose)]
    for key, program in programs.items():
        if program.action == FORWARD:
            for row in idle:
                staged = row.program == "stage"
                at = key.removesuffix(FORWARD) + row.kind if staged else row.kind
                function = Function("backward" if staged else row.kind.lower(), (), (), ())
                owner = {"stage": program.role, "role": role, "step": SINGLE}[row.program]
                made[at] = Program(owner, row.kind, program.mesh, (function,))
    return made
