"""Evaluations: a step's programs without backward, gradients and the update."""

from __future__ import annotations

from collections.abc import Mapping

from .actions import ACTIONS, FORWARD, step_kinds
from .program import Function, Program


def with_idle(programs: Mapping[str, Program]) -> dict[str, Program]:
    """Return the programs of a role of an evaluation as those of a step that trains nothing: every kind of action that
    an evaluation leaves out has a program that does nothing. What is proved of a step is so proved of an evaluation."""
    made = dict(programs)
    idle = [row for row in step_kinds() if row.program and not row.optional and not row.evaluated]
    role = next(program.role for program in programs.values() if ACTIONS[program.action].program == "role")
    for key, program in programs.items():
        if program.action == FORWARD:
            for row in idle:
                staged = row.program == "stage"
                at = key.removesuffix(FORWARD) + row.kind if staged else row.kind
                function = Function("backward" if staged else row.kind.lower(), (), (), ())
                made[at] = Program(program.role if staged else role, row.kind, program.mesh, (function,))
    return made
